"""A result for readers: tables, notes, Markdown, plots, and the page."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from q38.measure.bench.plan import Plan
from q38.measure.bench.plots import bench_plots
from q38.measure.bench.report import CAPTIONS, html_report, markdown_report, write_bench_report
from q38.measure.bench.run import BenchFailed, bench_serve
from q38.measure.bench.tables import cell_table, notes, number, verdict_line
from tests.measure.pages import check_page
from tests.serving.fake_server import DROP, answer, chunk, fake_server

PIECES = ["one ", "two ", "three ", "four"]


@pytest.fixture(scope="module")
def measured() -> Iterator[dict[str, Any]]:
    """Two depths, one and two requests at once, cold and warm, against a second server in turns."""
    with fake_server() as one, fake_server() as two:
        for fake in (one, two):
            fake.script = lambda body: answer(PIECES, body, first=0.002, between=0.001)
        plan = Plan((64, 256), (1, 2), max_tokens=4, repeats=2, max_warmup=1)
        yield bench_serve(one.url, plan, against=two.url)


def incomplete(name: str = "fake") -> dict[str, Any]:
    with fake_server() as fake:
        fake.models = f'{{"data": [{{"id": "{name}"}}]}}'
        fake.script = lambda body: (
            [chunk("a"), DROP]
            if len(fake.requests) == 2 + 3
            else answer(PIECES, body, between=0.001, tokens_per_piece=2)
        )
        with pytest.raises(BenchFailed) as failed:
            bench_serve(fake.url, Plan((64,), prefixes=("cold",), max_tokens=16, repeats=2, max_warmup=1))
        return failed.value.partial


def test_a_table_has_the_columns_that_say_something(measured: dict[str, Any]) -> None:
    table = cell_table(measured)
    assert {"depth", "at once", "prefix", "ms/token p50", "p99", "all output tok/s"} <= set(table.columns)
    assert "cached" not in table.columns
    assert "link GB/s" not in table.columns
    assert len(table.rows) == 2 * 3
    alone = {
        **measured,
        "cells": [c for c in measured["cells"] if c["concurrency"] == 1 and c["prefix"] == "cold"],
    }
    assert not {"at once", "prefix"} & set(cell_table(alone).columns)


def test_the_servers_own_figures_get_columns(measured: dict[str, Any]) -> None:
    server = {"prefix_hit_rate": 0.5, "expert_hit_rate": 0.84, "host_link_gb_per_s": 11.5}
    told = {**measured, "cells": [{**c, "server": server} for c in measured["cells"]]}
    table = cell_table(told)
    row = dict(zip(table.columns, table.rows[0], strict=True))
    assert (row["prefix hits %"], row["expert hits %"], row["link GB/s"]) == (50, 84, 11.5)
    assert "expert VRAM GB/s" not in row


def test_an_unfinished_run_says_so_everywhere() -> None:
    result = incomplete()
    assert cell_table(result).rows[0][0] == "64 (unfinished)"
    assert any(n.startswith("INCOMPLETE: depth 64, cold prefix, repeat 2 of 2") for n in notes(result))
    assert "INCOMPLETE" in markdown_report(result, [])
    page = html_report(result, {})
    assert "not finished" in page and "INCOMPLETE" in page


def test_notes_tell_what_the_figures_hide() -> None:
    told = " ".join(notes(incomplete()))
    assert "Not steady" in told
    assert "2.00 tokens on average" in told
    assert "ended before --max-tokens in depth 64" in told


def test_a_plain_result_needs_no_notes(measured: dict[str, Any]) -> None:
    cells = [{**c, "warmup": {"rounds": 2, "steady": True}} for c in measured["cells"]]
    calm = {**measured["machine"], "load": 0.0}
    assert notes({**measured, "cells": cells, "machine": calm}) == []
    busy = {**calm, "load": 100.0}
    assert "busy" in notes({**measured, "cells": cells, "machine": busy})[0]


def test_every_plot_has_a_caption_units_and_no_size_of_its_own(measured: dict[str, Any]) -> None:
    plots = bench_plots(measured)
    assert set(plots) == set(CAPTIONS)
    for name, unit in (("first-token", ", s"), ("decode", "tokens/s"), ("between-tokens", ", ms")):
        assert unit in plots[name]
    for svg in plots.values():
        assert not re.search(r' (width|height)="', svg[: svg.index(">")])
        assert "nan" not in re.sub(r'id="[^"]*"', "", svg).lower()


def test_a_plot_of_a_single_point_is_left_out(measured: dict[str, Any]) -> None:
    alone = {**measured, "cells": measured["cells"][:1], "comparison": None}
    assert set(bench_plots(alone)) == {"between-tokens"}


def test_the_report_is_complete_without_a_network(measured: dict[str, Any], tmp_path: Path) -> None:
    files = write_bench_report(tmp_path / "new" / "report", measured)
    assert {f.name for f in files} == {"report.md", "report.html", *(f"{name}.svg" for name in CAPTIONS)}
    tags = check_page((tmp_path / "new" / "report" / "report.html").read_text())
    assert tags.count("svg") == len(CAPTIONS)
    assert tags.count("table") >= 2
    markdown = (tmp_path / "new" / "report" / "report.md").read_text()
    for name in re.findall(r"\]\(([^)]+)\)", markdown):
        root = ElementTree.parse(tmp_path / "new" / "report" / name).getroot()
        assert root.tag.endswith("svg")
    assert measured["command"] in markdown
    assert verdict_line(measured["comparison"]) in markdown


def test_names_from_a_server_cannot_break_the_page() -> None:
    page = html_report(incomplete("<script>x</script>"), {})
    assert "<script>" not in page
    assert "&lt;script&gt;" in page
    check_page(page)


def test_numbers_read_well() -> None:
    assert [number(v) for v in (None, 12345.6, 1000, 3.14159, 0.000123456, "x")] == [
        "–",
        "12,346",
        "1,000",
        "3.142",
        "0.0001235",
        "x",
    ]
