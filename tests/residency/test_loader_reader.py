"""Reading parts of files, with and without O_DIRECT."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from q38.base.errors import InputError
from q38.residency import reader as module
from q38.residency.reader import ALIGN, FileReader, aligned, cached_share, room

SIZE = 5 * ALIGN + 123


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("reader") / "data.bin"
    file.write_bytes(np.random.default_rng(0).bytes(SIZE))
    return file


@given(begin=st.integers(0, SIZE), length=st.integers(0, SIZE), direct=st.sampled_from([True, False, None]))
def test_any_range_comes_back_as_it_is_in_the_file(
    file: Path, begin: int, length: int, direct: bool | None
) -> None:
    end = min(begin + length, SIZE)
    reader = FileReader(file, direct=direct)
    buffer = aligned(room(begin, end))
    assert reader.read(begin, end, buffer).tobytes() == file.read_bytes()[begin:end]
    reader.close()


def test_reading_past_the_end_is_refused_and_says_where_the_file_ends(file: Path) -> None:
    for direct in (True, False):
        reader = FileReader(file, direct=direct)
        with pytest.raises(
            InputError, match=f"the file ends at byte {SIZE}, its header describes {SIZE + 9000}"
        ):
            reader.read(100, SIZE + 9000, aligned(room(100, SIZE + 9000)))
        reader.close()


@pytest.mark.parametrize("direct", [True, False])
def test_short_reads_are_continued_and_direct_ones_start_aligned(
    file: Path, direct: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = FileReader(file, direct=direct)
    starts = []

    def short(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        starts.append(offset)
        return os_preadv(fd, [buffers[0][: ALIGN + 512]], offset)

    os_preadv = os.preadv
    monkeypatch.setattr(module.os, "preadv", short)
    data = reader.read(1000, SIZE - 50, aligned(room(1000, SIZE - 50)))
    assert data.tobytes() == file.read_bytes()[1000 : SIZE - 50]
    assert len(starts) > 3
    assert not reader.direct or all(start % ALIGN == 0 for start in starts)
    reader.close()


def test_a_file_system_without_direct_reads_is_read_through_the_cache(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.open

    def refuse(path: Path, flags: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return real(path, flags)

    monkeypatch.setattr(module.os, "open", refuse)
    reader = FileReader(file, direct=True)
    assert not reader.direct
    assert reader.read(7, 5000, aligned(room(7, 5000))).tobytes() == file.read_bytes()[7:5000]
    reader.close()


@pytest.mark.parametrize(("share", "direct"), [(0.0, True), (0.49, True), (0.51, False), (1.0, False)])
def test_a_file_in_the_page_cache_is_read_through_it(
    file: Path, share: float, direct: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "cached_share", lambda fd: share)
    supported = FileReader(file, direct=True)
    reader = FileReader(file)
    assert reader.direct == (direct and supported.direct)
    reader.close()
    supported.close()


def test_the_cached_share_of_a_file_just_written_is_whole_and_of_a_dropped_one_nothing(
    tmp_path: Path,
) -> None:
    file = tmp_path / "data.bin"
    file.write_bytes(bytes(64 * ALIGN))
    with file.open("rb") as f:
        written = cached_share(f.fileno())
        os.fsync(f.fileno())
        os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        dropped = cached_share(f.fileno())
    if written == 0:
        pytest.skip("this kernel has no cachestat")
    assert written == 1 and dropped < 0.5


def test_a_missing_file_is_refused() -> None:
    with pytest.raises(InputError, match="cannot be read"):
        FileReader(Path("/nonexistent/model.safetensors"))
