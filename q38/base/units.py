"""Bytes and seconds as people write them."""

from __future__ import annotations

import re

from q38.base.errors import InputError

KIB, MIB, GIB = 2**10, 2**20, 2**30
_FACTORS = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": KIB,
    "mib": MIB,
    "gib": GIB,
    "tib": 2**40,
}


def parse_bytes(text: str, *, where: str = "size") -> int:
    """`24GiB`, `32 GB`, `1048576` -> bytes. A bare K, M, G or T counts as binary, as `ls -h` does."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?(?:i?b)?)\s*", text.lower())
    if not match:
        raise InputError(f"'{text}' is not a size", where=where, remedy="write it like 24GiB or 500MB")
    number, unit = match.groups()
    return int(float(number) * _FACTORS[unit + "ib" if unit in ("k", "m", "g", "t") else unit])


def format_bytes(n: float) -> str:
    """1536 -> '1.5 KiB'."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(n) < 1024:
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.1f} {unit}"
        n /= 1024
    return f"{n:.2f} TiB"


def format_seconds(s: float) -> str:
    """75.2 -> '1:15'; below a minute '4.2 s'."""
    if s < 60:
        return f"{s:.1f} s"
    minutes, seconds = divmod(round(s), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"
