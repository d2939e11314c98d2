"""config.json of the tiny model: the release's fields, small numbers, every constraint kept.

What the numbers must satisfy:

- every matrix that is packed has an input width that is a multiple of 128, the group size;
- three Gated DeltaNet layers, then one of sparse attention, as in the release; the n-gram table sits
  on a linear layer, which the config counts from one;
- head sizes, rotary sections and the indexer are those of the release, because GPU kernels are
  compiled for them; SGLang's top-k needs indexer_budget / indexer_compress_ratio = 512 (or 2048).
  The budget of 2,048 costs a CPU run nothing: up to there, all tokens are selected;
- the rows of the n-gram table divide evenly into its shards, of which there are more than ten;
- the vocabulary has unused rows above the tokenizer's, and one vision width is no multiple of 32.
"""

from __future__ import annotations

from typing import Any

from q38.base.errors import InputError
from q38.synth.tokenizer import SPECIAL_TOKENS, special_id

VOCAB = 2048
INTERVAL = 4  # every fourth layer is sparse attention


def tiny_config(*, layers: int = 4, fp8: bool = False) -> dict[str, Any]:
    """The whole config.json, nested as in the release.

    Raises:
        InputError: `layers` has no attention layer or does not end on one.
    """
    if layers < INTERVAL or layers % INTERVAL:
        raise InputError(
            f"{layers} layers",
            where="--layers",
            remedy=f"give a multiple of {INTERVAL}, so that both kinds occur",
        )
    config: dict[str, Any] = {
        "architectures": ["Qwen4ExpForConditionalGeneration"],
        "dtype": "bfloat16",
        "image_token_id": special_id("<|image_pad|>"),
        "model_type": "qwen4_exp",
        "text_config": _text(layers),
        "tie_word_embeddings": False,
        "video_token_id": special_id("<|video_pad|>"),
        "vision_config": _vision(),
        "vision_end_token_id": special_id("<|vision_end|>"),
        "vision_start_token_id": special_id("<|vision_start|>"),
    }
    if fp8:
        config["text_config"]["ple_embedding_dtype"] = "float8_e4m3fn"
        config["quantization_config"] = _fp8(layers)
    return config


def generation_config() -> dict[str, Any]:
    """generation_config.json: a turn or a document may end the answer."""
    return {
        "bos_token_id": special_id("<|endoftext|>"),
        "eos_token_id": [special_id("<|im_end|>"), special_id("<|endoftext|>")],
        "pad_token_id": special_id("<|endoftext|>"),
        "do_sample": True,
        "temperature": 0.7,
        "top_k": 20,
        "top_p": 0.95,
    }


def preprocessor_configs() -> dict[str, dict[str, Any]]:
    """The image and video processor files that lie beside a release with a vision tower."""
    common: dict[str, Any] = {
        "size": {"shortest_edge": 4096, "longest_edge": 65536},
        "patch_size": 16,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "processor_class": "Qwen3VLProcessor",
    }
    return {
        "preprocessor_config.json": {**common, "image_processor_type": "Qwen2VLImageProcessor"},
        "video_preprocessor_config.json": {**common, "video_processor_type": "Qwen3VLVideoProcessor"},
    }


def _text(layers: int) -> dict[str, Any]:
    end = special_id(SPECIAL_TOKENS[0])
    kinds = ["full_attention" if (i + 1) % INTERVAL == 0 else "linear_attention" for i in range(layers)]
    return {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": end,
        "dtype": "bfloat16",
        "eos_token_id": end,
        "full_attention_interval": INTERVAL,  # SGLang reads it beside layer_types
        "hc_count": 4,
        "hc_lowrank": 64,
        "head_dim": 256,
        "heads_per_ngram": 8,
        "hidden_act": "silu",
        "hidden_size": 256,
        "indexer_budget": 2048,
        "indexer_compress_ratio": 4,
        "indexer_head_dim": 128,
        "indexer_kv_heads": 1,
        "indexer_n_heads": 4,
        "initializer_range": 0.02,
        "layer_types": kinds,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_value_head_dim": 128,
        "make_ngram_vocab_size_divisible_by": 128,
        "mamba_ssm_dtype": "float32",
        "max_position_embeddings": 32768,
        "model_type": "qwen4_exp_text",
        "moe_intermediate_size": 128,
        "mtp": {
            "hybrid": True,
            "layer_types": ["full_attention"],
            "num_hidden_layers": 1,
            "rope_theta": 10_000_000,
        },
        "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
        "ngram_size": 3,
        "ngram_vocab_size_base": 1250,
        "num_attention_heads": 4,
        "num_experts": 16,
        "num_experts_per_tok": 4,
        "num_hidden_layers": layers,
        "num_key_value_heads": 2,
        "output_gate_type": "sigmoid",
        "output_router_logits": False,
        "pad_token_id": None,
        "partial_rotary_factor": 0.25,
        "ple_conv_kernel_size": 4,
        "ple_embed_dim": 256,
        "ple_layer_ids": [2],
        "rms_norm_eps": 1e-06,
        "rope_parameters": {
            "mrope_interleaved": True,
            "mrope_section": [11, 11, 10],
            "partial_rotary_factor": 0.25,
            "rope_theta": 10_000_000,
            "rope_type": "default",
        },
        "router_aux_loss_coef": 0.001,
        "shared_expert_intermediate_size": 128,
        "split_ngram_parts": 16,
        "tie_word_embeddings": False,
        "use_cache": True,
        "vocab_size": VOCAB,
    }


def _vision() -> dict[str, Any]:
    return {
        "depth": 1,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_size": 128,
        "in_channels": 3,
        "initializer_range": 0.02,
        "intermediate_size": 272,
        "model_type": "qwen4_exp_vision",
        "num_heads": 2,
        "num_position_embeddings": 64,
        "out_hidden_size": 256,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    }


def _fp8(layers: int) -> dict[str, Any]:
    kept = (
        "linear_attn.in_proj_qkv", "linear_attn.in_proj_z", "linear_attn.in_proj_a", "linear_attn.in_proj_b",
        "linear_attn.out_proj", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
        "self_attn.indexer.index_qk_proj", "mlp.gate", "mlp.shared_expert_gate", "mlp.shared_expert.gate_proj",
        "mlp.shared_expert.up_proj", "mlp.shared_expert.down_proj", "attn_hyper_connection", "mlp_hyper_connection",
        "ple.key_proj", "ple.value_proj",
    )  # fmt: skip
    return {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "modules_to_not_convert": [
            "lm_head", "model.language_model.embed_tokens", "model.visual", "mtp.fc_embedding", "mtp.fc_hidden",
            *(f"model.language_model.layers.{i}.{module}" for i in range(layers) for module in kept),
        ],
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    }  # fmt: skip
