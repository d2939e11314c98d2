"""The check of the matrix library: benchmarks/products.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks import products
from q38.model.shape import ModelShape
from q38.synth.config import tiny_config


def test_the_shapes_are_those_of_the_model() -> None:
    shape = ModelShape.from_config(tiny_config())
    found = products.shapes(shape)
    assert (shape.hidden_size, shape.num_experts) in found  # the router
    assert (shape.hc_count * shape.hidden_size, shape.hc_lowrank) in found
    assert len(set(found)) == len(found)


@pytest.mark.parametrize("fault", [None, "unwritten", "nan"])
def test_a_product_that_is_partly_unwritten_is_found(
    fault: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products, "TOKENS", (16, 100))
    multiply = torch.nn.functional.linear

    def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        out: Any = multiply(x, weight)
        if fault is not None and len(x) == 100:
            out[90:] = 0.0 if fault == "unwritten" else float("nan")
        return out

    monkeypatch.setattr(torch.nn.functional, "linear", linear)
    bad = list(products.wrong([(64, 32)], "cpu"))
    assert [found["tokens"] for found in bad] == ([] if fault is None else [100])
