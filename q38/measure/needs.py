"""The memory a block-streamed evaluation takes, stated before it starts.

With S sequences of T tokens in batches of n tokens, b bytes a value, and the sizes of config.json:

    streams      3 S T W b                      W = hc_count * hidden_size; nothing where they lie on disk
    block        the largest block of either model, and one matrix while it is unpacked
    activations  1.5 n (W (6 b + 8) + 24 (2 K + V) + 8 A b + k (H (2 b + 4) + 5 I b))
                 K, V: width of keys (expanded) and values of Gated DeltaNet in float32; A: of attention queries;
                 k experts of width I per token
    head         two output heads, three sets of hidden states, float64 logits in chunks

    peak = streams + max(block + activations, head)

On a GPU block, activations and heads lie there, and the host holds streams, hidden states and the matrix in hand.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from q38.base.errors import ResourceError
from q38.base.memory import available_memory
from q38.base.units import format_bytes
from q38.hf.blocks import BlockModel
from q38.hf.matrices import PIECE
from q38.measure.forward import LOGIT_BYTES
from q38.model.shape import ModelShape

_STREAMS = 3
_UNPACKING = 16  # bytes a weight while it is unpacked: codes, zeros, two float32 copies
_LOGIT_COPIES = 8  # log-softmax, exponentials, differences and the sorts of the top five, for three runs


@dataclass(frozen=True)
class Need:
    """Bytes beyond what the process holds already.

    on_disk: whether the streams lie in files.
    """

    streams: int
    block: int
    activations: int
    head: int
    hidden: int
    on_disk: bool
    on_device: bool

    @property
    def host(self) -> int:
        streams = 0 if self.on_disk else self.streams
        if self.on_device:
            return streams + self.hidden + _UNPACKING * PIECE
        return streams + max(self.block + self.activations, self.head + self.hidden)

    @property
    def device(self) -> int:
        return max(self.block + self.activations, self.head) if self.on_device else 0

    def to_dict(self) -> dict[str, Any]:
        return {**vars(self), "host": self.host, "device": self.device}


def memory_need(
    source: BlockModel, model: BlockModel, sequences: int, tokens: int, batch_size: int, *, on_disk: bool
) -> Need:
    """What an evaluation of `sequences` of `tokens` takes."""
    shape, item = source.shape, source.dtype.itemsize
    positions = sequences * tokens
    largest = max(source.head_bytes, model.head_bytes) // item
    return Need(
        streams=_STREAMS * positions * source.width * item,
        block=max(source.block_bytes, model.block_bytes) + _UNPACKING * min(PIECE, largest),
        activations=batch_size * tokens * activation_bytes(shape, item),
        head=source.head_bytes + model.head_bytes + _LOGIT_COPIES * LOGIT_BYTES,
        hidden=_STREAMS * positions * shape.hidden_size * item,
        on_disk=on_disk,
        on_device=source.device.type != "cpu",
    )


def activation_bytes(shape: ModelShape, item: int) -> int:
    """Bytes a token takes inside a block; see the module."""
    wide = shape.hc_count * shape.hidden_size * (6 * item + 8)
    heads = shape.linear_num_value_heads
    delta = 24 * heads * (2 * shape.linear_key_head_dim + shape.linear_value_head_dim)
    attention = 8 * shape.num_attention_heads * shape.head_dim * item
    experts = shape.num_experts_per_tok * (
        shape.hidden_size * (2 * item + 4) + 5 * shape.moe_intermediate_size * item
    )
    return (wide + delta + attention + experts) * 3 // 2


def require_memory(need: Need, device: torch.device, limit: int | None) -> None:
    """Refuse what does not fit.

    Args:
        limit: host bytes it may take; None: what is available.

    Raises:
        ResourceError: names the shortfall.
    """
    host = available_memory() if limit is None else limit
    _require(need.host, host, "host", _remedy(need))
    if need.on_device:
        _require(
            need.device,
            torch.cuda.mem_get_info(device)[0],
            str(device),
            "free the GPU, or give shorter sequences",
        )


def _require(needed: int, there: int, where: str, remedy: str) -> None:
    if needed > there:
        raise ResourceError(
            f"needs {format_bytes(needed)}, {format_bytes(there)} are there: {format_bytes(needed - there)} short",
            where=where,
            remedy=remedy,
        )


def _remedy(need: Need) -> str:
    if not need.on_disk and need.streams > need.host // 2:
        return "give --report DIR, so that the residual streams lie on disk, or fewer --tokens"
    return "free memory, or give fewer --tokens and shorter sequences"
