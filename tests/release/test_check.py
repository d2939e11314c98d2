"""q38 release check: whatever is changed is found and named, and nothing else is."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from q38.base.errors import InputError
from q38.checkpoint.index import Checkpoint
from q38.release import check as module
from q38.release.build import build
from q38.release.check import check
from q38.release.collect import Item, from_model
from q38.release.hashing import hash_file
from q38.release.layout import files_below
from q38.release.seal import read_seal, write_seal

SHARD = "model-00002-of-00003.safetensors"
PIECE = 2**16


@pytest.fixture(scope="module")
def pieces(packed: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A release whose files are many small pieces; put back what you change."""
    out = tmp_path_factory.mktemp("pieces") / "release"
    build(from_model(packed), out, copy=True, piece=PIECE)
    return out


@contextmanager
def changed(file: Path, position: int, bit: int = 0) -> Iterator[None]:
    """One bit of a file flipped, and flipped back."""
    flip(file, position, bit)
    try:
        yield
    finally:
        flip(file, position, bit)


def flip(file: Path, position: int, bit: int) -> None:
    with file.open("r+b") as f:
        f.seek(position)
        byte = f.read(1)[0]
        f.seek(position)
        f.write(bytes([byte ^ (1 << bit)]))


def named(result: dict[str, Any]) -> dict[str, str]:
    assert result["passed"] == (not result["faults"])
    return {fault["file"]: fault["kind"] for fault in result["faults"]}


def what(result: dict[str, Any], file: str) -> str:
    return str(next(fault["what"] for fault in result["faults"] if fault["file"] == file))


@pytest.mark.parametrize("full", [False, True])
def test_a_release_passes(sealed: Path, full: bool) -> None:
    result = check(sealed, full=full)
    assert result["passed"]
    assert result["files"] == len(files_below(sealed)) - 1  # RELEASE.json is not in its own list
    assert result["bytes_read"] == result["bytes"]  # every file is of one piece


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(choice=st.data())
def test_a_changed_byte_anywhere_is_found_and_its_file_named(pieces: Path, choice: st.DataObject) -> None:
    name = choice.draw(st.sampled_from(sorted(files_below(pieces))))
    file = pieces / name
    position = choice.draw(st.integers(0, file.stat().st_size - 1))
    with changed(file, position, choice.draw(st.integers(0, 7))):
        assert named(check(pieces, full=True)) == {name: "changed"}


@pytest.mark.parametrize("last", [False, True], ids=["first", "last"])
def test_the_first_and_the_last_byte_of_every_file_count(pieces: Path, last: bool) -> None:
    names = sorted(files_below(pieces).keys() - {"RELEASE.json"})
    with ExitStack() as stack:
        for name in names:
            end = (pieces / name).stat().st_size - 1
            stack.enter_context(changed(pieces / name, end if last else 0))
        assert named(check(pieces, full=True)) == dict.fromkeys(names, "changed")


def test_a_changed_piece_is_told_with_its_bytes_and_tensors(pieces: Path) -> None:
    tensor = max(Checkpoint.open(pieces).tensors.values(), key=lambda t: t.nbytes)
    position = (tensor.begin + tensor.end) // 2
    with changed(tensor.file, position):
        text = what(check(pieces, full=True), tensor.file.name)
    start = position // PIECE * PIECE
    assert f"differs in bytes {start:,} to {start + PIECE - 1:,}" in text
    assert tensor.name in text


def test_a_fast_check_reads_one_piece_of_each_file(pieces: Path) -> None:
    result = check(pieces)
    assert result["passed"]
    sizes = [record.bytes for record in read_seal(pieces).files.values()]
    assert result["bytes_read"] <= sum(min(size, PIECE) for size in sizes)
    assert max(sizes) > 10 * PIECE


