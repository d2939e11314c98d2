"""Put the tensors of one packed expert where a row has them, and check what is put there."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from q38.base.errors import InputError
from q38.residency.layout import SCALE_BYTES, ExpertLayout
from q38.residency.pool import Bytes
from q38.residency.shards import Piece

_EXPONENT = {"F16": 0x7C00, "BF16": 0x7F80}  # all ones in the exponent: infinite or not a number


class Placing:
    """Assembles rows of one layout.

    Args:
        scale_dtype: F16 or BF16.
    """

    def __init__(self, layout: ExpertLayout, scale_dtype: str) -> None:
        self.layout = layout
        self._exponent = _EXPONENT[scale_dtype]
        stored = (1 << (layout.bits - 1)) - 1
        self._word = sum(stored << shift for shift in range(0, 32, layout.bits))
        self._zeros: dict[int, bytes] = {}  # by length

    def assemble(self, row: Bytes, pieces: Iterable[Piece], data: list[tuple[int, Bytes]]) -> None:
        """Fill a row, uint8 [row_bytes].

        Args:
            pieces: the row's nine tensors.
            data: (offset in the unit, bytes) of each extent that was read.

        Raises:
            InputError: scales that are not finite, zero points that are not symmetric.
        """
        scales = []
        for piece in pieces:
            offset, part = (
                data[0] if len(data) == 1 else next(p for p in reversed(data) if p[0] <= piece.start)
            )
            source = part[piece.start - offset : piece.start - offset + piece.nbytes]
            if piece.kind == "qzeros":
                self._check_zeros(piece, source)
                continue
            if piece.kind == "scales":
                scales.append((piece, source))
            self._place(row, piece, source)
        # All at once, where they lie back to back: a check for each tensor takes as long as copying it.
        if not self._finite(row[self.layout.w13_scale_offset : self.layout.row_bytes]):
            for piece, source in scales:
                self._check_scales(piece, source)

    def _place(self, row: Bytes, piece: Piece, source: Bytes) -> None:
        """Put one tensor where the layout has it: gate columns left of up columns, down on its own."""
        layout = self.layout
        words = piece.kind == "qweight"
        if piece.proj == "down_proj":
            start = layout.w2_offset if words else layout.w2_scale_offset
            row[start : start + piece.nbytes] = source
            return
        start = layout.w13_offset if words else layout.w13_scale_offset
        height = (layout.w13_shape if words else layout.w13_scale_shape)[0]
        width = layout.intermediate * (4 if words else SCALE_BYTES)  # bytes of one projection's columns
        both = row[start : start + 2 * height * width].reshape(
            height, 2, width
        )  # [K / codes, gate and up, bytes]
        both[:, int(piece.proj == "up_proj")] = source.reshape(height, width)

    def _finite(self, scales: Bytes) -> bool:
        return not (scales.view(np.uint16) & self._exponent == self._exponent).any()

    def _check_scales(self, piece: Piece, source: Bytes) -> None:
        exponent = self._exponent
        bad = int((source.view(np.uint16) & exponent == exponent).sum())
        if bad:
            raise InputError(
                f"{bad} scales of {piece.name} are not finite",
                where="experts",
                remedy="quantize this layer again",
            )

    def _check_zeros(self, piece: Piece, source: Bytes) -> None:
        expected = self._zeros.get(len(source))
        if expected is None:
            expected = self._zeros[len(source)] = np.full(len(source) // 4, self._word, np.uint32).tobytes()
        if source.tobytes() != expected:
            raise InputError(
                f"{piece.name} is not symmetric (words other than {self._word:#010x})",
                where="experts",
                remedy="quantize with sym: true",
            )
