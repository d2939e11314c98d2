"""Whether a whole model fits in the memory of this machine. Imports no torch."""

from __future__ import annotations

from pathlib import Path

from q38.base.errors import ResourceError
from q38.base.memory import available_memory
from q38.base.units import format_bytes


def require_loadable(needed: int, *, where: str | Path, dtype: str) -> None:
    """Refuse weights that do not fit in host memory.

    Args:
        needed: bytes of the weights. dtype: what they are computed in, for the message.

    Raises:
        ResourceError: with the shortfall.
    """
    there = available_memory()
    if needed > there:
        raise ResourceError(
            f"the weights take {format_bytes(needed)} of host memory for arithmetic in {dtype}, {format_bytes(there)} are available: "
            f"{format_bytes(needed - there)} short",
            where=where,
            remedy="measure through an SGLang server of this model with --server URL, or use a machine with more memory",
        )
