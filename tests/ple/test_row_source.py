"""Rows for a server: the same bytes whichever way they come, and counts that say which way it was."""

from __future__ import annotations

import errno
import threading
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from q38.base.errors import InputError
from q38.ple import aio, row_source
from q38.ple.aio import AioQueue
from q38.ple.probe import probe_table
from q38.ple.reader import PleTable
from q38.ple.row_cache import RowCache
from q38.ple.row_source import RowSource
from q38.ple.split import split_ple
from tests.ple.sources import make_source

ROWS = 20_992


@pytest.fixture(scope="module")
def split(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("row_source")
    split_ple(make_source(root / "fp8", fp8=True), root / "ple")
    return root / "ple"


@pytest.fixture(params=[True, False], ids=["direct", "page cache"])
def source(split: Path, request: pytest.FixtureRequest) -> Iterator[RowSource]:
    opened = RowSource(PleTable.open(split), direct=request.param)
    if request.param and not opened.direct:
        pytest.skip("no direct reads on this file system")
    yield opened
    opened.close()


def expect(source: RowSource, ids: Any, *, decode: bool = False) -> None:
    ids = np.array(ids, np.int64)
    wanted = source.table.rows(torch.from_numpy(ids))
    if decode:
        found = source.table.values(source.few(ids.tolist()), ids.tolist())
    else:
        rows, place = source.rows(ids)
        found = source.table.values(rows, np.unique(ids).tolist())[torch.from_numpy(place)]
    assert torch.equal(found, wanted)


@pytest.fixture(scope="module")
def reused(split: Path) -> RowSource:
    """One source for many examples, with caches so small that slots are shared."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_source, "DECODE_ROWS", 16)
        patch.setattr(row_source, "PROMPT_SLOTS", 64)
        return RowSource(PleTable.open(split))


IDS = st.lists(st.integers(0, ROWS - 1) | st.integers(0, 40), min_size=1, max_size=300)


@given(ids=IDS, following=IDS, decode=st.booleans())
def test_rows_are_those_of_the_table(
    reused: RowSource, ids: list[int], following: list[int], decode: bool
) -> None:
    reused.read_ahead(np.array(following))
    expect(reused, ids, decode=decode)
    expect(reused, following)


def test_what_was_read_once_is_not_read_again(source: RowSource) -> None:
    expect(source, [5, 9, 5])
    assert (source.counts.rows, source.counts.hits) == (3, 1)
    expect(source, [9, 5], decode=True)
    assert (source.counts.rows, source.counts.hits) == (5, 3)


def test_rows_read_ahead_are_taken_once(source: RowSource) -> None:
    ids = np.arange(0, 20_000, 100)
    source.read_ahead(ids)
    expect(source, ids)
    assert (source.counts.ahead, source.counts.hits) == (200, 0)
    expect(source, ids)
    assert (source.counts.ahead, source.counts.hits) == (200, 200)


def test_a_decode_step_does_not_wait_for_the_rows_of_a_prompt(
    source: RowSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    go, read = threading.Event(), source._read

    def slow(queue: int, ids: Any) -> Any:
        assert queue == 0 or go.wait(20)
        return read(queue, ids)

    monkeypatch.setattr(source, "_read", slow)
    source.read_ahead(np.arange(1000))
    expect(source, [3, 4], decode=True)  # would hang
    go.set()
    expect(source, np.arange(1000))
    assert source.counts.ahead == 1000


def test_a_prompt_cannot_evict_what_decoding_read(source: RowSource) -> None:
    expect(source, range(100), decode=True)
    expect(source, range(100, ROWS))
    before = source.counts.hits
    expect(source, range(100), decode=True)
    assert source.counts.hits - before == 100


def test_rows_of_decode_steps_take_memory_once_such_a_step_asks_for_some(split: Path) -> None:
    opened = RowSource(PleTable.open(split))
    size = row_source.DECODE_ROWS * opened.table.row_bytes
    tracemalloc.start()
    try:
        expect(opened, range(100))
        assert tracemalloc.get_traced_memory()[0] < size / 10
        expect(opened, [5], decode=True)
        assert tracemalloc.get_traced_memory()[0] > size
    finally:
        tracemalloc.stop()
        opened.close()


def test_a_failure_while_reading_ahead_reaches_the_step(
    source: RowSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_queue: int, _ids: Any) -> Any:
        raise InputError("the disk is gone")

    with monkeypatch.context() as patch:
        patch.setattr(source, "_read", fail)
        source.read_ahead(np.arange(1000))
        with pytest.raises(InputError, match="the disk is gone"):
            source.rows(np.arange(1000))
    expect(source, range(1000))


@pytest.mark.parametrize("row", [-1, ROWS])
def test_a_row_outside_the_table_is_refused(source: RowSource, row: int) -> None:
    with pytest.raises(ValueError, match="of a table of"):
        source.rows(np.array([5, row]))
    with pytest.raises(ValueError, match="of a table of"):
        source.few([5, row])


@pytest.fixture
def queue(tmp_path: Path) -> Iterator[tuple[AioQueue, bytes]]:
    data = np.random.default_rng(1).integers(0, 256, 5 * 4096 + 1000, np.uint8).tobytes()
    (tmp_path / "f").write_bytes(data)
    try:
        opened = AioQueue(tmp_path / "f", depth=4)
    except OSError:
        pytest.skip("no direct reads on this file system")
    yield opened, data
    opened.close()


@given(st.lists(st.integers(0, 5 * 4096 + 1000 - 160), min_size=1, max_size=40))
def test_direct_reads_give_the_bytes_of_the_file(tmp_path_factory: Any, offsets: list[int]) -> None:
    """Rows across pages, in the short last page, in any order, with more of them than fit at once."""
    directory = tmp_path_factory.getbasetemp()
    data = np.random.default_rng(1).integers(0, 256, 5 * 4096 + 1000, np.uint8).tobytes()
    file = directory / "direct.bin"
    if not file.exists():
        file.write_bytes(data)
    try:
        opened = AioQueue(file, depth=3)
    except OSError:
        pytest.skip("no direct reads on this file system")
    rows = opened.read(np.array(offsets), 160)
    opened.close()
    assert [row.tobytes() for row in rows] == [data[o : o + 160] for o in offsets]


def test_a_file_that_was_cut_is_noticed(queue: tuple[AioQueue, bytes], tmp_path: Path) -> None:
    with (tmp_path / "f").open("r+b") as f:
        f.truncate(8192)
    with pytest.raises(InputError, match="cannot be read at byte"):
        queue[0].read(np.arange(0, 20_000, 500), 160)
    assert queue[0].read(np.array([100]), 160).tobytes() == queue[1][100:260]


def test_a_system_without_native_aio_reads_through_the_page_cache(
    split: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_arguments: Any, **_options: Any) -> None:
        raise OSError(errno.ENOSYS, "no")

    monkeypatch.setattr(aio.AioQueue, "__init__", refuse)
    opened = RowSource(PleTable.open(split))
    assert not opened.direct
    expect(opened, [1, 2, 3])


@given(st.lists(st.integers(0, 99), min_size=1, max_size=60, unique=True))
def test_a_cache_gives_back_what_was_put_last(ids: list[int]) -> None:
    cache, wanted = RowCache(16, 4), np.array(ids)
    cache.put(wanted, np.repeat(wanted[:, None], 4, axis=1).astype(np.uint8))
    out = np.zeros((len(ids), 4), np.uint8)
    found = cache.get(wanted, out)
    assert found[-1] and (out[found] == wanted[found][:, None]).all()
    assert cache.get(np.array([1000]), out[:1]).sum() == 0


def test_the_probe_reads_rows_and_counts_what_a_prompt_could_take(split: Path) -> None:
    found = probe_table(split, rows_per_token=16, seed=0)
    assert found.iops > 0 and found.tokens_per_s == pytest.approx(found.iops / 16)
    assert 0 < found.p50_ms <= found.p99_ms
    assert not found.sparse
