"""What the keys and values of one token take in each format, and the parts that a pool is made of.

A slot is a token's place in the pool. Per layer a pool has keys and values, each a payload and (but for fp8)
scales, with one row per slot. int8ring_int4 has on top of its INT4 rows a ring of INT8 rows per layer: slot s
belongs at place s mod ring, and the place's owner says which slot wrote it last (q38.kernels.kv_formats).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from q38.base.errors import InputError
from q38.model.kv import RING_SLOTS
from q38.model.kv_format import INT4_G32, INT8_G64, KvFormat
from q38.model.shape import ModelShape

Side = Literal["k", "v"]
SIDES: tuple[Side, Side] = ("k", "v")
TIERED = "int8ring_int4"
# Format of the row that every slot has; None: a cast to fp8 without scales.
ROWS: dict[str, KvFormat | None] = {"fp8": None, "int8": INT8_G64, "int4": INT4_G32, TIERED: INT4_G32}
_OWNER_BYTES = 4


@dataclass(frozen=True)
class Part:
    """One buffer of a pool: `row_bytes` per slot, addressed by slot."""

    layer: int
    side: Side
    what: Literal["payload", "scales"]
    row_bytes: int


@dataclass(frozen=True)
class KvLayout:
    """A pool's format and sizes.

    layers: attention layers. heads, dim: of keys and of values. ring: places of the INT8 ring, 0 without one.
    """

    name: str
    layers: int
    heads: int
    dim: int
    ring: int = 0

    def __post_init__(self) -> None:
        if self.name not in ROWS:
            raise InputError(f"no pool for KV format '{self.name}'", remedy=f"known: {', '.join(ROWS)}")
        groups = [kv.group for kv in (self.rows, INT8_G64 if self.ring else None) if kv is not None]
        if any(self.dim % group for group in groups):
            raise InputError(
                f"heads of {self.dim} channels do not divide into groups of {max(groups)}",
                where=f"KV format {self.name}",
                remedy="use --kv fp8 or bf16",
            )
        if (self.name == TIERED) != (self.ring > 0):
            raise InputError(f"a ring of {self.ring}", where=f"KV format {self.name}")

    @classmethod
    def of(cls, shape: ModelShape, name: str, *, ring: int = RING_SLOTS) -> KvLayout:
        """The layout of a model's pool; `ring` counts for int8ring_int4 only."""
        return cls(
            name,
            len(shape.attention_layers),
            shape.num_key_value_heads,
            shape.head_dim,
            ring if name == TIERED else 0,
        )

    @property
    def rows(self) -> KvFormat | None:
        """Format of the row that every slot has; None for fp8."""
        return ROWS[self.name]

    def parts(self) -> list[Part]:
        """Every buffer that has a row per slot: layer by layer, keys before values."""
        widths = {"payload": self._payload_bytes(self.rows)}
        if self.rows is not None:
            widths["scales"] = self._scale_bytes(self.rows)
        return [
            Part(layer, side, what, width)  # type: ignore[arg-type]
            for layer in range(self.layers)
            for side in SIDES
            for what, width in widths.items()
        ]

    @property
    def bytes_per_slot(self) -> int:
        """Bytes of one token's keys and values over all layers; the ring is not counted."""
        return sum(part.row_bytes for part in self.parts())

    @property
    def ring_bytes(self) -> int:
        """Bytes of the ring over all layers, whatever the context; 12,672 a place for 12 layers of 2 x 256."""
        if not self.ring:
            return 0
        return 2 * self.layers * self.ring * (self._payload_bytes(INT8_G64) + self._scale_bytes(INT8_G64))

    @property
    def owner_bytes(self) -> int:
        """Bytes that say who owns each place of the ring."""
        return self.layers * self.ring * _OWNER_BYTES

    def bytes_per_token(self, context: int) -> float:
        """Bytes per token of a pool of `context` slots, ring included (owners are bookkeeping, not counted)."""
        return self.bytes_per_slot + self.ring_bytes / context

    def _payload_bytes(self, kv: KvFormat | None) -> int:
        return self.heads * self.dim * (8 if kv is None else kv.bits) // 8

    def _scale_bytes(self, kv: KvFormat) -> int:
        return self.heads * self.dim // kv.group * 2
