"""Staged host rows on a real GPU: the bits of rows read in place, pass after pass, while rows move."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU"),
]
if torch.cuda.is_available():
    from q38.kernels import moe_prefill_cuda
    from q38.kernels.moe_prefill import moe_prefill
    from q38.kernels.samples import random_rows, uniform_routing
    from q38.residency.cache import ExpertCache, open_cache
    from q38.residency.driver import Cuda
    from q38.residency.layout import ExpertLayout
    from q38.sglang_ext.staging import PrefillStaging

    DEVICE = torch.device("cuda", torch.cuda.current_device())


class Model:
    """Layers of random experts, some of them in pinned host memory."""

    def __init__(
        self, layout: ExpertLayout, resident: np.ndarray, *, ring: int, top_k: int, distinct: int
    ) -> None:
        self.layout, self.top_k = layout, top_k
        self.layers, self.experts = resident.shape
        driver, size = Cuda(DEVICE.index), layout.row_bytes
        stream = torch.cuda.current_stream().cuda_stream
        rows = random_rows(layout, distinct)
        torch.cuda.synchronize()
        self.cache: ExpertCache = open_cache(
            driver, size, resident, np.ones(resident.shape), stream=stream, spare=4, keep=0
        )
        store, copies = self.cache.store, driver.new_stream()
        source = rows.data_ptr() + np.arange(resident.size) * 7 % distinct * size
        driver.copy(store.addresses(store.place), source, size, copies)
        driver.synchronize(copies)
        store.publish()
        self.table = store.table.tensor()
        self.staging = PrefillStaging(self.cache, ring, top_k, DEVICE)

    def run(
        self, x: torch.Tensor, routes: list[tuple[torch.Tensor, ...]], **options: Any
    ) -> list[torch.Tensor]:
        """Every layer's result, staged."""
        outs = []
        self.staging.begin(len(x))
        for layer, (ids, weights) in enumerate(routes):
            staged = self.staging.layer(layer, len(x))
            assert staged is not None
            assert staged.host_rows == int((~self.cache.resident[layer]).sum())
            outs.append(
                moe_prefill(x, staged.table, ids, weights, self.layout, parts=staged.parts, **options)
            )
        return outs

    def in_place(
        self, x: torch.Tensor, routes: list[tuple[torch.Tensor, ...]], **options: Any
    ) -> list[torch.Tensor]:
        return [
            moe_prefill(x, self.table[layer], ids, weights, self.layout, **options)
            for layer, (ids, weights) in enumerate(routes)
        ]

    def close(self) -> None:
        torch.cuda.synchronize()
        self.staging.ring.close()
        self.cache.close()


def inputs(model: Model, tokens: int) -> tuple[torch.Tensor, list[tuple[torch.Tensor, ...]]]:
    """Activations, and a skewed routing of each layer with a few choices absent."""
    x = torch.randn(tokens, model.layout.hidden, device="cuda").bfloat16()
    routes = []
    for layer in range(model.layers):
        hot, _ = uniform_routing(tokens, max(model.experts // 4, model.top_k), model.top_k, seed=layer)
        ids, weights = uniform_routing(tokens, model.experts, model.top_k, seed=99 + layer)
        ids[: tokens // 2] = hot[: tokens // 2]
        ids[torch.rand(ids.shape, device="cuda") < 0.02] = -1
        routes.append((ids, weights))
    return x, routes


def some_resident(layers: int, experts: int, share: float, seed: int = 0) -> np.ndarray:
    resident = np.random.default_rng(seed).random((layers, experts)) < share
    resident[-1] = True  # a layer without host rows
    return resident


@pytest.mark.parametrize("share", [0.0, 0.4])
@pytest.mark.parametrize("ring", [3, 20, 200])
def test_staged_rows_give_the_bits_of_rows_read_in_place(share: float, ring: int) -> None:
    model = Model(ExpertLayout(512, 256), some_resident(4, 30, share), ring=ring, top_k=4, distinct=60)
    x, routes = inputs(model, 300)
    before = model.in_place(x, routes)
    for _ in range(3):
        outs = model.run(x, routes)
        assert all(torch.equal(a, b) for a, b in zip(outs, before, strict=True))
    for seed in (1, 2):
        model.cache.set_resident(some_resident(4, 30, 0.5, seed))
        outs = model.run(x, routes)
        assert all(torch.equal(a, b) for a, b in zip(outs, before, strict=True))
    model.close()


def test_the_bits_hold_whichever_side_is_late() -> None:
    model = Model(ExpertLayout(1024, 512), some_resident(6, 64, 0.2), ring=24, top_k=8, distinct=128)
    x, routes = inputs(model, 1000)
    before = model.in_place(x, routes)
    for slow in (0, 2_000_000):  # copies behind the kernels, then far ahead of them
        outs = []
        for _ in range(3):
            torch.cuda._sleep(slow)
            outs.append(model.run(x, routes))
        for passed in outs:
            assert all(torch.equal(a, b) for a, b in zip(passed, before, strict=True))
    model.close()


@pytest.mark.parametrize("tokens", [2048, 4096])
def test_real_shapes_in_both_geometries(tokens: int) -> None:
    resident = np.zeros((2, 512), bool)
    resident[:, :184] = True
    model = Model(ExpertLayout(2560, 640), resident, ring=164, top_k=10, distinct=96)
    x, routes = inputs(model, tokens)
    configs: list[Any] = [None, moe_prefill_cuda.MmaConfig()]
    if torch.cuda.get_device_capability() == (9, 0):
        configs.append(moe_prefill_cuda.HopperConfig(block_tokens=80, stages=3))
    for config in configs:
        before = model.in_place(x, routes, config=config)
        outs = model.run(x, routes, config=config)
        for out, want in zip(outs, before, strict=True):
            assert want.isfinite().all()
            assert torch.equal(out, want)
    model.close()


def test_a_pass_that_breaks_off_leaves_nothing_behind() -> None:
    model = Model(ExpertLayout(512, 256), some_resident(4, 30, 0.3), ring=9, top_k=4, distinct=60)
    x, routes = inputs(model, 300)
    before = model.in_place(x, routes)
    model.staging.begin(len(x))
    broken = model.staging.layer(0, len(x))
    assert broken is not None
    parts = iter(broken.parts.ranges)
    next(parts)
    next(parts)
    del parts, broken  # an error in between
    model.cache.set_resident(some_resident(4, 30, 0.5, 1))
    assert all(torch.equal(a, b) for a, b in zip(model.run(x, routes), before, strict=True))
    model.close()


def test_short_steps_captures_and_models_without_host_rows_read_in_place() -> None:
    model = Model(ExpertLayout(512, 256), some_resident(2, 30, 0.3), ring=9, top_k=4, distinct=60)
    assert model.staging.layer(0, 1) is None
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        inside = model.staging.layer(0, 300)
        torch.zeros(1, device="cuda")
    assert inside is None
    assert model.staging.layer(0, 300) is not None
    model.close()
    whole = Model(ExpertLayout(512, 256), np.ones((2, 30), bool), ring=9, top_k=4, distinct=60)
    assert whole.staging.layer(0, 300) is None
    whole.close()
