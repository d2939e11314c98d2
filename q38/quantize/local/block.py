"""All routed experts of one block: split into batches, tuned on every device, kept on disk, and run again."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from statistics import mean
from typing import Any

import torch

from q38.checkpoint.packing import dequantize
from q38.quantize.local import grid
from q38.quantize.local.settings import Settings
from q38.quantize.local.store import Expert, Store
from q38.quantize.local.tokens import Routed, coverage
from q38.quantize.local.tune import Quantized, Weights, searched, tuned
from q38.quantize.local.walk import add_expert

Load = Callable[[list[int], torch.device], Weights]  # the source's matrices of some experts


@dataclass(frozen=True)
class Batch:
    """Experts that are tuned together, or (`tune` False) given a searched scale."""

    experts: list[int]
    tune: bool


def batches(counts: list[int], at_once: int, settings: Settings) -> list[Batch]:
    """Every expert in one batch: those with enough tokens, then those that fall back to a searched scale."""
    enough = [e for e, n in enumerate(counts) if n >= settings.min_tokens and settings.steps]
    few = sorted(set(range(len(counts))) - set(enough))
    return [
        Batch(group[i : i + at_once], tune)
        for group, tune in ((enough, True), (few, False))
        for i in range(0, len(group), at_once)
    ]


def quantize_experts(
    block: int,
    load: Load,
    routed: Routed,
    settings: Settings,
    *,
    at_once: int,
    devices: list[torch.device],
    store: Store,
    finished: Callable[[int], None] = lambda experts: None,
) -> dict[int, Expert]:
    """Quantize the experts of a block.

    Batches go to the devices as these become free; which device gets which changes nothing in the result
    where the devices are alike.

    Args:
        load: reads source matrices; called from one thread per device.
        at_once: experts in a batch.
        store: finished batches; those an earlier process left are taken from it.
        finished: told the number of experts of each batch as it is done.
    """
    left: queue.SimpleQueue[tuple[int, Batch]] = queue.SimpleQueue()
    done: dict[int, Expert] = {}
    for number, batch in enumerate(batches(routed.counts, at_once, settings)):
        if (kept := store.load(block, number)) is not None:
            done |= kept
            finished(len(kept))
        else:
            left.put((number, batch))
    lock = threading.Lock()
    failures: list[BaseException] = []

    def work(device: torch.device) -> None:
        own: Routed | None = None
        try:
            with torch.no_grad(), _current(device):
                while not failures:
                    try:
                        number, batch = left.get_nowait()
                    except queue.Empty:
                        return
                    own = own or routed.to(device)
                    experts = quantize_batch(block, batch, load(batch.experts, device), own, settings)
                    with lock:
                        store.save(block, number, experts)
                        done.update(experts)
                        finished(len(experts))
        except BaseException as error:  # noqa: BLE001  raised again by the caller's thread
            failures.append(error)

    threads = [threading.Thread(target=work, args=(device,)) for device in devices[1:]]
    for thread in threads:
        thread.start()
    work(devices[0])
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return dict(sorted(done.items()))


def quantize_batch(
    block: int, batch: Batch, weights: Weights, routed: Routed, settings: Settings
) -> dict[int, Expert]:
    """One batch, packed."""
    if batch.tune:
        results = tuned(weights, routed, batch.experts, block, settings)
    else:
        results = searched(weights, routed, batch.experts, settings)
    return {e: _packed(result, settings.bits) for e, result in zip(batch.experts, results, strict=True)}


def outputs(experts: dict[int, Expert], routed: Routed, bits: int) -> torch.Tensor:
    """What the quantized experts return, route-weighted and summed: [T, H] in the dtype of the inputs."""
    device, dtype = routed.hidden.device, routed.hidden.dtype
    out = torch.zeros_like(routed.hidden)
    for e, expert in experts.items():
        gate, up, down = (
            dequantize(m.qweight.to(device), m.qzeros.to(device), m.scales.to(device), bits).to(dtype)
            for m in (expert.gate_proj, expert.up_proj, expert.down_proj)
        )
        add_expert(out, routed, e, torch.cat([gate, up]), down)
    return out


def summary(experts: dict[int, Expert], counts: list[int], settings: Settings) -> dict[str, Any]:
    """What a block's record says of its experts: errors, coverage, and who fell back."""
    before = [expert.before for expert in experts.values() if expert.before is not None]
    after = [expert.after for expert in experts.values() if expert.after is not None]
    best = [expert.best for expert in experts.values() if expert.best is not None]
    losses: dict[str, Any] = {}
    if before:
        losses = {"loss_before": mean(before), "loss_after": mean(after), "best_iter": round(mean(best))}
    fell_back = [e for e, expert in experts.items() if expert.before is None] if settings.steps else []
    return {**losses, "coverage": coverage(counts), "fallback": fell_back}


def _current(device: torch.device) -> AbstractContextManager[object]:
    """Kernels go to the current device of the thread that launches them."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _packed(result: Quantized, bits: int) -> Expert:
    (gate_up, down), (gate_up_scales, down_scales) = result.levels, result.scales
    middle = gate_up.shape[0] // 2
    halves: Iterable[slice] = (slice(None, middle), slice(middle, None))
    gate, up = (grid.packed(gate_up[half], gate_up_scales[half], bits) for half in halves)
    return Expert(gate, up, grid.packed(down, down_scales, bits), result.before, result.after, result.best)
