"""Prefill of several MoE layers with most rows in host memory: read in place against staged by the copy engine.

    PYTHONPATH=. python benchmarks/prefill_staging.py                     # needs a GPU
    CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=53 PYTHONPATH=. python benchmarks/prefill_staging.py

Real shapes, skewed routing with the published coverage, the hottest rows in device memory. `between` is time that the rest of a
layer would take, spent by a kernel that does nothing; copies go on meanwhile. Figures are medians of three passes.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from q38.base.units import GIB
from q38.kernels.moe_prefill import moe_prefill
from q38.kernels.samples import random_rows, row_addresses
from q38.kernels.timing import link_rate
from q38.residency.cache import ExpertCache, open_cache
from q38.residency.driver import Cuda
from q38.residency.layout import ExpertLayout
from q38.residency.synthetic import selection_rates
from q38.sglang_ext.staging import PrefillStaging

HIDDEN, INTERMEDIATE, EXPERTS, TOP_K = 2560, 640, 512, 10
DEVICE = torch.device("cuda", 0)
Routes = list[tuple[torch.Tensor, torch.Tensor]]


def say(*parts: object) -> None:
    sys.stdout.write("  ".join(map(str, parts)) + "\n")
    sys.stdout.flush()


def open_model(layout: ExpertLayout, rates: np.ndarray, resident: int) -> ExpertCache:
    """Rows of random words; the hottest `resident` of each layer in device memory."""
    hottest = np.argsort(np.argsort(-rates, axis=1), axis=1) < resident
    driver = Cuda(0)
    rows = random_rows(layout, EXPERTS)
    torch.cuda.synchronize()
    stream = torch.cuda.current_stream().cuda_stream
    cache = open_cache(driver, layout.row_bytes, hottest, rates, stream=stream, keep=GIB)
    store, copies = cache.store, driver.new_stream()
    source = rows.data_ptr() + np.arange(rates.size) % EXPERTS * layout.row_bytes
    driver.copy(store.addresses(store.place), source, layout.row_bytes, copies)
    driver.synchronize(copies)
    store.publish()
    return cache


def routing(rates: np.ndarray, tokens: int, seed: int) -> Routes:
    """ids and weights of each layer: without replacement, in proportion to the rates."""
    generator = torch.Generator("cuda").manual_seed(seed)
    routes = []
    for layer in rates:
        noise = torch.rand(tokens, EXPERTS, device="cuda", generator=generator).log().neg_()
        score = (
            torch.from_numpy(layer).cuda() / noise
        )  # [tokens, experts]: the largest win (Efraimidis, Spirakis)
        ids = score.topk(TOP_K, dim=1).indices.int().contiguous()
        routes.append((ids, torch.full((tokens, TOP_K), 0.1, device="cuda")))
    return routes


class Steps:
    """Passes over all layers with one set of tokens."""

    def __init__(self, cache: ExpertCache, layout: ExpertLayout, rates: np.ndarray, tokens: int) -> None:
        self.cache, self.layout, self.tokens = cache, layout, tokens
        self.x = torch.randn(tokens, HIDDEN, device="cuda").bfloat16()
        self.routes = routing(rates, tokens, tokens)
        chosen = [np.unique(ids.cpu().numpy()) for ids, _ in self.routes]
        self.host_rows = int((~cache.resident).sum())
        self.chosen_rows = sum(int((~cache.resident[layer])[ids].sum()) for layer, ids in enumerate(chosen))

    def in_place(self, table: torch.Tensor, pause: int) -> list[torch.Tensor]:
        """table: int64 [experts], or one of each layer."""
        outs = []
        for layer, (ids, weights) in enumerate(self.routes):
            torch.cuda._sleep(pause)
            rows = table if table.ndim == 1 else table[layer]
            outs.append(moe_prefill(self.x, rows, ids, weights, self.layout))
        return outs

    def staged(self, staging: PrefillStaging, pause: int) -> list[torch.Tensor]:
        outs = []
        staging.begin(self.tokens)
        for layer, (ids, weights) in enumerate(self.routes):
            torch.cuda._sleep(pause)
            found = staging.layer(layer, self.tokens)
            if found is None:
                raise SystemExit("these rows would not be staged")
            outs.append(moe_prefill(self.x, found.table, ids, weights, self.layout, parts=found.parts))
        return outs

    def report(self, name: str, call: Callable[[], object], host_rows: int) -> None:
        """Milliseconds a layer on the device and to enqueue, medians of three passes; rate of the host rows."""
        call()
        device, host = [], []
        for _ in range(3):
            torch.cuda.synchronize()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begun = time.perf_counter()
            begin.record()
            call()
            end.record()
            host.append(time.perf_counter() - begun)
            end.synchronize()
            device.append(begin.elapsed_time(end) / 1e3)
        seconds, layers = statistics.median(device), len(self.routes)
        rate = (
            f"{host_rows * self.layout.row_bytes / seconds / 1e9:5.1f} GB/s over the link"
            if host_rows
            else ""
        )
        enqueue = statistics.median(host) / layers
        say(f"  {name:28} {seconds / layers * 1e3:6.2f} ms a layer, host {enqueue * 1e3:5.2f} ms, {rate}")


def cycles_per_us() -> float:
    torch.cuda._sleep(1000)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    torch.cuda._sleep(20_000_000)
    end.record()
    end.synchronize()
    return 20_000_000 / (begin.elapsed_time(end) * 1e3)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--resident", type=int, default=184, help="rows of each layer in device memory")
    parser.add_argument("--tokens", default="2048,4096")
    parser.add_argument("--rings", default="164x3", help="row slots x pieces, several by commas")
    parser.add_argument("--between", default="0,3000", help="microseconds beside the experts, per layer")
    arguments = parser.parse_args()
    layout = ExpertLayout(HIDDEN, INTERMEDIATE)
    rates = selection_rates(layers=arguments.layers, experts=EXPERTS, top_k=TOP_K)
    cache = open_model(layout, rates, arguments.resident)
    table, rows = cache.store.table.tensor(), random_rows(layout, EXPERTS)
    on_device = row_addresses(rows).cuda()
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    say(f"{sms} SMs, {arguments.layers} layers, link {link_rate() / 1e9:.1f} GB/s by one large copy")
    rings = [tuple(map(int, ring.split("x"))) for ring in arguments.rings.split(",")]
    staging = {ring: PrefillStaging(cache, ring[0], TOP_K, DEVICE, pieces=ring[1]) for ring in rings}
    rate = cycles_per_us()
    for tokens in map(int, arguments.tokens.split(",")):
        steps = Steps(cache, layout, rates, tokens)
        want = steps.in_place(table, 0)
        for ring, one in staging.items():
            if not all(torch.equal(a, b) for a, b in zip(steps.staged(one, 0), want, strict=True)):
                raise SystemExit(f"ring {ring}: staged rows gave other bits")
        for between in map(int, arguments.between.split(",")):
            pause = int(between * rate)
            say(
                f"{tokens} tokens, {steps.chosen_rows} of {steps.host_rows} host rows chosen, {between} us between"
            )
            steps.report("all in device memory", partial(steps.in_place, on_device, pause), 0)
            steps.report("in place", partial(steps.in_place, table, pause), steps.chosen_rows)
            for ring, one in staging.items():
                name = f"staged, {ring[0]} rows in {ring[1]}"
                steps.report(name, partial(steps.staged, one, pause), steps.host_rows)


if __name__ == "__main__":
    main()
