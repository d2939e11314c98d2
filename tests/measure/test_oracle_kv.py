"""q38 oracle kv: what it computes from scores, and when it refuses. The servers are the real ones in tests/sglang_ext."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from q38.base.errors import CheckFailed, InputError
from q38.base.progress import SILENT, Progress
from q38.measure.oracle_kv import KvOptions, Scorer, measure, plan
from q38.measure.oracle_needles import Ranked
from q38.measure.oracle_prompts import Item
from tests.measure.test_oracle_needles import read_back

OPTIONS = KvOptions(formats=("int8", "int4"), tokens=300, chunk=64, ring=32)
Start = Callable[[str, bool], AbstractContextManager[Scorer]]


class Scores:
    """Log-probabilities by position, with an error of a given size."""

    def __init__(self, size: float, started: list[Any], *, noise: float = 0.0) -> None:
        self.size, self.noise, self.calls, self.started = size, noise, 0, started

    def score(self, items: Sequence[Item], *, progress: Progress = SILENT) -> list[list[float]]:
        (item,) = items
        self.started.append((len(item.prompt), len(item.continuation)))
        self.calls += 1
        at = np.arange(len(item.continuation))
        error = self.size * np.where(at % 2, 1.0, -0.5) + self.noise * (self.calls - 1)
        return [(-3.0 - np.sin(at) + error).tolist()]

    def score_ranked(self, item: Item, top: int) -> list[Ranked]:
        """A model that knows what it has read, as far as its cache is right."""
        return read_back(item, trust=1.0 if self.size < 1 else 0.0)


def servers(sizes: dict[str, float], started: list[Any], *, noise: float = 0.0) -> Start:
    @contextmanager
    def start(name: str, zeroed: bool) -> Iterator[Scorer]:
        started.append((name, zeroed))
        yield Scores(sizes["zeros" if zeroed else name], started, noise=noise)

    return start


GOOD = {"bf16": 0.0, "int8": 0.004, "int4": 0.04, "zeros": 2.0}


def test_each_format_is_compared_with_bf16_at_every_position_that_reads_the_cache(
    tiny_packed: Path, tmp_path: Path
) -> None:
    started: list[Any] = []
    out = tmp_path / "kv.json"
    result = measure(tiny_packed, out, options=OPTIONS, servers=servers(GOOD, started, noise=1e-5))
    needles = result["needles"]
    assert needles["needles"] == 6  # 150 and 300 tokens; 75 are too few after a step of 64
    assert needles["retrieves"]
    assert {name: run["found"] for name, run in needles["runs"].items()} == {
        "bf16": 6,
        "int8": 6,
        "int4": 6,
        "zeros": 0,
    }
    assert out.with_suffix(".needles.svg").read_text().startswith("<svg")
    assert [s for s in started if isinstance(s[1], bool)] == [
        ("bf16", False),
        ("int8", False),
        ("int4", False),
        ("int8", True),
    ]
    assert {s for s in started if not isinstance(s[1], bool)} == {(64, 236)}
    assert result["order"] == ["int8", "int4"]
    int4 = result["formats"]["int4"]
    assert int4["mean_abs"] == pytest.approx(0.03)  # half the positions move by 0.04, half by 0.02
    assert int4["d_nll"] == pytest.approx(-0.01)
    assert int4["max_abs"] == pytest.approx(0.04)
    assert int4["nll"] == pytest.approx(result["reference"]["nll"] + int4["d_nll"])
    assert result["noise"]["mean_abs"] == pytest.approx(1e-5)
    assert result["control"]["mean_abs"] > 1
    assert len(int4["by_position"]) == 16
    assert json.loads(out.read_text()) == result
    plot = out.with_suffix(".svg").read_text()
    assert all(name in plot for name in ("int8", "int4", "zeros (control)", "bf16 again (noise)"))


@pytest.mark.parametrize(("zeros", "noise"), [(0.005, 0.0), (0.1, 0.02)])
def test_a_text_that_does_not_read_the_cache_is_refused(
    tiny_packed: Path, tmp_path: Path, zeros: float, noise: float
) -> None:
    out = tmp_path / "kv.json"
    with pytest.raises(CheckFailed, match="a cache of zeros moves"):
        measure(tiny_packed, out, options=OPTIONS, servers=servers({**GOOD, "zeros": zeros}, [], noise=noise))
    assert not out.exists()


def test_a_score_that_is_not_finite_is_a_failed_check(tiny_packed: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckFailed, match="not finite"):
        measure(
            tiny_packed, tmp_path / "kv.json", options=OPTIONS, servers=servers({**GOOD, "int4": np.nan}, [])
        )


def test_a_result_is_kept_and_one_of_other_inputs_is_not_replaced(tiny_packed: Path, tmp_path: Path) -> None:
    out, started = tmp_path / "kv.json", list[Any]()
    first = measure(tiny_packed, out, options=OPTIONS, servers=servers(GOOD, started))
    count = len(started)
    assert measure(tiny_packed, out, options=OPTIONS, servers=servers(GOOD, started)) == first
    assert plan(tiny_packed, out, options=OPTIONS)["servers"] == 0
    assert len(started) == count
    other = replace(OPTIONS, chunk=65)
    with pytest.raises(InputError, match=r"other inputs \(chunk\)"):
        measure(tiny_packed, out, options=other, servers=servers(GOOD, started))
    assert measure(tiny_packed, out, options=other, fresh=True, servers=servers(GOOD, started)) != first
    out.write_text("{}")
    with pytest.raises(InputError, match=r"is no q38\.oracle-kv/2 file"):
        plan(tiny_packed, out, options=OPTIONS)


def test_the_plan_counts_servers_and_positions(tiny_packed: Path, tmp_path: Path) -> None:
    planned = plan(tiny_packed, tmp_path / "kv.json", options=OPTIONS)
    assert (planned["servers"], planned["positions"], planned["needles"]) == (4, 236, 6)
    assert [Path(file).name for file in planned["writes"]] == ["kv.json", "kv.svg", "kv.needles.svg"]
    planned = plan(tiny_packed, tmp_path / "kv.json", options=replace(OPTIONS, needles=()))
    assert (planned["needles"], len(planned["writes"])) == (0, 2)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (replace(OPTIONS, formats=("int5",)), "no format 'int5'"),
        (replace(OPTIONS, formats=()), "known: int8"),
        (replace(OPTIONS, formats=("bf16",)), "no format 'bf16'"),
        (replace(OPTIONS, tokens=64), "read no cache"),
        (replace(OPTIONS, tokens=10**7), "the text has"),
        (replace(OPTIONS, text=Path("/no/such/file")), "cannot be read"),
        (replace(OPTIONS, needles=(80,)), "lengths from 96"),
        (replace(OPTIONS, needles=(200, 301)), "to 300"),
        (replace(OPTIONS, depths=(0.5, 1.5)), "a depth is a part"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_starts(
    tiny_packed: Path, tmp_path: Path, options: KvOptions, said: str
) -> None:
    with pytest.raises(InputError, match=f"(?i){said}"):
        measure(tiny_packed, tmp_path / "kv.json", options=options, servers=servers(GOOD, []))
