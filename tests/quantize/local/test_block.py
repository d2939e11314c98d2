"""The experts of one block: batches, devices, disk, and the block's forward around them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from q38.checkpoint.index import Checkpoint
from q38.checkpoint.packing import dequantize
from q38.hf.blocks import BlockModel
from q38.quantize.local import block as module
from q38.quantize.local.block import Batch, batches, outputs, quantize_experts, summary
from q38.quantize.local.settings import Settings
from q38.quantize.local.store import Expert, Store
from q38.quantize.local.tokens import Routed
from q38.quantize.local.walk import Walk, add_expert
from q38.quantize.plan import make_plan
from q38.recipe.schema import Recipe
from tests.quantize.local.conftest import Block, settings

CPU = torch.device("cpu")


def run(
    block: Block, directory: Path, *, devices: int = 1, at_once: int = 2, choice: Settings | None = None
) -> dict[int, Expert]:
    directory.mkdir(exist_ok=True)
    return quantize_experts(
        3, block.load, block.routed, choice or settings(steps=4), at_once=at_once, devices=[CPU] * devices, store=Store(directory)
    )  # fmt: skip


def same(a: dict[int, Expert], b: dict[int, Expert]) -> bool:
    return list(a) == list(b) and all(
        all(
            torch.equal(x, y)
            for m, n in zip(a[e][:3], b[e][:3], strict=True)
            for x, y in zip(m, n, strict=True)
        )
        and a[e][3:] == b[e][3:]
        for e in a
    )


def test_experts_with_few_tokens_fall_back_and_the_others_fill_batches() -> None:
    counts = [100, 3, 50, 0, 64, 200]
    assert batches(counts, 2, settings(min_tokens=50)) == [
        Batch([0, 2], True), Batch([4, 5], True), Batch([1, 3], False),
    ]  # fmt: skip
    assert batches(counts, 4, settings(steps=0)) == [Batch([0, 1, 2, 3], False), Batch([4, 5], False)]


def test_an_expert_that_fell_back_is_listed(block: Block, tmp_path: Path) -> None:
    counts = block.routed.counts
    choice = settings(steps=4, min_tokens=sorted(counts)[1])
    experts = run(block, tmp_path / "a", choice=choice)
    told = summary(experts, counts, choice)
    assert told["fallback"] == [counts.index(min(counts))]
    assert told["coverage"] == {
        "min": min(counts),
        "median": sum(sorted(counts)[1:3]) / 2,
        "max": max(counts),
    }
    assert told["loss_after"] < told["loss_before"]


def test_splitting_the_experts_over_devices_changes_nothing(block: Block, tmp_path: Path) -> None:
    assert same(run(block, tmp_path / "a"), run(block, tmp_path / "b", devices=3))


def test_finished_batches_are_taken_from_disk(
    block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = run(block, tmp_path / "a")
    (tmp_path / "a" / "experts-3-1.safetensors").unlink()
    done: list[list[int]] = []
    quantize_batch = module.quantize_batch

    def watched(index: int, batch: Batch, *rest: object) -> dict[int, Expert]:
        done.append(batch.experts)
        return quantize_batch(index, batch, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "quantize_batch", watched)
    assert same(run(block, tmp_path / "a"), whole)
    assert done == [[2, 3]]
    Store(tmp_path / "a").clear()
    assert list((tmp_path / "a").iterdir()) == []


@pytest.mark.parametrize("devices", [1, 2])
def test_a_failure_on_any_device_ends_the_run(devices: int, block: Block, tmp_path: Path) -> None:
    def load(experts: list[int], device: torch.device) -> None:
        raise RuntimeError("CUDA out of memory")

    broken = Block(block.weights, block.routed, block.judged)
    broken.load = load  # type: ignore[method-assign,assignment]
    with pytest.raises(RuntimeError, match="out of memory"):
        run(broken, tmp_path / "a", devices=devices)


def test_the_outputs_are_those_of_the_packed_matrices(block: Block, tmp_path: Path) -> None:
    experts = run(block, tmp_path / "a")
    wanted = torch.zeros_like(block.judged.hidden)
    for e, expert in experts.items():
        gate, up, down = (dequantize(*matrix, 2) for matrix in expert[:3])
        add_expert(wanted, block.judged, e, torch.cat([gate, up]), down)
    assert torch.equal(outputs(experts, block.judged, 2), wanted)
    assert wanted.abs().max() > 0.1


def test_a_block_in_two_halves_is_the_block(
    tiny_source: Path, tiny_ple: Path, vary: Callable[..., Recipe]
) -> None:
    """With the source's experts, and no other matrix rounded, the walk gives what transformers gives."""
    plan = make_plan(
        Checkpoint.open(tiny_source), vary(bits={"experts": 2, "gdn_in": 16, "shared_expert": 16})
    )
    ids = torch.randint(10, 1000, (3, 48), generator=torch.Generator().manual_seed(0))
    walk = Walk(tiny_source, plan, tiny_ple, ids, dtype=torch.float32, device=CPU)
    model = BlockModel(tiny_source, ple=tiny_ple, dtype=torch.float32)
    states = walk.start()
    with torch.no_grad():
        for index in range(plan.shape.num_layers):
            with model.block(index) as whole:
                wanted = whole(torch.cat(states), ids)
            half = walk.half(index, states)
            given = torch.zeros_like(half.routed.hidden)
            for e in range(plan.shape.num_experts):
                weights = walk.experts(index, [e], CPU)
                add_expert(given, half.routed, e, weights.gate_up[0], weights.down[0])
            assert given.abs().max() > 0
            states = walk.whole(half, given)
            assert torch.allclose(torch.cat(states), wanted, rtol=1e-4, atol=1e-4), index


def test_experts_are_read_alike_from_both_layouts(
    tiny_source: Path, tiny_source_fp8: Path, tiny_ple: Path, fast: Recipe
) -> None:
    ids = torch.zeros(1, 8, dtype=torch.int64)
    both = []
    for source in (tiny_source, tiny_source_fp8):
        plan = make_plan(Checkpoint.open(source), fast)
        both.append(
            Walk(source, plan, tiny_ple, ids, dtype=torch.float32, device=CPU).experts(1, [5, 2], CPU)
        )
    for a, b in zip(*both, strict=True):
        assert a.shape == b.shape and (a - b).norm() < 0.04 * a.norm()


def test_the_kept_inputs_are_those_of_all_batches_in_order(
    tiny_source: Path, tiny_ple: Path, fast: Recipe
) -> None:
    plan = make_plan(Checkpoint.open(tiny_source), fast)
    ids = torch.randint(10, 1000, (4, 32), generator=torch.Generator().manual_seed(1))
    halves: list[Routed] = []
    for batch in (1, 4):
        walk = Walk(tiny_source, plan, tiny_ple, ids, dtype=torch.float32, device=CPU)
        walk._batch = batch
        halves.append(walk.half(0, walk.start()).routed)
    assert torch.allclose(halves[0].hidden, halves[1].hidden, atol=1e-4)
    assert len(halves[0].hidden) == 4 * 32
    assert sum(halves[0].counts) == 4 * 32 * plan.shape.num_experts_per_tok
