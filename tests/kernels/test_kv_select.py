"""Slots of a sparse-attention step: the kernel against the torch version, and both against a loop."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from q38.kernels.kv_select import launch, selected_slots

CONTEXT = 96


@st.composite
def steps(draw: st.DrawFn) -> tuple[torch.Tensor, ...]:
    """(table, requests, indices, lengths, rows of each run) of a random step."""
    batch, topk = draw(st.integers(1, 4)), draw(st.integers(1, 40))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    table = torch.randint(0, 5000, (6, CONTEXT), dtype=torch.int32, generator=generator)
    requests = torch.randint(0, 6, (batch,), generator=generator)
    lengths = torch.tensor(draw(st.lists(st.integers(1, CONTEXT), min_size=batch, max_size=batch))).int()
    indices = torch.full((batch, topk), -1, dtype=torch.int32)
    runs = []
    for row, length in enumerate(lengths.tolist()):
        count = min(draw(st.integers(0, topk)), length)
        indices[row, :count] = torch.randperm(length, generator=generator)[:count].int()
        runs.append(count)
    return table, requests, indices, lengths, torch.tensor(runs)


def expected(step: tuple[torch.Tensor, ...], starts: torch.Tensor, columns: int) -> list[int]:
    table, requests, indices, lengths, runs = step
    found = [-1] * (len(requests) * columns)
    for query in range(len(requests)):
        for column in range(int(runs[query])):
            position = int(indices[query, column])
            assert 0 <= position < int(lengths[query])
            found[int(starts[query]) + column] = int(table[requests[query], position])
    return found


@given(steps(), st.integers(0, 60))
@settings(max_examples=15)
def test_every_row_of_the_scratch_gets_the_slot_that_its_query_selected(
    device: str, step: tuple[torch.Tensor, ...], room: int
) -> None:
    table, requests, indices, lengths, runs = step
    topk = indices.shape[1]
    packed = torch.cat([torch.zeros(1, dtype=torch.long), runs.cumsum(0)]).int()
    stride = topk + room
    strided = (torch.arange(len(requests) + 1) * stride).int()
    for starts, columns in ((packed, topk), (strided, stride)):
        arguments = (table, requests, indices, lengths, starts)
        wanted = expected(step, starts, columns)
        assert selected_slots(*arguments, len(requests), columns).tolist() == wanted
        on = [tensor.to(device) for tensor in arguments]
        assert launch(*on, len(requests), columns).tolist() == wanted


def test_positions_beyond_the_length_are_not_read(device: str) -> None:
    table = torch.arange(40, dtype=torch.int32, device=device).view(2, 20)
    indices = torch.tensor([[0, 7, -1], [3, 19, 2]], dtype=torch.int32, device=device)
    arguments = (
        table,
        torch.tensor([1, 0], device=device),
        indices,
        torch.tensor([5, 20], dtype=torch.int32, device=device),
        torch.tensor([0, 3, 6], dtype=torch.int32, device=device),
    )
    for found in (selected_slots(*arguments, 2, 3), launch(*arguments, 2, 3)):
        assert found.tolist() == [20, -1, -1, 3, 19, 2]


@pytest.mark.parametrize("width", [torch.int32, torch.int64])
def test_requests_may_have_either_width_and_more_rows_than_the_batch(device: str, width: torch.dtype) -> None:
    table = torch.arange(40, dtype=torch.int32, device=device).view(2, 20)
    indices = torch.zeros(4, 8, dtype=torch.int32, device=device)[:, :2]
    arguments = (
        table,
        torch.tensor([1, 0, 0], dtype=width, device=device),
        indices,
        torch.ones(4, dtype=torch.int32, device=device),
        torch.tensor([0, 2], dtype=torch.int32, device=device),
    )
    assert selected_slots(*arguments, 1, 2).tolist() == launch(*arguments, 1, 2).tolist() == [20, 20]
