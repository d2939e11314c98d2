"""Every name of SGLang that the plugin changes or builds on, by mechanism. No import of sglang here.

A hooked target is wrapped or replaced; a relied-on one is called, subclassed or read. Both are compared with the
manifest of the release, since either may change its meaning under the same name.
"""

from __future__ import annotations

from dataclasses import dataclass

_SRT = "sglang.srt."
AUTOROUND = _SRT + "layers.quantization.auto_round.AutoRoundConfig"
LOADER = _SRT + "model_loader.loader.DefaultModelLoader"
QWEN4 = _SRT + "models.qwen4_exp"
BREAKABLE = _SRT + "model_executor.runner_backend.breakable_cuda_graph_backend.BreakableCudaGraphBackend"
INDEXER = _SRT + "layers.attention.qsa.qsa_indexer.QSAIndexer"
GRAMMARS = _SRT + "constrained.grammar_manager.GrammarManager"
SPARSE = _SRT + "layers.attention.qwen_sparse_attn_backend.QwenSparseAttnBackend"
KV_POOL = _SRT + "mem_cache.memory_pool.MHATokenToKVPool"
SERVER_ARGS = _SRT + "server_args.ServerArgs"
TOKENIZER = _SRT + "managers.tokenizer_manager.TokenizerManager"
SCHEDULER = _SRT + "managers.scheduler.Scheduler"
SCHEDULE_BATCH = _SRT + "managers.schedule_batch.ScheduleBatch"
KV_CONFIGURATOR = _SRT + "mem_cache.kv_cache_configurator.KVCacheConfigurator"
POOL_SIZES = _SRT + "model_executor.pool_configurator.DefaultPoolConfigurator"
ALLOCATOR = _SRT + "mem_cache.allocator.paged.PagedTokenToKVPoolAllocator"
QSA = _SRT + "layers.attention.qsa"
HYPER = _SRT + "layers.hyperconnection"
HC_MIX = "sglang.kernels.ops.gemm.hc_mix"
GDN_DISPATCHER = _SRT + "layers.attention.linear.gdn_backend.GDNKernelDispatcher"
GDN_TRITON = _SRT + "layers.attention.linear.kernels.gdn_triton.TritonGDNKernel"
FLA_STATES = "sglang.kernels.ops.attention.fla.chunk_delta_h.chunk_gated_delta_rule_fwd_h"
FORWARD_BATCH = _SRT + "model_executor.forward_batch_info.ForwardBatch"


@dataclass(frozen=True)
class Mechanism:
    """One thing the plugin adds.

    hooked: names that it changes; none where it only starts SGLang in another way.
    engine: only the process that runs the model needs it.
    cuda: has an effect on a CUDA device only.
    """

    name: str
    summary: str
    hooked: tuple[str, ...]
    relied: tuple[str, ...] = ()
    engine: bool = True
    cuda: bool = False


