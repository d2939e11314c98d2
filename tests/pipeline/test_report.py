"""Plots and tables of the report."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from q38.measure.bench.plan import Plan
from q38.measure.bench.run import bench_serve
from q38.model.names import Group
from q38.pipeline import plots
from q38.pipeline.inventory import group_sizes
from q38.pipeline.report import render
from tests.measure.pages import check_page
from tests.serving.fake_server import answer, fake_server

LAYERS = [{"layer": i, "relative_error": 0.1 * (i + 1), "floor": 1e-3} for i in range(4)]
KINDS = ["linear_attention"] * 3 + ["full_attention"]
MASS = np.random.default_rng(0).dirichlet(np.ones(16) * 0.3, size=4)


@pytest.mark.parametrize(
    "svg",
    [plots.layer_error_plot(LAYERS, KINDS), plots.coverage_plot(MASS), plots.routing_map(MASS)],
    ids=["layers", "coverage", "routing"],
)
def test_a_plot_takes_its_ink_and_size_from_the_page(svg: str) -> None:
    head = svg[: svg.index(">")]
    assert "viewBox" in head
    assert not re.search(r' (width|height)="', head)
    assert "currentColor" in svg
    assert "#010203" not in svg
    assert "http" not in re.sub(r'xmlns(:xlink)?="[^"]*"', "", svg)


def test_the_same_numbers_give_the_same_plot() -> None:
    assert plots.coverage_plot(MASS) == plots.coverage_plot(MASS)


def test_a_layer_that_was_never_routed_does_not_break_the_plots() -> None:
    mass = MASS.copy()
    mass[2] = 0
    assert "nan" not in plots.routing_map(mass).lower()
    assert "nan" not in plots.coverage_plot(mass).lower()


def test_the_page_of_a_run_shows_its_speed_and_loads_nothing() -> None:
    with fake_server() as fake:
        fake.script = lambda body: answer(["a", "b", "c"], body, first=0.002, between=0.001)
        bench = bench_serve(fake.url, Plan((64, 128), max_tokens=3, repeats=2, max_warmup=1))
    machine = {"system": "Linux", "processor": "CPU", "cores": 2, "memory": 2**34, "python": "3.11"}
    step = {
        "step": "bench",
        "ok": True,
        "seconds": 1.0,
        "bytes_in": 1,
        "bytes_out": 1,
        "peak_memory": 1,
        "command": "q38",
    }
    nothing = dict.fromkeys(("model", "sizes", "verify", "placement", "serve", "oracle", "failed_step"))
    page = render(
        {
            **nothing,
            "q38": "0",
            "created": "today",
            "passed": True,
            "left_out": ["No oracle <here>."],
            "recipe": {"name": "<b>tiny</b>"},
            "recipe_sha256": "0" * 64,
            "machine": machine,
            "versions": {"torch": "2"},
            "bench": bench,
            "steps": [step],
            "seconds": 1.0,
            "peak_memory": 1,
            "manifests": {"model/MANIFEST.json": "0" * 64},
        },
        MASS,
    )
    tags = check_page(page)
    assert tags.count("svg") == 2 + 3  # routing, and times to first token, decode, between tokens
    assert "&lt;b&gt;tiny" in page
    assert '<p class="warn">No oracle &lt;here&gt;.</p>' in page
    assert "ms/token p50" in page


def test_group_sizes_count_weights_and_widths_of_packed_tensors(tiny_quantized: Path) -> None:
    rows = {row["group"]: row for row in group_sizes(tiny_quantized)}
    experts = rows[Group.EXPERTS]
    assert experts["bits"] == [2]
    # words and zero points at 2 bits and one fp16 scale, per group of 128 weights
    assert experts["bytes"] * 8 / experts["parameters"] == pytest.approx(2 + (2 + 16) / 128, rel=1e-6)
    assert rows[Group.ROUTER]["bits"] == [16]


def test_group_sizes_of_a_source_count_every_byte(tiny_source: Path) -> None:
    from q38.checkpoint.index import Checkpoint

    assert sum(row["bytes"] for row in group_sizes(tiny_source)) == Checkpoint.open(tiny_source).nbytes
