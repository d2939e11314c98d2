"""RELEASE.json, which seals a release, and SHA256SUMS beside it.

RELEASE.json carries a seal: the sha256 of its own bytes with the 64 digits of the seal written as zeros.
So a changed byte in it shows without any other file, and one number stands for the whole directory:

    sed -E 's/"seal": "[0-9a-f]{64}"/"seal": "0000...0000"/' RELEASE.json | sha256sum
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from q38.base.errors import CheckFailed, InputError
from q38.checkpoint.paths import require_inside
from q38.checkpoint.writer import atomic_file
from q38.release.hashing import SealedFile
from q38.release.layout import RELEASE, SUMS

SCHEMA = "q38.release/1"
_ZEROS = "0" * 64
_SEAL = re.compile(rb'^ "seal": "([0-9a-f]{64})",$', re.MULTILINE)
_HASH = re.compile(r"[0-9a-f]{64}")


class BrokenSeal(CheckFailed):
    """RELEASE.json is not what was sealed. The files it lists cannot be judged by it."""

    def __init__(self, what: str, file: Path) -> None:
        super().__init__(
            what, where=file, remedy=f"restore it from where the release came from; {SUMS} has the hashes too"
        )


@dataclass(frozen=True)
class Seal:
    """A sealed RELEASE.json. `digest` is the seal; `piece` the bytes of a piece."""

    digest: str
    document: dict[str, Any]
    files: dict[str, SealedFile]
    piece: int

    @property
    def nbytes(self) -> int:
        return sum(record.bytes for record in self.files.values())


def write_seal(root: Path, document: Mapping[str, Any]) -> str:
    """Write RELEASE.json and return its seal. `document` has "files" and "piece_bytes"."""
    body = {"schema": SCHEMA, "seal": _ZEROS, **document}
    text = json.dumps(body, indent=1, ensure_ascii=False).encode() + b"\n"
    digest = hashlib.sha256(text).hexdigest()
    with atomic_file(root / RELEASE) as f:
        f.write(text.replace(_ZEROS.encode(), digest.encode(), 1))
    return digest


def read_seal(root: Path) -> Seal:
    """Read RELEASE.json and check its seal.

    Raises:
        InputError: there is none, it cannot be read, or it is of another version of the format.
        BrokenSeal: it is not as it was sealed.
    """
    file = root / RELEASE
    try:
        text = file.read_bytes()
    except FileNotFoundError:
        raise InputError(
            "no such file, so this is no release", where=file, remedy="make one with q38 release build"
        ) from None
    except OSError as error:
        raise InputError(
            f"cannot be read ({error.strerror})", where=file, remedy="check its permissions"
        ) from None
    found = _SEAL.findall(text)
    if len(found) != 1:
        raise BrokenSeal("has no seal", file)
    claimed: bytes = found[0]
    actual = hashlib.sha256(text.replace(claimed, _ZEROS.encode(), 1)).hexdigest()
    if actual != claimed.decode():
        raise BrokenSeal(
            f"was changed: its seal is {claimed.decode()[:12]}..., its bytes give {actual[:12]}...", file
        )
    document = json.loads(text)
    if document.get("schema") != SCHEMA:
        raise InputError(f"is no {SCHEMA} file", where=file, remedy="use the q38 that made it")
    return Seal(actual, document, _files(document, file), int(document["piece_bytes"]))


def _files(document: Mapping[str, Any], file: Path) -> dict[str, SealedFile]:
    names = document["files"]
    require_inside(names, file)
    return {
        name: SealedFile(record["bytes"], record["sha256"], pieces=tuple(record.get("pieces", ())))
        for name, record in names.items()
    }


def sums_text(files: Mapping[str, SealedFile]) -> bytes:
    """SHA256SUMS for these files, as `sha256sum` writes it; RELEASE.json, which lists SHA256SUMS, is not in it."""
    return "".join(
        f"{record.sha256}  {name}\n" for name, record in sorted(files.items()) if name not in (RELEASE, SUMS)
    ).encode()


def parse_digest(text: str) -> str:
    """A seal as a user gives it. Raises InputError."""
    digest = text.strip().lower()
    if not _HASH.fullmatch(digest):
        raise InputError(
            f"'{text}' is no seal",
            where="--digest",
            remedy="give the 64 hex digits that q38 release build printed",
        )
    return digest