def test_a_fast_check_finds_any_change_in_time_and_none_where_there_is_none(pieces: Path) -> None:
    file = pieces / SHARD
    with changed(file, file.stat().st_size // 2):
        found = [named(check(pieces, seed=seed)) for seed in range(150)]
    assert {SHARD: "changed"} in found
    assert {} in found  # it is a sample, and says so
    assert named(check(pieces, seed=0)) == {}


def test_a_damaged_header_is_found_without_luck(pieces: Path) -> None:
    with changed(pieces / SHARD, 8, bit=5):
        assert named(check(pieces, seed=1)) == {SHARD: "changed"}


def test_a_cut_file_a_longer_one_and_an_empty_one_are_changed(release: Path) -> None:
    for name, size in ((SHARD, -1), ("config.json", 0), ("tokenizer.json", 1)):
        file = release / name
        os.truncate(file, file.stat().st_size + size if size else 0)
    for full in (False, True):
        result = check(release, full=full)
        assert named(result) == dict.fromkeys((SHARD, "config.json", "tokenizer.json"), "changed")
        assert "bytes, " in what(result, SHARD)


def test_a_missing_file_is_named(release: Path) -> None:
    (release / SHARD).unlink()
    shutil.rmtree(release / "ple")
    found = named(check(release))
    assert found == dict.fromkeys(
        (SHARD, "ple/MANIFEST.json", "ple/ple.json", "ple/ple.f8_e4m3.bin"), "missing"
    )


def test_an_extra_file_is_named(release: Path) -> None:
    (release / "notes.txt").write_text("x")
    (release / "records").mkdir(exist_ok=True)
    (release / "records" / "a.q38-tmp").write_text("")
    (release / "elsewhere").symlink_to(release.parent)
    Path(os.fsdecode(os.fsencode(release) + b"/\xff")).write_text("")  # a name that is no UTF-8
    names = ("notes.txt", "records/a.q38-tmp", "elsewhere", "\ufffd")
    assert named(check(release)) == dict.fromkeys(names, "extra")


def test_what_git_and_the_hub_put_there_is_not_extra(release: Path) -> None:
    for name in (".git/HEAD", ".cache/huggingface/download/config.json.metadata"):
        (release / name).parent.mkdir(parents=True)
        (release / name).write_text("x")
    assert check(release)["passed"]


def test_swapped_names_are_told_by_whose_bytes_they_are(pieces: Path) -> None:
    one, other = pieces / "tokenizer_config.json", pieces / "generation_config.json"
    texts = one.read_bytes(), other.read_bytes()
    try:
        one.write_bytes(texts[1])
        other.write_bytes(texts[0])
        assert named(check(pieces)) == {one.name: "changed", other.name: "changed"}
    finally:
        one.write_bytes(texts[0])
        other.write_bytes(texts[1])


def test_files_of_one_size_with_swapped_names_are_named(packed: Path, tmp_path: Path) -> None:
    model = Path(shutil.copytree(packed, tmp_path / "model"))
    pair = [tmp_path / "one.md", tmp_path / "other.md"]
    contents = from_model(model)
    for i, file in enumerate(pair):
        file.write_bytes(bytes([i]) * 3 * PIECE)
        contents.files[f"records/{file.name}"] = Item(file)
    out = tmp_path / "out"
    build(contents, out, copy=True, piece=PIECE)
    a, b = out / "records/one.md", out / "records/other.md"
    a.rename(out / "x")
    b.rename(a)
    (out / "x").rename(b)
    result = check(out, full=True)
    assert named(result) == {"records/one.md": "changed", "records/other.md": "changed"}
    assert what(result, "records/one.md") == "holds the bytes of records/other.md"


def test_a_tampered_seal_stops_the_check_there(release: Path) -> None:
    file = release / "RELEASE.json"
    text = file.read_text()
    file.write_text(text.replace('"step": "release build"', '"step": "release built"'))
    (release / SHARD).unlink()
    result = check(release)
    assert named(result) == {"RELEASE.json": "changed"}
    assert "nothing else was compared" in what(result, "RELEASE.json")


def test_a_seal_made_anew_is_found_by_the_digest(release: Path) -> None:
    before = read_seal(release)
    (release / "config.json").write_text("{}")
    files = {n: r.to_dict() for n, r in before.files.items()}
    files["config.json"] = hash_file(release / "config.json", lambda n: None).to_dict()
    document = {k: v for k, v in before.document.items() if k not in ("schema", "seal")}
    write_seal(release, {**document, "files": files})
    assert check(release, full=True)["passed"]
    result = check(release, digest=before.digest)
    assert named(result) == {"RELEASE.json": "changed"}
    assert "not as --digest says" in what(result, "RELEASE.json")
    assert check(release, digest=read_seal(release).digest)["passed"]


def test_what_is_no_file_is_changed_and_not_opened(packed: Path, tmp_path: Path) -> None:
    contents, out = from_model(packed), tmp_path / "out"
    contents.files["records/empty"] = Item(data=b"")
    build(contents, out, copy=True)
    assert check(out, full=True)["passed"]
    (out / "records/empty").unlink()
    os.mkfifo(out / "records/empty")  # of the same size; opening it would wait for ever
    (out / SHARD).unlink()
    (out / SHARD).mkdir()
    result = check(out)
    assert named(result) == {"records/empty": "changed", SHARD: "changed"}
    assert what(result, "records/empty") == "is not a file"


def test_links_to_the_sealed_bytes_pass_as_the_hubs_cache_makes_them(release: Path, tmp_path: Path) -> None:
    blob = tmp_path / "blob"
    (release / SHARD).rename(blob)
    (release / SHARD).symlink_to(blob)
    assert check(release, full=True)["passed"]
    blob.unlink()
    assert named(check(release)) == {SHARD: "missing"}


def test_a_file_that_cannot_be_read_is_named_and_the_others_are_read(
    release: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = module.hash_range

    def broken(file: Path, *arguments: Any) -> str:
        if file.name == SHARD:
            raise OSError(5, "Input/output error")
        return real(file, *arguments)

    monkeypatch.setattr(module, "hash_range", broken)
    with changed(release / "config.json", 3):
        result = check(release, full=True)
    assert named(result) == {SHARD: "changed", "config.json": "changed"}
    assert "Input/output error" in what(result, SHARD)


def test_a_directory_that_is_no_release_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "absent", tmp_path):
        with pytest.raises(InputError):
            check(path)