MECHANISMS = (
    Mechanism(
        "packed-modules",
        "fused module names resolve in AutoRound's extra_config",
        (AUTOROUND + ".from_config",),
        (_SRT + "layers.quantization.base_config.QuantizationConfig", AUTOROUND + ".get_layer_config"),
    ),
    Mechanism(
        "experts-2bit",
        "2-bit experts as rows found through an address table",
        (AUTOROUND + ".get_quant_method",),
        (
            _SRT + "layers.quantization.base_config.FusedMoEMethodBase",
            _SRT + "layers.moe.fused_moe_triton.layer.FusedMoE.__init__",
            _SRT + "layers.moe.fused_moe_triton.layer.FusedMoE.forward_impl",
            _SRT + "layers.moe.token_dispatcher.standard.StandardCombineInput",
            _SRT + "layers.moe.token_dispatcher.standard.StandardDispatchOutput",
        ),
    ),
    Mechanism(
        "weight-streaming",
        "expert rows and n-gram rows never pass SGLang's weight loader",
        (LOADER + "._get_all_weights",),
        (LOADER + ".load_model", QWEN4 + ".Qwen4ExpForConditionalGeneration.load_weights"),
    ),
    Mechanism(
        "ngram-rows",
        "rows of the n-gram table are read from disk, before a step or inside it",
        (
            QWEN4 + ".Qwen4ExpNGramEmbedding",
            QWEN4 + ".Qwen4ExpPLELayer.start_prefetch",
            FORWARD_BATCH + ".init_new",
            SCHEDULER + ".process_batch_result",
        ),
        (
            QWEN4 + ".Qwen4ExpPLELayer",
            QWEN4 + "._prepare_ple_batch",
            QWEN4 + "._commit_ple_batch",
            _SRT + "managers.schedule_batch.Req.refresh_fill_ids",
            _SRT + "managers.schedule_batch.ScheduleBatch.prepare_for_decode",
        ),
    ),
    Mechanism(
        "early-scheduler",
        "the scheduler's modules are imported while the server's first process imports its own",
        (),
        (
            _SRT + "managers.scheduler.run_scheduler_process",
            _SRT + "entrypoints.engine.Engine._launch_scheduler_processes",
            # What a scheduler inherits.
            _SRT + "entrypoints.engine._set_envs_and_config",
            _SRT + "utils.common.set_ulimit",
            _SRT + "utils.common.set_prometheus_multiproc_dir",
            _SRT + "arg_groups.serving_hook.handle_environment_variables",
            _SRT + "environ.redirect_third_party_caches",
        ),
        engine=False,
    ),
    Mechanism(
        "finite-check",
        "a value that is not finite is traced to its module, on request",
        (FORWARD_BATCH + ".init_new",),
    ),
    Mechanism(
        "row-moves",
        "expert rows move between steps, and by HTTP request",
        (SCHEDULER + ".run_batch",),
        (SCHEDULER + ".event_loop_normal", SCHEDULER + ".event_loop_overlap"),
    ),
    Mechanism(
        "language-model-only",
        "the vision tower can be left out",
        (SERVER_ARGS + ".LANGUAGE_MODEL_ONLY_ARCHITECTURES",),
        (_SRT + "arg_groups.model_hook.handle_language_model_only",),
        engine=False,
    ),
    Mechanism(
        "token-ids",
        "a token id outside the vocabulary is refused, instead of ending the server",
        (TOKENIZER + "._validate_one_request",),
        engine=False,
    ),
    Mechanism(
        "graph-output",
        "breakable CUDA graphs of decode take the logits processor's output",
        tuple(f"{BREAKABLE}.{name}" for name in ("_output_rows", "_alloc_full_buffer", "_slice_output", "_copy_output_to_buffer")),
        (_SRT + "layers.logits_processor.LogitsProcessorOutput",),
        cuda=True,
    ),
    Mechanism(
        "hyper-connections",
        "the matrices of the mix are rounded to INT8 on request",
        (HYPER + ".GatedResidual.__init__",),
        (HYPER + ".GatedResidual", HC_MIX + ".fused_hc_mix_supported"),
    ),
    Mechanism(
        "hyper-boundary",
        "between two blocks of a decode step: gates, combine and the next norm in one launch",
        (HYPER + ".GatedResidual.__init__", HYPER + ".GatedResidual.combine_and_normalize"),
        (
            HYPER + ".GatedResidual",
            HYPER + ".GroupedGemmaRMSNorm",
            # Who calls it, and when nothing happens between the combine and the norm.
            QWEN4 + ".Qwen4ExpLayerExtensionMixin",
            QWEN4 + ".Qwen4ExpModel.forward",
            _SRT + "layers.layer_boundary.residual.gated.GatedResidualState",
        ),
        cuda=True,
    ),
    Mechanism(
        "hyper-mix",
        "the mix of a decode step in two launches, its matrices as they are",
        (HC_MIX + ".fused_hc_mix",),
        (
            # What is rounded where, and which calls come here.
            HC_MIX + "._hc_mix_persistent_kernel",
            HC_MIX + ".fused_hc_mix_supported",
            HYPER + ".GatedResidual.mix",
        ),
        cuda=True,
    ),
    Mechanism(
        "gdn-snapshot",
        "the prefix cache's snapshot of a recurrent state keeps float32",
        (GDN_DISPATCHER + ".__init__", GDN_DISPATCHER + ".extend", FLA_STATES),
        (
            # Who allocates the snapshot and copies it to its slot, what the kernel writes, and who calls it.
            _SRT + "layers.attention.linear.gdn_backend.GDNAttnBackend.forward_extend",
            GDN_TRITON + ".extend",
            _SRT + "layers.attention.hybrid_linear_attn_backend.MambaAttnBackendBase._track_mamba_state_extend",
            "sglang.kernels.ops.attention.fla.chunk_delta_h.chunk_gated_delta_rule_fwd_kernel_h_blockdim64",
            "sglang.kernels.ops.attention.fla.chunk.chunk_gated_delta_rule_fwd",
        ),
        cuda=True,
    ),
    Mechanism(
        "rope-sync",
        "the sparse-attention indexer does not wait for the device once a layer",
        (INDEXER + ".project_qk", INDEXER + ".apply_rope"),
        (_SRT + "utils.common.reserve_rope_cache_for_long_sequences",),
        cuda=True,
    ),
    Mechanism(
        "fp8-clamp",
        "keys and values beyond 448 saturate in an fp8 cache instead of turning into NaN",
        (KV_POOL + ".set_kv_buffer",),
        (SPARSE + "._try_fused_kv_attention",),
        cuda=True,
    ),
    Mechanism(
        "kv-formats",
        "keys and values in INT8, INT4 or both; decode steps of every format attend to rows where they lie",
        (
            KV_CONFIGURATOR + "._build_mha_quant_method",
            POOL_SIZES + "._compute_cell_size",
            *(
                f"{KV_POOL}.{name}"
                for name in (
                    "get_cpu_copy", "load_cpu_copy", "move_kv_cache", "get_raw_kv_buffer", "get_contiguous_buf_infos",
                    "set_kv_buffer_prefix_valid",
                )
            ),
            QSA + ".sparse_attn.qwen_sparse_kv_extraction_compact_triton",
            QSA + ".sparse_attn.pack_qsa_prefill_kv",
            QSA + ".kernel.qsa_sparse_attention",
            SPARSE + "._forward_paged_attention",
            SPARSE + "._try_fused_kv_attention",
        ),
        (
            SPARSE + "._expand_block_indices",
            SPARSE + "._resolve_metadata",
            _SRT + "layers.attention.qwen_sparse_attn_backend.QwenSparseAttnMetadata",
            _SRT + "layers.quantization.fp4_kv_cache_quant_method.KVCacheQuantMethodBase",
            KV_POOL + "._create_buffers",
            KV_POOL + "._create_quantized_buffers",
            KV_POOL + "._get_key_buffer",
            KV_POOL + "._get_value_buffer",
            KV_POOL + "._set_quantized_kv_buffer",
            _SRT + "mem_cache.qsa_kv_pool.QSATokenToKVPool",
            # Every reader of the attention layers' cache; a new one must be looked at.
            SPARSE,
        ),
    ),
    Mechanism(
        "kv-memory",
        "memory of the KV cache is mapped as pages are handed out, and given back when idle",
        (
            SCHEDULER + ".get_new_batch_prefill",
            SCHEDULER + ".on_idle",
            GRAMMARS + ".get_ready_grammar_requests",
            SCHEDULE_BATCH + ".check_decode_mem",
            SCHEDULE_BATCH + ".retract_decode",
            ALLOCATOR + ".alloc",
            ALLOCATOR + ".alloc_extend",
            ALLOCATOR + ".alloc_decode",
        ),
        (
            SCHEDULER + ".process_pending_chunked_abort",
            SCHEDULER + ".abort_request",
            SCHEDULER + ".is_fully_idle",
            SCHEDULER + "._get_new_batch_prefill_raw",
            SCHEDULER + "._add_request_to_queue",
            SCHEDULER + ".get_num_allocatable_reqs",
            GRAMMARS,
            SCHEDULE_BATCH + ".new_tokens_required_next_decode",
            ALLOCATOR,
        ),
    ),
)  # fmt: skip

# Files that `patch-sglang apply` edits: patch_edits.py.
EDITED_FILES = (
    "sglang/srt/layers/quantization/auto_round.py",
    "sglang/srt/server_args.py",
    "sglang/srt/model_executor/runner_backend/breakable_cuda_graph_backend.py",
)


def all_targets() -> list[str]:
    """Every hooked and relied-on name, each once."""
    names = (name for mechanism in MECHANISMS for name in (*mechanism.hooked, *mechanism.relied))
    return sorted(set(names))
