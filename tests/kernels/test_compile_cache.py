"""Compiled kernels on disk: compiled once, damaged files replaced, unsafe places left alone. The compiler is faked."""

from __future__ import annotations

import hashlib
import multiprocessing
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from q38.base import settings as environment
from q38.kernels import nvrtc
from q38.kernels.compile_cache import cache_key, cached


class Compiler:
    """Counts its calls; each gives other bytes."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> bytes:
        self.calls += 1
        return b"code %d" % self.calls


def test_a_kernel_is_compiled_once(tmp_path: Path) -> None:
    compiler = Compiler()
    assert [cached(tmp_path / "deep/er", "k", compiler) for _ in range(3)] == [b"code 1"] * 3
    assert compiler.calls == 1 and [f.name for f in (tmp_path / "deep/er").iterdir()] == ["k.cubin"]


def test_another_key_is_compiled_for_itself(tmp_path: Path) -> None:
    compiler = Compiler()
    assert (cached(tmp_path, "a", compiler), cached(tmp_path, "b", compiler)) == (b"code 1", b"code 2")


@given(st.binary(max_size=80), st.integers(0, 60))
@settings(max_examples=15)
def test_a_damaged_entry_is_compiled_and_written_again(
    tmp_path_factory: pytest.TempPathFactory, junk: bytes, cut: int
) -> None:
    for damage in (junk, None):
        directory, compiler = tmp_path_factory.mktemp("cache"), Compiler()
        file = directory / "k.cubin"
        cached(directory, "k", lambda: b"whole code")
        whole = file.read_bytes()
        file.write_bytes(whole[: min(cut, len(whole) - 1)] if damage is None else damage)
        assert cached(directory, "k", compiler) == b"code 1"
        assert cached(directory, "k", compiler) == b"code 1" and compiler.calls == 1
        assert file.read_bytes() == hashlib.sha256(b"code 1").digest() + b"code 1"


def test_a_failed_compilation_leaves_nothing(tmp_path: Path) -> None:
    def fails() -> bytes:
        raise RuntimeError("no such type")

    with pytest.raises(RuntimeError, match="no such type"):
        cached(tmp_path, "k", fails)
    assert not list(tmp_path.iterdir())


def test_a_directory_that_others_may_write_to_is_not_used(tmp_path: Path) -> None:
    compiler = Compiler()
    cached(tmp_path, "k", compiler)
    tmp_path.chmod(0o777)
    assert cached(tmp_path, "k", compiler) == b"code 2"
    assert (tmp_path / "k.cubin").read_bytes().endswith(b"code 1")


@pytest.mark.parametrize("blocked", ["file in the way", "no directory"])
def test_where_nothing_can_be_written_every_process_compiles(tmp_path: Path, blocked: str) -> None:
    (tmp_path / "taken").write_bytes(b"")
    (tmp_path / "there" / "k.cubin").mkdir(parents=True)
    directory = tmp_path / ("there" if blocked == "file in the way" else "taken")
    compiler = Compiler()
    assert [cached(directory, "k", compiler) for _ in range(2)] == [b"code 1", b"code 2"]
    assert not list(tmp_path.rglob("*.part"))


def _compile_at_once(directory: Path, number: int) -> bytes:
    return cached(directory, "k", lambda: b"%d" % number * 100_000)


def test_processes_that_compile_at_once_leave_one_whole_entry(tmp_path: Path) -> None:
    with multiprocessing.get_context("fork").Pool(4) as pool:
        made = pool.starmap(_compile_at_once, [(tmp_path, i) for i in range(8)])
    assert cached(tmp_path, "k", Compiler()) in made
    assert [f.name for f in tmp_path.iterdir()] == ["k.cubin"]


@given(st.lists(st.binary(max_size=4), max_size=4), st.lists(st.binary(max_size=4), max_size=4))
def test_keys_are_equal_only_for_equal_parts(a: list[bytes], b: list[bytes]) -> None:
    assert (cache_key(a) == cache_key(b)) == (a == b)


def test_source_headers_options_architecture_and_compiler_are_part_of_the_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = pytest.importorskip("cuda.bindings.nvrtc", reason="cuda-bindings is not installed")
    monkeypatch.setenv("Q38_CACHE_DIR", str(tmp_path / "cache"))
    source, header = tmp_path / "k.cu", tmp_path / "k.cuh"
    source.write_text("a")
    header.write_text("b")
    version = [13, 0]
    monkeypatch.setattr(library, "nvrtcVersion", lambda: (0, *version))
    compiler = Compiler()
    monkeypatch.setattr(nvrtc, "compile_cubin", lambda *_: compiler())

    def build(arch: str = "sm_90", **defines: int) -> bytes:
        return nvrtc.cached_cubin(source, defines, arch)

    first = build(A=1, B=2)
    assert build(B=2, A=1) == first  # whatever the order
    assert build(A=1, B=3) != first and build("sm_89", A=1, B=2) != first
    for change in (lambda: source.write_text("c"), lambda: header.write_text("c"), lambda: version.reverse()):
        before = build(A=1, B=2)
        change()
        assert build(A=1, B=2) != before
    assert len(list((tmp_path / "cache" / "kernels").iterdir())) == compiler.calls == 6


def test_the_cache_directory_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("Q38_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert environment.load().cache_dir == tmp_path / "q38"
    monkeypatch.setenv("Q38_CACHE_DIR", str(tmp_path / "mine"))
    assert environment.load().cache_dir == tmp_path / "mine"
