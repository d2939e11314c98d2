"""The parts of expert-local tuning, each against what it must equal."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from q38.base.errors import InputError, ResourceError
from q38.checkpoint.packing import dequantize
from q38.quantize.local import grid, moe
from q38.quantize.local.gptq import gptq, hessian
from q38.quantize.local.gsq import Gsq
from q38.quantize.local.memory import Sizes, expert_bytes, experts_at_once, fixed_bytes
from q38.quantize.local.signround import SignRound
from q38.quantize.local.tokens import Routed, expert_seed, schedule, share
from q38.quantize.rtn import round_to_nearest
from q38.recipe.schema import parse_recipe
from tests.quantize.local.conftest import GROUP, settings

REAL = Sizes(hidden=2560, intermediate=640, experts=512, per_token=10, tokens=128 * 2048)


def values(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@given(bits=st.sampled_from([2, 3, 4, 8]), seed=st.integers(0, 1000))
def test_the_nearest_levels_under_plain_scales_are_plain_rounding(bits: int, seed: int) -> None:
    weight = values(32, 128, seed=seed)
    scale = grid.storable(grid.plain_scales(weight, bits, GROUP))
    packed = grid.packed(grid.nearest(weight, scale, bits), scale, bits)
    for ours, theirs in zip(packed, round_to_nearest(weight, bits, GROUP), strict=True):
        assert torch.equal(ours, theirs)


@given(bits=st.sampled_from([2, 3, 4, 8]), seed=st.integers(0, 1000))
def test_what_is_packed_is_what_was_judged(bits: int, seed: int) -> None:
    scale = grid.storable(values(32, 4, seed=seed))
    levels = torch.randint(*[limit + i for i, limit in enumerate(grid.limits(bits))], (32, 128)).to(
        torch.int8
    )
    assert torch.equal(
        dequantize(*grid.packed(levels, scale, bits), bits), grid.weights(levels, scale, torch.float32)
    )


@given(seed=st.integers(0, 1000))
def test_a_searched_scale_has_no_larger_weighted_error_than_the_plain_one(seed: int) -> None:
    weight, importance = values(16, 128, seed=seed), values(128, seed=seed + 1).square()

    def error(scale: torch.Tensor) -> torch.Tensor:
        gap = grid.weights(grid.nearest(weight, scale, 2), scale, torch.float32) - weight
        return grid.grouped(gap.square() * importance, scale.shape[-1]).sum(-1)

    plain = grid.storable(grid.plain_scales(weight, 2, GROUP))
    found = grid.search(weight, importance, 2, GROUP)
    assert bool(
        (error(found) <= error(plain) * (1 + 1e-6)).float().mean() > 0.97
    )  # 1.0 is not on the search's grid
    assert error(found).sum() < error(plain).sum()


def test_the_gradients_are_those_of_autograd() -> None:
    x, gate_up, down = values(3, 7, 16, seed=1), values(3, 20, 16, seed=2), values(3, 16, 10, seed=3)
    slope = values(3, 7, 16, seed=4)
    for weight in (gate_up, down):
        weight.requires_grad_()
    done = moe.forward(x, gate_up, down)
    expected = torch.autograd.grad(done.output, (gate_up, down), slope)
    with torch.no_grad():
        found = moe.gradients(x, moe.forward(x, gate_up, down), down, slope)
    for a, b in zip(found, expected, strict=True):
        assert torch.allclose(a, b, atol=1e-4)


def test_gptq_loses_less_output_than_rounding_and_equals_it_where_inputs_do_not_correlate() -> None:
    weight, mixing = (
        values(2, 24, 128),
        values(128, 128, seed=1) * torch.arange(1, 129).pow(-0.7).unsqueeze(1),
    )
    x = values(600, 128, seed=2) @ mixing
    scale = torch.stack([grid.storable(grid.plain_scales(w, 2, GROUP)) for w in weight])
    nearest = grid.nearest(weight, scale, 2)
    both = torch.stack([hessian(x, torch.ones(600)), torch.eye(128)])
    levels = gptq(weight, both, scale, bits=2, damp=0.01)

    def lost(lv: torch.Tensor) -> torch.Tensor:
        return (x @ (grid.weights(lv[0], scale[0], torch.float32) - weight[0]).T).square().sum()

    assert lost(levels) < 0.25 * lost(nearest)  # 0.14; 0.41 without what passes inside a group
    assert torch.equal(levels[1], nearest[1])


def test_every_route_is_listed_once_under_its_expert() -> None:
    chosen = torch.tensor([[2, 0], [0, 1], [2, 1], [0, 2]])
    weight = torch.arange(8).view(4, 2) / 10
    routed = Routed.of(values(4, 8), chosen, weight, 4)
    assert routed.counts == [3, 2, 3, 0]
    token, own = routed.of_expert(2)
    assert token.tolist() == [0, 2, 3]
    assert own.tolist() == pytest.approx([0.0, 0.4, 0.7])
    assert len(routed.of_expert(3)[0]) == 0


@given(count=st.integers(2, 300), seed=st.integers(0, 100))
def test_tuned_and_judged_tokens_are_apart_and_none_comes_twice_before_all_came_once(
    count: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    parts = share(count, limit=100, held_out=1 / 8, generator=generator)
    assert len(parts.held_out) >= 1 <= len(parts.train)
    assert set(parts.train.tolist()).isdisjoint(parts.held_out.tolist())
    assert len(parts.train) + len(parts.held_out) == min(count, 100)
    rows = schedule(parts.train, 9, 10, generator).flatten()
    seen = rows.bincount(minlength=count)[parts.train]
    assert seen.max() - seen.min() <= 1 and seen.sum() == 90


def test_experts_and_blocks_have_seeds_of_their_own() -> None:
    assert len({expert_seed(0, b, e) for b in range(48) for e in range(512)}) == 48 * 512


@pytest.mark.parametrize("method", ["expert-local", "expert-local-gsq"])
def test_the_formula_counts_the_state_of_a_method(method: str) -> None:
    """Bytes a weight of the tensors as they are made, on the CPU."""
    weight = values(2, 16, 64)
    base = torch.stack([grid.plain_scales(w, 2, GROUP) for w in weight])
    state: SignRound | Gsq
    if method == "expert-local":
        state = SignRound(weight, base, bits=2, steps=10, rate=1.0)
        held = [state.shift]
    else:
        levels = torch.zeros(weight.shape, dtype=torch.int8)
        state = Gsq(levels, base, [1, 2], bits=2, steps=10, dtype=torch.float32)
        held = [state.logits, state.momentum, *state._chances]
    own = sum(t.nbytes for t in held) / weight.numel()
    source_quantized_gradient, levels_twice = 3 * 4, 2
    sizes = Sizes(hidden=64, intermediate=8, experts=2, per_token=1, tokens=8)
    choice = settings(method=method, rows=0, steps=0)
    counted = (expert_bytes(sizes, choice, cuda=False) - 8 * 64 * 4) / sizes.weights
    assert (
        own + source_quantized_gradient + levels_twice
        <= counted
        <= own + source_quantized_gradient + levels_twice + 4
    )


@given(gib=st.floats(12, 140), method=st.sampled_from(["expert-local", "expert-local-gsq"]))
def test_a_batch_fits_the_free_memory_and_batches_are_even(gib: float, method: str) -> None:
    free, choice = int(gib * 2**30), settings(method=method, steps=400, rows=256, most_tokens=8192)
    count = experts_at_once(REAL, choice, free, cuda=True)
    assert 1 <= count <= 512
    assert fixed_bytes(REAL, cuda=True) + count * expert_bytes(REAL, choice, cuda=True) <= 0.9 * free
    batches = -(-512 // count)
    assert count * (batches - 1) < 512 and 512 / batches > count - 1


@pytest.mark.parametrize("devices", [2, 3, 8])
def test_every_device_gets_as_many_batches(devices: int) -> None:
    for gib in (23, 139):
        count = experts_at_once(REAL, settings(), gib * 2**30, cuda=True, devices=devices)
        assert -(-512 // count) % devices == 0
        assert count <= experts_at_once(REAL, settings(), gib * 2**30, cuda=True)


def test_too_little_memory_is_refused_with_the_shortfall() -> None:
    with pytest.raises(ResourceError, match=r"GPU memory: tuning one expert takes .* are free: .* short"):
        experts_at_once(REAL, settings(), 4 * 2**30, cuda=True)


@pytest.mark.parametrize(
    ("quantize", "message"),
    [
        ({"experts": {"method": "expert"}}, "experts.method"),
        ({"experts": {"method": "expert-local", "iters": 0}}, "without a step is plain rounding"),
        ({"experts": {"method": "expert-local-gsq"}, "bits": {"experts": 3}}, "four levels of 2 bits"),
        ({"experts": {"rows": 0}}, "experts.rows"),
        ({"experts": {"min_tokens": 1}}, "experts.min_tokens"),
        ({"experts": {"itres": 3}}, "Did you mean iters"),
    ],
)
def test_a_recipe_that_makes_no_sense_is_refused(quantize: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        parse_recipe({"schema": "q38.recipe/1", "name": "x", "quantize": quantize})


def test_every_method_has_a_number_of_steps() -> None:
    def steps(method: str) -> int:
        recipe = parse_recipe(
            {"schema": "q38.recipe/1", "name": "x", "quantize": {"experts": {"method": method}}}
        )
        return recipe.quantize.experts.steps

    assert [steps(m) for m in ("autoround", "expert-local", "expert-local-gsq")] == [200, 200, 400]
