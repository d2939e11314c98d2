"""Activations between blocks: kept before a block is recorded, taken up bit for bit."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch

from q38.quantize.blockstate import BlockState


def chain(seed: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(1, 3, 8, generator=generator).to(dtype) for _ in range(12)]


def state(directory: Path, done: int = 0, total: int = 4, log: list[int] | None = None) -> BlockState:
    return BlockState(
        directory, done=done, total=total, seed=7, finished=[].append if log is None else log.append
    )


def draws() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), float(torch.rand(()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_new_process_takes_up_both_chains_bit_for_bit(dtype: torch.dtype, tmp_path: Path) -> None:
    reference, quantized = chain(1, dtype), chain(2, dtype)
    state(tmp_path).mark_block_done("block", quantized, reference)
    resumed = state(tmp_path, done=1)
    for ours, theirs in ((resumed.load_input_ids(), reference), (resumed.load_q_input(), quantized)):
        assert ours is not None
        assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(ours, theirs, strict=True))


def test_a_method_without_a_quantized_chain_resumes_without_one(tmp_path: Path) -> None:
    state(tmp_path).mark_block_done("block", None, chain(1))
    resumed = state(tmp_path, done=1)
    assert resumed.load_q_input() is None
    assert resumed.load_input_ids() is not None


def test_the_activations_are_on_disk_before_the_block_is_recorded(tmp_path: Path) -> None:
    seen: list[bool] = []
    BlockState(
        tmp_path,
        done=0,
        total=4,
        seed=0,
        finished=lambda block: seen.append((tmp_path / "activations-1.safetensors").exists()),
    ).mark_block_done("block", None, chain(1))
    assert seen == [True]


def test_a_kill_before_the_block_is_recorded_resumes_from_the_block_before(tmp_path: Path) -> None:
    first = chain(1)
    running = state(tmp_path)
    running.mark_block_done("block 0", None, first)

    def killed(block: int) -> None:
        raise KeyboardInterrupt

    second = BlockState(tmp_path, done=1, total=4, seed=7, finished=killed)
    with pytest.raises(KeyboardInterrupt):
        second.mark_block_done("block 1", None, chain(2))
    resumed = state(tmp_path, done=1).load_input_ids()  # the journal knows block 0 alone
    assert resumed is not None
    assert torch.equal(resumed[0], first[0])


def test_only_the_newest_activations_stay_and_the_last_block_keeps_none(tmp_path: Path) -> None:
    log: list[int] = []
    running = state(tmp_path, total=3, log=log)
    for i in range(3):
        running.mark_block_done(f"block {i}", None, chain(i))
        kept = sorted(path.name for path in tmp_path.iterdir())
        assert kept == ([f"activations-{i + 1}.safetensors"] if i < 2 else [])
    assert log == [0, 1, 2]


def test_random_numbers_in_a_block_do_not_depend_on_how_many_this_process_did(tmp_path: Path) -> None:
    running = state(tmp_path).start()
    running.mark_block_done("block 0", None, chain(1))
    uninterrupted = draws()
    random.seed(99)
    torch.manual_seed(99)
    state(tmp_path, done=1).start()
    assert draws() == uninterrupted


def test_blocks_draw_different_random_numbers(tmp_path: Path) -> None:
    running = state(tmp_path).start()
    before = draws()
    running.mark_block_done("block 0", None, chain(1))
    assert draws() != before


def test_a_chain_of_another_kind_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="chains dict between blocks"):
        state(tmp_path).mark_block_done("block", None, {"hidden_states": chain(1)})
