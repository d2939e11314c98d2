"""A checkpoint of one Gated DeltaNet block and one sparse-attention block in full size, with random weights.

Shapes come from a config.json; weights have what tuning feels: rows and channels of unequal size, heavy tails,
unequally used experts. The vocabulary is cut, and there is no n-gram table.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from q38.checkpoint.writer import stream_safetensors, tensor_bytes
from q38.model.names import LAYERS
from q38.model.shape import ModelShape

VOCABULARY = 256  # token ids are not used: `residual_stream` stands for the embedding
SPECTRUM = 0.5  # exponent of a latent's standard deviation: variance falls as 1 / rank
KINDS = ("linear_attention", "full_attention")  # of block 0 and block 1
_PIECE = 2**26


def write_blocks(out: Path, config: Path, kinds: Sequence[str], *, seed: int, device: str) -> None:
    """Write the checkpoint of blocks of these kinds, 5 GB each in full size."""
    values = cut_config(config, kinds)
    generator = torch.Generator(device).manual_seed(seed)
    write(out, values, lambda name, shape: _pieces(name, shape, generator, device))


def cut_config(config: Path, kinds: Sequence[str]) -> dict[str, Any]:
    """A config.json with blocks of these kinds alone, a small vocabulary, no n-gram table and no MTP."""
    values: dict[str, Any] = json.loads(config.read_text())
    text = {
        **values.get("text_config", values),
        "layer_types": list(kinds),
        "num_hidden_layers": len(kinds),
        "vocab_size": VOCABULARY,
        "ple_layer_ids": [],
        "mtp_num_hidden_layers": 0,
        "eos_token_id": 0,
        "bos_token_id": 0,
    }
    text.pop("mtp", None)
    return {**values, "text_config": text, "language_model_only": True} if "text_config" in values else text


def write(
    out: Path, config: dict[str, Any], data: Callable[[str, tuple[int, ...]], Iterator[memoryview]]
) -> None:
    """Write a checkpoint in bf16: `data` gives the bytes of a tensor, by name and shape."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "config.json").write_text(json.dumps(config))
    shapes = _shapes(config)
    entries = [(name, "BF16", shape, 2 * math.prod(shape)) for name, shape in shapes.items()]
    pieces = (piece for name, shape in shapes.items() for piece in data(name, shape))
    stream_safetensors(out / "model.safetensors", entries, pieces)


def residual_stream(
    samples: int, length: int, shape: ModelShape, *, seed: int, device: str, dtype: torch.dtype
) -> list[torch.Tensor]:
    """What enters a block deep in a model, one [1, length, hc_count * H] per sample, on the CPU.

    Latents with a power-law spectrum, correlated from token to token, mixed into every stream: no two tokens alike,
    and a covariance as uneven as that of real activations. The mixing is the same for every seed.
    """
    latents, width = 2 * shape.hidden_size, shape.hc_count * shape.hidden_size
    fixed = torch.Generator(device).manual_seed(0)
    mixing = torch.randn(latents, width, generator=fixed, device=device)
    mixing *= torch.arange(1, latents + 1, device=device).pow(-SPECTRUM).unsqueeze(1)
    generator = torch.Generator(device).manual_seed(seed)
    states = []
    for _ in range(samples):
        z = torch.randn(length, latents, generator=generator, device=device)
        z[1:] = 0.6 * z[:-1] + 0.8 * z[1:]
        states.append((z @ mixing).to(dtype).cpu()[None])
    return states


def _shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    from transformers.models.qwen4_exp import Qwen4ExpTextConfig
    from transformers.models.qwen4_exp.modeling_qwen4_exp import Qwen4ExpTextModel

    shape = ModelShape.from_config(config)
    text = dict(config.get("text_config", config))
    text["layer_types"] = list(shape.layer_types)
    with torch.device("meta"):
        model = Qwen4ExpTextModel(Qwen4ExpTextConfig.from_dict(text))
    prefix = LAYERS.removesuffix("layers")
    shapes = {prefix + name: tuple(t.shape) for name, t in model.state_dict().items()}
    return {**shapes, "lm_head.weight": (VOCABULARY, shape.hidden_size)}


def _pieces(
    name: str, shape: tuple[int, ...], generator: torch.Generator, device: str
) -> Iterator[memoryview]:
    step = max(1, _PIECE // math.prod(shape[1:]))
    for start in range(0, shape[0], step):
        size = (min(step, shape[0] - start), *shape[1:])
        yield tensor_bytes(_values(name, size, generator, device).cpu())


def _values(name: str, shape: tuple[int, ...], generator: torch.Generator, device: str) -> torch.Tensor:
    draw = torch.randn(shape, generator=generator, device=device)
    if "hc_norm" in name:  # channel gains, a few of them large; stored as gain - 1
        value = torch.exp(0.5 * draw) - 1
    elif "norm" in name:
        value = 0.1 * draw
    elif name.endswith("A_log"):
        value = draw.abs().add(0.1).log()
    elif "embed_tokens" in name:
        value = draw
    elif name.endswith("mlp.gate.weight"):
        value = 0.03 * draw
    elif len(shape) > 1:  # heavier tails than normal, rows of unequal size
        rows = torch.randn((*shape[:-1], 1), generator=generator, device=device)
        tails = torch.randn(shape, generator=generator, device=device)
        value = 0.02 * draw * torch.exp(0.3 * rows + 0.25 * tails)
    else:
        value = 0.1 * draw
    return value.to(torch.bfloat16)
