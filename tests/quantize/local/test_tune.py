"""Tuning a batch of experts on a small block."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from q38.base.errors import InputError
from q38.quantize.local import tune
from q38.quantize.local.tokens import Routed
from q38.quantize.local.tune import Weights, searched, tuned
from tests.quantize.local.conftest import EXPERTS, HIDDEN, Block, plain, settings

ALL = list(range(EXPERTS))
GSQ = settings(method="expert-local-gsq", steps=20)


@pytest.mark.parametrize(("method", "gain"), [("expert-local", 0.8), ("expert-local-gsq", 0.6)])
def test_a_tuned_expert_is_better_than_a_rounded_one_on_tokens_it_never_saw(
    method: str, gain: float, block: Block
) -> None:
    with torch.no_grad():
        results = tuned(block.weights, block.routed, ALL, 0, settings(method=method, steps=60))
    assert block.error(results) < gain * block.error(plain(block.weights))


def test_a_searched_scale_is_better_than_a_plain_one(block: Block) -> None:
    results = searched(block.weights, block.routed, ALL, settings())
    assert block.error(results) < 0.8 * block.error(plain(block.weights))
    assert results[0].before is results[0].after is results[0].best is None


def test_a_damp_too_small_for_the_tokens_is_refused_with_the_expert(
    make_block: Callable[..., Block],
) -> None:
    few = make_block(tokens=60)  # fewer than inputs, so the Hessian alone is singular
    choice = settings(method="expert-local-gsq", steps=20, damp=1e-12)
    with pytest.raises(InputError, match=r"block 7, expert \d: .* singular .* quantize\.experts\.damp"):
        tuned(few.weights, few.routed, ALL, 7, choice)


def test_inputs_that_are_no_numbers_are_not_blamed_on_the_damp(make_block: Callable[..., Block]) -> None:
    bad = make_block(tokens=60)
    bad.routed.hidden[:, 5] = float("nan")
    with pytest.raises(InputError, match=r"block 7, expert \d: its inputs hold .* q38 inspect --deep"):
        tuned(bad.weights, bad.routed, ALL, 7, settings(method="expert-local-gsq", steps=20))


@pytest.mark.parametrize("choice", [settings(), GSQ])
def test_the_same_call_gives_the_same_bits(choice: tune.Settings, block: Block) -> None:
    first, second = (tuned(block.weights, block.routed, ALL, 3, choice) for _ in range(2))
    for a, b in zip(first, second, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a.levels + a.scales, b.levels + b.scales, strict=True))
        assert (a.before, a.after, a.best) == (b.before, b.after, b.best)


@pytest.mark.parametrize("choice", [settings(steps=10), settings(method="expert-local-gsq", steps=10)])
def test_another_seed_or_block_draws_other_tokens(choice: tune.Settings, block: Block) -> None:
    first, second = (tuned(block.weights, block.routed, ALL, index, choice) for index in (0, 1))
    assert not torch.equal(first[0].levels[0], second[0].levels[0])


@pytest.mark.parametrize("choice", [settings(), GSQ])
def test_batch_mates_change_no_expert(choice: tune.Settings, block: Block) -> None:
    together = tuned(block.weights, block.routed, ALL, 0, choice)
    alone = tuned(Weights(block.weights.gate_up[2:3], block.weights.down[2:3]), block.routed, [2], 0, choice)
    for a, b in zip(together[2].levels, alone[0].levels, strict=True):
        assert (a == b).float().mean() > 0.99  # a batched product may sum in another order


@pytest.mark.parametrize("choice", [settings(), GSQ])
def test_the_state_that_is_kept_is_the_best_of_those_judged(
    choice: tune.Settings, block: Block, monkeypatch: pytest.MonkeyPatch
) -> None:
    judged: dict[int, list[float]] = {e: [] for e in ALL}
    look = tune._Judge.look

    def watched(self: tune._Judge, step: int) -> None:
        look(self, step)
        for e in ALL:
            judged[e].append(self._least[e])

    monkeypatch.setattr(tune._Judge, "look", watched)
    for e, result in enumerate(tuned(block.weights, block.routed, ALL, 0, choice)):
        assert result.before is not None and result.after is not None and result.best is not None
        assert result.after == min(judged[e]) <= judged[e][0] == result.before
        assert len(judged[e]) == tune.EVALUATIONS + 1


def test_a_step_that_makes_it_worse_is_not_kept(block: Block, monkeypatch: pytest.MonkeyPatch) -> None:
    def spoil(self: object, gradient: torch.Tensor, done: int) -> None:
        self.clip.fill_(0.3)  # type: ignore[attr-defined]
        self.shift.fill_(0.5)  # type: ignore[attr-defined]

    monkeypatch.setattr("q38.quantize.local.signround.SignRound.step", spoil)
    results = tuned(block.weights, block.routed, ALL, 0, settings(steps=10))
    assert [result.best for result in results] == [0] * EXPERTS
    assert all(result.after == result.before for result in results)
    assert block.error(results) < block.error(plain(block.weights))  # it starts from searched scales


def test_an_expert_without_tokens_gets_a_scale_all_the_same(make_block: Callable[..., Block]) -> None:
    block = make_block(64)
    nobody = Routed.of(block.routed.hidden, torch.zeros(64, 1, dtype=torch.int64), torch.ones(64, 1), EXPERTS)
    result = searched(Weights(block.weights.gate_up[3:], block.weights.down[3:]), nobody, [3], settings())[0]
    assert all(torch.isfinite(scale).all() for scale in result.scales)
    for levels, scale, weight in zip(result.levels, result.scales, block.weights, strict=True):
        got = tune.grid.weights(levels, scale, torch.float32)
        assert (got - weight[3]).norm() < 0.8 * weight[3].norm()


def test_tokens_count_by_the_square_of_their_route_weight(make_block: Callable[..., Block]) -> None:
    """Tuned on tokens of two kinds, an expert is better on the kind that the router weighs more."""
    block = make_block(1024)
    half = torch.arange(1024) < 512
    hidden = block.routed.hidden.clone()
    hidden[half, HIDDEN // 2 :] = 0
    hidden[~half, : HIDDEN // 2] = 0
    errors = []
    for heavy in (half, ~half):
        weight = torch.where(heavy, 1.0, 0.01).unsqueeze(1)
        routed = Routed.of(hidden, torch.zeros(1024, 1, dtype=torch.int64), weight, 1)
        one = Weights(block.weights.gate_up[:1], block.weights.down[:1])
        results = tuned(one, routed, [0], 0, settings(steps=60, most_tokens=1024))
        judged = Routed.of(hidden, torch.zeros(1024, 1, dtype=torch.int64), half.float().unsqueeze(1), 1)
        errors.append(Block(one, routed, judged).error(results))
    assert errors[0] < 0.8 * errors[1]
