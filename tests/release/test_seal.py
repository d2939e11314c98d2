"""RELEASE.json: written, read, and not to be changed unnoticed."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from q38.base.errors import InputError
from q38.release.hashing import PIECE, Hasher, SealedFile, hash_file, hash_range
from q38.release.seal import BrokenSeal, parse_digest, read_seal, sums_text, write_seal

DIGEST = "ab" * 32


def _seal(root: Path, **changes: Any) -> str:
    document = {"name": "t", "piece_bytes": PIECE, "files": {"a/b": {"bytes": 3, "sha256": DIGEST}}}
    return write_seal(root, {**document, **changes})


def test_a_seal_comes_back(tmp_path: Path) -> None:
    digest = _seal(tmp_path, files={"x": {"bytes": 9, "sha256": DIGEST, "pieces": ["0" * 64, "1" * 64]}})
    seal = read_seal(tmp_path)
    assert seal.digest == digest
    assert seal.files == {"x": SealedFile(9, DIGEST, pieces=("0" * 64, "1" * 64))}
    assert (seal.piece, seal.nbytes) == (PIECE, 9)


def test_the_seal_is_the_hash_of_the_file_with_zeros_in_its_place(tmp_path: Path) -> None:
    digest = _seal(tmp_path, note="0" * 64)  # zeros elsewhere stay zeros
    text = (tmp_path / "RELEASE.json").read_text()
    blanked = re.sub(r'"seal": "[0-9a-f]{64}"', f'"seal": "{"0" * 64}"', text)
    assert hashlib.sha256(blanked.encode()).hexdigest() == digest
    assert json.loads(text)["seal"] == digest


@given(position=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_any_changed_byte_breaks_the_seal(
    tmp_path_factory: pytest.TempPathFactory, position: float, bit: int
) -> None:
    root = tmp_path_factory.mktemp("seal")
    _seal(root)
    file = root / "RELEASE.json"
    data = bytearray(file.read_bytes())
    data[int(position * len(data))] ^= 1 << bit
    file.write_bytes(data)
    with pytest.raises(BrokenSeal):
        read_seal(root)


@pytest.mark.parametrize("change", [lambda d: d[:-1], lambda d: d + b" ", lambda d: b"", lambda d: d + d])
def test_a_cut_or_longer_file_breaks_the_seal(tmp_path: Path, change: Any) -> None:
    _seal(tmp_path)
    file = tmp_path / "RELEASE.json"
    file.write_bytes(change(file.read_bytes()))
    with pytest.raises(BrokenSeal):
        read_seal(tmp_path)


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "a/../../x", "", "a//b", "./a"])
def test_a_name_outside_the_directory_is_refused(tmp_path: Path, name: str) -> None:
    _seal(tmp_path, files={name: {"bytes": 1, "sha256": DIGEST}})
    with pytest.raises(InputError, match="outside the directory"):
        read_seal(tmp_path)


def test_a_directory_without_one_is_no_release(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no release.*q38 release build"):
        read_seal(tmp_path)


def test_another_version_of_the_format_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "RELEASE.json"
    _seal(tmp_path)
    blank = re.sub(rb'"seal": "[0-9a-f]{64}"', b'"seal": "' + b"0" * 64 + b'"', file.read_bytes())
    newer = blank.replace(b"q38.release/1", b"q38.release/9")
    file.write_bytes(newer.replace(b"0" * 64, hashlib.sha256(newer).hexdigest().encode(), 1))
    with pytest.raises(InputError, match=r"is no q38\.release/1 file"):
        read_seal(tmp_path)


def test_the_sums_leave_out_what_cannot_be_in_them() -> None:
    record = SealedFile(1, DIGEST)
    text = sums_text({"b": record, "a": record, "SHA256SUMS": record, "RELEASE.json": record})
    assert text.decode() == f"{DIGEST}  a\n{DIGEST}  b\n"


@pytest.mark.parametrize("text", ["", "abc", "g" * 64, "a" * 63])
def test_a_digest_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="--digest"):
        parse_digest(text)


def test_a_digest_may_come_with_spaces_and_capitals() -> None:
    assert parse_digest(f"  {DIGEST.upper()}\n") == DIGEST


@given(data=st.binary(max_size=200), piece=st.integers(1, 40), cuts=st.lists(st.integers(1, 50)))
def test_pieces_and_whole_are_the_hashes_of_their_bytes(data: bytes, piece: int, cuts: list[int]) -> None:
    hasher, view, fed = Hasher(len(data), piece), memoryview(data), 0
    for step in [*cuts, len(data)]:  # in any chunking
        hasher.update(view[fed : fed + step])
        fed = min(fed + step, len(data))
    sealed = hasher.sealed()
    assert (sealed.bytes, sealed.sha256) == (len(data), hashlib.sha256(data).hexdigest())
    covered = sealed.ranges(piece)
    assert [hashlib.sha256(data[a:b]).hexdigest() for a, b, _ in covered] == [
        digest for *_, digest in covered
    ]
    assert b"".join(data[a:b] for a, b, _ in covered) == data
    assert bool(sealed.pieces) == (len(data) > piece)


def test_a_file_hashes_as_its_ranges_do(tmp_path: Path) -> None:
    file = tmp_path / "x"
    file.write_bytes(bytes(range(256)) * 50)
    counted: list[int] = []
    sealed = hash_file(file, counted.append, piece=1000)
    assert sum(counted) == sealed.bytes == 12_800
    assert [hash_range(file, a, b, counted.append) for a, b, _ in sealed.ranges(1000)] == list(sealed.pieces)
    assert sum(counted) == 2 * 12_800
