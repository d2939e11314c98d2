"""Prefill MoE: sorting into blocks, and the grouped product against the float64 reference."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from q38.base.errors import InputError
from q38.kernels import reference
from q38.residency.layout import ExpertLayout, address_table
from tests.kernels.data import make_routing, make_rows

pytest.importorskip("triton", reason="Triton is not installed (pip install 'q38[kernels]')")
from q38.kernels.moe_prefill import PrefillConfig, moe_prefill, permute_inputs
from q38.kernels.moe_sort import sort_slots

TILE = PrefillConfig(16, 32, 32, 16, warps=4, stages=1)


@given(
    st.integers(1, 300),
    st.integers(1, 40),
    st.integers(1, 4),
    st.sampled_from([16, 32, 64]),
    st.integers(0, 2**31),
    st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_every_slot_is_in_exactly_one_block_of_its_expert(
    tokens: int, experts: int, top_k: int, block_m: int, seed: int, shuffled: bool
) -> None:
    ids, _ = make_routing(tokens, experts, min(top_k, experts), seed=seed, absent=0.1)
    positions = torch.randperm(experts, generator=torch.Generator().manual_seed(seed)).int()
    sort = sort_slots(ids, experts, block_m, positions if shuffled else None)
    order, block_expert, block_start, block_live, first_slot, first_block = sort
    at = positions.tolist() if shuffled else list(range(experts))
    flat, seen = [at[e] if e >= 0 else -1 for e in ids.flatten().tolist()], []
    blocks = [0] * experts
    for expert, start, live in zip(
        block_expert.tolist(), block_start.tolist(), block_live.tolist(), strict=True
    ):
        if expert < 0:
            continue
        assert 0 < live <= block_m
        assert start == int(first_slot[expert]) + blocks[expert] * block_m
        blocks[expert] += 1
        slots = [int(order[p]) for p in range(start, start + live)]
        assert all(flat[s] == expert for s in slots) and slots == sorted(slots)
        seen += slots
    assert sorted(seen) == [s for s, e in enumerate(flat) if e >= 0]
    assert first_slot.tolist() == [sum(0 <= e < n for e in flat) for n in range(experts + 1)]
    assert first_block.tolist() == [sum(blocks[:n]) for n in range(experts + 1)]
    for begin, end in ((0, experts), (experts // 3, experts // 2 + 1)):  # what a part's grid has room for
        slots_of_part = int(first_slot[end] - first_slot[begin])
        assert first_block[end] - first_block[begin] <= slots_of_part // block_m + min(
            end - begin, slots_of_part
        )


def test_permuted_inputs_put_code_positions_first() -> None:
    x = torch.arange(64.0).view(1, 64)
    assert torch.equal(permute_inputs(x)[0, 3], torch.tensor([3.0, 19.0, 35.0, 51.0]))


@pytest.mark.parametrize(
    ("hidden", "inter", "group", "tokens", "top_k"), [(64, 32, 32, 40, 2), (128, 128, 128, 17, 1)]
)
def test_the_product_is_within_rounding_of_the_reference(
    device: str, hidden: int, inter: int, group: int, tokens: int, top_k: int
) -> None:
    layout = ExpertLayout(hidden, inter, group)
    rows = make_rows(layout, 5, device=device)
    ids, weights = make_routing(tokens, 4, top_k, absent=0.1)  # expert 4 is never chosen
    x = torch.randn(tokens, hidden).half()
    out = moe_prefill(
        x.to(device),
        address_table(list(rows)).to(device),
        ids.to(device),
        weights.to(device),
        layout,
        config=TILE,
    )
    exact = reference.moe(x, list(rows.cpu()), ids, weights, layout, torch.float16)
    assert reference.relative_error(out.cpu(), exact) < 2e-3


def test_a_row_is_read_where_the_table_says(device: str) -> None:
    layout = ExpertLayout(64, 32, 32)
    rows = make_rows(layout, 3, device=device)
    ids, weights = make_routing(20, 3, 1)
    x = torch.randn(20, 64).half()
    arguments = (
        x.to(device),
        address_table(list(rows)).to(device),
        ids.to(device),
        weights.to(device),
        layout,
    )
    before = moe_prefill(*arguments, config=TILE)
    staged = rows[1].clone()
    rows[1].zero_()
    arguments[1][1] = staged.data_ptr()
    assert torch.equal(moe_prefill(*arguments, config=TILE), before)


def test_float32_activations_are_refused() -> None:
    with pytest.raises(InputError, match="float32"):
        moe_prefill(
            torch.zeros(17, 64),
            torch.zeros(1, dtype=torch.int64),
            torch.zeros(17, 1, dtype=torch.int32),
            torch.ones(17, 1),
            ExpertLayout(64, 32, 32),
        )
