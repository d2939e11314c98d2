"""From the tensors of the bf16 release to those of the FP8 release, and their division into shards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from q38.model.expected import FP8_BLOCK
from q38.model.names import FUSED_EXPERTS, NGRAM_SHARD

if TYPE_CHECKING:
    import torch

E4M3_MAX = 448.0  # largest finite float8_e4m3fn


def fp8_layout(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Experts one by one in F8_E4M3 with bfloat16 scales per 128 x 128 block, the n-gram table with one scale.

    A scale is the largest magnitude of its block over 448, rounded to bfloat16 first, so that the stored
    scale is the one that was divided by.
    """
    result: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if match := FUSED_EXPERTS.match(name):
            prefix = f"{match['layer']}.mlp.experts"
            for expert, projection, matrix in _matrices(match["proj"], tensor):
                weight, scale = _block_fp8(matrix)
                result[f"{prefix}.{expert}.{projection}.weight"] = weight
                result[f"{prefix}.{expert}.{projection}.weight_scale_inv"] = scale
        elif not NGRAM_SHARD.match(name):
            result[name] = tensor
    result.update(_ngram_fp8(tensors))
    return result


def shard_names(tensors: Mapping[str, torch.Tensor], limit: int) -> dict[str, list[str]]:
    """File name -> tensor names, in the alphabetical order of the release, at most `limit` bytes per file."""
    groups: list[list[str]] = [[]]
    size = 0
    for name in sorted(tensors):
        nbytes = tensors[name].numel() * tensors[name].element_size()
        if groups[-1] and size + nbytes > limit:
            groups.append([])
            size = 0
        groups[-1].append(name)
        size += nbytes
    return {f"model-{i:05d}-of-{len(groups):05d}.safetensors": names for i, names in enumerate(groups, 1)}


def _matrices(projection: str, fused: torch.Tensor) -> Iterator[tuple[int, str, torch.Tensor]]:
    for expert, matrix in enumerate(fused):  # [N, K]
        if projection == "gate_up_proj":
            gate, up = matrix.chunk(2)
            yield expert, "gate_proj", gate
            yield expert, "up_proj", up
        else:
            yield expert, "down_proj", matrix


def _block_fp8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[N, K] -> F8_E4M3 [N, K] and BF16 [N/128, K/128]; N and K are multiples of 128 here."""
    rows, columns = weight.shape
    blocks = weight.float().view(rows // FP8_BLOCK, FP8_BLOCK, columns // FP8_BLOCK, FP8_BLOCK)
    scale = _scale(blocks.abs().amax((1, 3)))  # [N/128, K/128]
    codes = _e4m3(blocks / scale.float()[:, None, :, None])
    return codes.view(rows, columns), scale


def _ngram_fp8(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    shards = {name: tensor for name, tensor in tensors.items() if NGRAM_SHARD.match(name)}
    result: dict[str, torch.Tensor] = {}
    for prefix in sorted({name.rpartition(".shard_")[0] for name in shards}):
        table = {name: tensor.float() for name, tensor in shards.items() if name.startswith(prefix + ".")}
        scale = _scale(max(tensor.abs().max() for tensor in table.values()).reshape(1))
        result |= {name: _e4m3(tensor / scale.float()) for name, tensor in table.items()}
        result[f"{prefix}.weight_scale"] = scale
    return result


def _scale(largest: torch.Tensor) -> torch.Tensor:
    import torch

    return (largest / E4M3_MAX).clamp_min(1e-12).to(torch.bfloat16)


def _e4m3(values: torch.Tensor) -> torch.Tensor:
    import torch

    # Rounding the scale can push the largest value beyond 448, which some builds of torch cast to NaN.
    return values.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
