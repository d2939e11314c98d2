"""The merged row of one routed expert: sizes, offsets and alignment, in one place.

A row holds the four packed tensors of an expert back to back, each as the checkpoint orders it
(AutoRound's `auto_gptq` packing, already contiguous along the output columns):

    w13 words   int32 [hidden * bits / 32, 2 * intermediate]    gate columns, then up columns
    w2 words    int32 [intermediate * bits / 32, hidden]
    w13 scales  fp16 or bf16 [hidden / group, 2 * intermediate]
    w2 scales   fp16 or bf16 [intermediate / group, hidden]

Word `kw` of column `n` holds the codes of inputs 16 kw .. 16 kw + 15 at 2 bits, input k at bits
2 (k mod 16). A weight is (code - zero) * scale with zero = 2**(bits - 1); scales are signed.
Rows live in device memory or in pinned host memory; kernels reach them through an int64 table of
absolute addresses, one entry per expert and layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from q38.base.errors import InputError
from q38.model.shape import ModelShape

if TYPE_CHECKING:
    import torch

ALIGNMENT = 128  # bytes; one L2 line, so that no part of a row shares a line with another
SCALE_BYTES = 2


@dataclass(frozen=True)
class ExpertLayout:
    """Sizes and byte offsets of one row.

    Args:
        hidden: model width, the input of gate and up and the output of down.
        intermediate: width of one expert.
        group: inputs that share a scale.
        bits: bits per code.

    Raises:
        InputError: the sizes do not divide into whole words, groups and 16-byte loads.
    """

    hidden: int
    intermediate: int
    group: int = 128
    bits: int = 2

    def __post_init__(self) -> None:
        if self.bits not in (2, 4, 8):
            raise InputError(
                f"experts packed at {self.bits} bits", where="expert layout", remedy="use 2, 4 or 8 bits"
            )
        for name, size in (("hidden", self.hidden), ("intermediate", self.intermediate)):
            if size <= 0 or size % self.group or size % self.codes_per_word or size % 8:
                raise InputError(
                    f"{name} size {size} is not a multiple of the group size {self.group}, "
                    f"of {self.codes_per_word} codes a word and of 8 columns",
                    where="expert layout",
                    remedy="quantize with a group size that divides both expert dimensions",
                )

    @classmethod
    def from_shape(cls, shape: ModelShape, *, group: int = 128, bits: int = 2) -> ExpertLayout:
        """The layout of a model's routed experts."""
        return cls(shape.hidden_size, shape.moe_intermediate_size, group, bits)

    @property
    def codes_per_word(self) -> int:
        return 32 // self.bits

    @property
    def w13_shape(self) -> tuple[int, int]:
        """(word rows, columns) of gate and up."""
        return self.hidden // self.codes_per_word, 2 * self.intermediate

    @property
    def w2_shape(self) -> tuple[int, int]:
        """(word rows, columns) of down."""
        return self.intermediate // self.codes_per_word, self.hidden

    @property
    def w13_scale_shape(self) -> tuple[int, int]:
        """(groups, columns) of gate and up."""
        return self.hidden // self.group, 2 * self.intermediate

    @property
    def w2_scale_shape(self) -> tuple[int, int]:
        """(groups, columns) of down."""
        return self.intermediate // self.group, self.hidden

    @property
    def w13_offset(self) -> int:
        return 0

    @property
    def w2_offset(self) -> int:
        return _align(4 * _area(self.w13_shape))

    @property
    def w13_scale_offset(self) -> int:
        return self.w2_offset + _align(4 * _area(self.w2_shape))

    @property
    def w2_scale_offset(self) -> int:
        return self.w13_scale_offset + _align(SCALE_BYTES * _area(self.w13_scale_shape))

    @property
    def row_bytes(self) -> int:
        """Bytes of one row, a multiple of the alignment."""
        return self.w2_scale_offset + _align(SCALE_BYTES * _area(self.w2_scale_shape))

    def views(self, row: torch.Tensor, scale_dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """The four parts of a row as tensors that share its memory.

        Args:
            row: uint8 [row_bytes], contiguous.
            scale_dtype: float16 or bfloat16.

        Returns:
            w13 and w2 (int32 words), w13_scale and w2_scale, shaped as the properties say.
        """
        import torch

        parts = {
            "w13": (self.w13_offset, self.w13_shape, torch.int32),
            "w2": (self.w2_offset, self.w2_shape, torch.int32),
            "w13_scale": (self.w13_scale_offset, self.w13_scale_shape, scale_dtype),
            "w2_scale": (self.w2_scale_offset, self.w2_scale_shape, scale_dtype),
        }
        return {
            name: row[start : start + _area(shape) * dtype.itemsize].view(dtype).view(shape)
            for name, (start, shape, dtype) in parts.items()
        }

    def fill(
        self,
        row: torch.Tensor,
        gate: tuple[torch.Tensor, torch.Tensor],
        up: tuple[torch.Tensor, torch.Tensor],
        down: tuple[torch.Tensor, torch.Tensor],
    ) -> None:
        """Write one expert's checkpoint tensors into a row, without a transpose.

        Args:
            row: uint8 [row_bytes], the target.
            gate, up: (qweight int32 [hidden / 16, intermediate], scales [hidden / group, intermediate]).
            down: (qweight int32 [intermediate / 16, hidden], scales [intermediate / group, hidden]).
        """
        views = self.views(row, gate[1].dtype)
        n = self.intermediate
        for part, index in (("w13", 0), ("w13_scale", 1)):
            views[part][:, :n].copy_(gate[index])
            views[part][:, n:].copy_(up[index])
        views["w2"].copy_(down[0])
        views["w2_scale"].copy_(down[1])


def address_table(rows: list[torch.Tensor]) -> torch.Tensor:
    """int64 [experts] of row addresses, on the CPU. Rows may be on the device or in pinned memory.

    Raises:
        InputError: a row does not start at a multiple of 16 bytes, which the kernels' loads need.
    """
    import torch

    addresses = [row.data_ptr() for row in rows]
    for expert, address in enumerate(addresses):
        if address % 16:
            raise InputError(
                f"row of expert {expert} starts at byte {address % 16} of 16",
                where="address table",
                remedy="take rows at multiples of 16 bytes from one allocation",
            )
    return torch.tensor(addresses, dtype=torch.int64)


def _area(shape: tuple[int, int]) -> int:
    return shape[0] * shape[1]


def _align(n: int) -> int:
    return -(-n // ALIGNMENT) * ALIGNMENT
