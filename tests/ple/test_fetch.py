"""Rows of a decode step by the C function: the same bytes as the table's, from disk and from both caches."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from q38.base.errors import InputError, ResourceError
from q38.ple import fetch
from q38.ple.fetch import RowFetcher, RowRequest
from q38.ple.reader import PleTable, _Segment
from q38.ple.row_cache import RowCache
from q38.ple.split import split_ple
from tests.ple.sources import make_source
from tests.ple.test_scales import some_scales, with_row_scales

ROWS, WIDTH = 5000, 160  # of which some lie on two pages


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("fetch") / "table.bin"
    path.write_bytes(np.random.default_rng(1).integers(0, 256, ROWS * WIDTH, np.uint8).tobytes())
    return path


def open_table(file: Path) -> PleTable:
    return PleTable([_Segment(file, 0, ROWS)], WIDTH, "F8_E4M3", 0.5, file)


@pytest.fixture(params=[True, False], ids=["direct", "page cache"])
def fetcher(file: Path, request: pytest.FixtureRequest) -> Iterator[RowFetcher]:
    opened = RowFetcher(open_table(file), RowCache(512, WIDTH), direct=request.param)
    if request.param and not opened.direct:
        pytest.skip("no direct reads on this file system")
    yield opened
    opened.close()


def rows_of(fetcher: RowFetcher, ids: list[int]) -> np.ndarray:
    asked = torch.tensor(ids)
    out = torch.zeros(len(ids), fetcher.table.row_bytes, dtype=torch.uint8)
    fetcher(RowRequest(fetcher, asked, out))
    return out.numpy()


def stored(table: PleTable, ids: list[int]) -> np.ndarray:
    unique, place = np.unique(np.array(ids), return_inverse=True)
    return table.stored(unique)[place]


def test_rows_are_the_tables_whatever_was_asked_before(fetcher: RowFetcher) -> None:
    """More ids than are read at once, first and last row, rows on two pages, repeats."""
    generator, last = np.random.default_rng(0), ROWS - 1
    on_two_pages = next(i for i in range(last) if i * WIDTH % 4096 > 4096 - WIDTH)
    for n in (1, 16, 16, 700):
        ids = [0, last, on_two_pages, *generator.integers(0, last, n).tolist(), last]
        assert (rows_of(fetcher, ids) == stored(fetcher.table, ids)).all()
        fetcher.check()


def test_a_row_is_read_once(fetcher: RowFetcher) -> None:
    ids = [5, 900, 17]
    for _ in range(2):
        rows_of(fetcher, ids)
    counts = fetcher.counts()
    assert (counts["rows"], counts["hits"]) == (6, 3)
    assert counts["wait_s"] > 0


def test_rows_that_a_prompt_brought_are_not_read_again(fetcher: RowFetcher) -> None:
    marked = np.full((1, fetcher.table.row_bytes), 7, np.uint8)
    fetcher._prompt.put(np.array([321]), marked)
    assert (rows_of(fetcher, [321, 4])[0] == 7).all()
    assert fetcher.counts()["hits"] == 1


def test_a_step_waits_while_rows_of_a_prompt_are_put(fetcher: RowFetcher) -> None:
    """Neither looks at a row that the other is writing."""
    held: list[bool] = []

    class Watched(np.ndarray):
        def __setitem__(self, *arguments: object) -> None:
            held.append(not step.is_alive())
            if len(held) == 1:  # a put is under way: the step must not get past it
                step.start()
                step.join(0.2)
                held[0] = step.is_alive()
            super().__setitem__(*arguments)  # type: ignore[call-overload]

    found: list[np.ndarray] = []
    step = threading.Thread(target=lambda: found.append(rows_of(fetcher, [321])))
    fetcher._prompt._rows = fetcher._prompt._rows.view(Watched)
    fetcher._prompt.put(np.array([321]), np.full((1, WIDTH), 7, np.uint8))
    step.join()
    assert held == [True]
    assert (found[0] == 7).all()


@pytest.mark.parametrize("wrong", [-1, 10**12])
def test_a_row_outside_the_table_is_reported(fetcher: RowFetcher, wrong: int) -> None:
    rows_of(fetcher, [1, wrong])
    with pytest.raises(InputError, match=f"row {wrong} cannot be read"):
        fetcher.check()
    rows_of(fetcher, [1])
    with pytest.raises(InputError):  # it stays reported
        fetcher.check()


@pytest.mark.parametrize("direct", [True, False])
def test_a_file_that_ends_early_is_reported(file: Path, tmp_path: Path, direct: bool) -> None:
    copy = Path(shutil.copy(file, tmp_path))
    fetcher = RowFetcher(open_table(copy), RowCache(512, WIDTH), direct=direct)
    with copy.open("r+b") as handle:
        handle.truncate(WIDTH * 100)
    assert (rows_of(fetcher, [99]) == np.fromfile(copy, np.uint8)[-WIDTH:]).all()
    fetcher.check()
    rows_of(fetcher, [*range(60), ROWS - 1, *range(60, 90)])
    with pytest.raises(InputError, match="the file ends before it"):
        fetcher.check()
    fetcher.close()


def test_tables_that_no_step_can_read_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    split_ple(with_row_scales(tmp_path / "source", some_scales()), tmp_path / "rows")
    assert fetch.obstacle(tmp_path / "rows") == "the table has one scale per row"
    with pytest.raises(InputError, match="--no-overlap"):
        RowFetcher(PleTable.open(tmp_path / "rows"), RowCache(512, 16))
    split_ple(make_source(tmp_path / "fp8", fp8=True), tmp_path / "ple")
    assert fetch.obstacle(tmp_path / "ple") is None
    monkeypatch.setattr(fetch, "_compiler", lambda: None)
    assert fetch.obstacle(tmp_path / "ple") == "there is no C compiler"
    with pytest.raises(ResourceError, match="Install gcc"):
        fetch._library.__wrapped__()


def test_the_structures_are_those_of_the_c_file(fetcher: RowFetcher, tmp_path: Path) -> None:
    """Sizes by the compiler; a field that C has and Python lacks would shift all after it."""
    source = tmp_path / "sizes.c"
    source.write_text(
        f'#include "{fetch._SOURCE}"\n#include <stdio.h>\n'
        'int main(void) { printf("%zu %zu %zu %d %d", sizeof(struct table), sizeof(struct cache), sizeof(struct request), DEPTH, ROOM); }\n'
    )
    compiler = fetch._compiler()
    assert compiler is not None
    subprocess.run([compiler, "-pthread", "-o", tmp_path / "sizes", source], check=True)
    found = subprocess.run([tmp_path / "sizes"], capture_output=True, text=True, check=True).stdout.split()
    sizes = [ctypes.sizeof(s) for s in (fetch._Table, fetch._Cache, fetch._Request)]
    assert list(map(int, found)) == [*sizes, fetch._DEPTH, fetch._ROOM]
