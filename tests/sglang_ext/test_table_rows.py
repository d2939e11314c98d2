"""Which n-gram rows a step needs, and the buffers that they are read into."""

from __future__ import annotations

from array import array
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from q38.base.errors import InputError
from q38.checkpoint.index import read_json
from q38.model.ngram import row_ids
from q38.model.shape import ModelShape
from q38.ple.reader import PleTable
from q38.sglang_ext.table_rows import DECODE_TOKENS, TableRows, following_tokens, step_tokens

EOS = 2000


@pytest.fixture(scope="module")
def shape(tiny_source: Path) -> ModelShape:
    return ModelShape.from_config(read_json(tiny_source / "config.json"))


@pytest.fixture
def rows(shape: ModelShape, tiny_ple: Path) -> TableRows:
    return TableRows(PleTable.open(tiny_ple), shape, 0)


def mode(name: str) -> Any:
    return SimpleNamespace(is_decode=lambda: name == "decode", is_extend=lambda: name == "extend")


def request(prompt: list[int], output: list[int]) -> Any:
    return SimpleNamespace(
        origin_input_ids=array("q", prompt),
        output_ids=array("q", output),
        full_untruncated_fill_ids=array("q", prompt + output),
    )


TOKENS = st.lists(st.sampled_from([1, 2, 3, EOS]), min_size=1, max_size=12)


@given(prompt=TOKENS, output=TOKENS)
def test_a_decode_step_looks_up_what_the_whole_text_does(
    shape: ModelShape, prompt: list[int], output: list[int]
) -> None:
    batch = SimpleNamespace(forward_mode=mode("decode"), reqs=[request(prompt, output)])
    windows, new = step_tokens(batch, context=2)
    assert new == [1]
    whole = row_ids(np.array(prompt + output), shape)[-1]
    assert (row_ids(np.array(windows[0]), shape)[-1] == whole).all()


@given(prompt=TOKENS, cut=st.integers(0, 11), second=TOKENS)
def test_chunks_look_up_what_the_whole_text_does(
    shape: ModelShape, prompt: list[int], cut: int, second: list[int]
) -> None:
    """Two requests in one step; the first begins anywhere in its prompt."""
    start = min(cut, len(prompt) - 1)
    batch = SimpleNamespace(
        forward_mode=mode("extend"),
        reqs=[request(prompt, []), request(second, [])],
        prefix_lens=[start, 0],
        extend_lens=[len(prompt) - start, len(second)],
    )
    windows, new = step_tokens(batch, context=2)
    assert new == [len(prompt) - start, len(second)]
    for window, n, whole in zip(windows, new, (prompt, second), strict=True):
        assert (row_ids(np.array(window), shape)[-n:] == row_ids(np.array(whole), shape)[-n:]).all()


@given(prompt=TOKENS, cut=st.integers(0, 11), length=st.integers(1, 5))
def test_what_is_read_ahead_is_what_the_next_chunk_takes(
    shape: ModelShape, prompt: list[int], cut: int, length: int
) -> None:
    """Chunks of one length; the last may be shorter, and after it nothing is read."""
    start = min(cut, len(prompt) - 1)
    count = min(length, len(prompt) - start)

    def chunk(start: int, count: int) -> Any:
        return SimpleNamespace(
            forward_mode=mode("extend"), reqs=[request(prompt, [])], prefix_lens=[start], extend_lens=[count]
        )

    windows, new = following_tokens(chunk(start, count), context=2)
    rest = min(count, len(prompt) - start - count)
    assert sum(new) == rest
    if rest:
        assert (list(map(list, windows)), new) == (
            list(map(list, step_tokens(chunk(start + count, rest), context=2)[0])),
            [rest],
        )


def test_rows_arrive_in_the_order_of_the_steps_tokens(rows: TableRows, shape: ModelShape) -> None:
    texts = [np.array([5, 6, 7, 8]), np.array([9, 10])]
    rows.read(texts, [2, 2], decode=False)
    expected = [rows.table.rows(torch.from_numpy(row_ids(t, shape)[-2:].reshape(-1))) for t in texts]
    assert torch.equal(rows(4, decode=False), torch.cat(expected).view(4, -1))


def test_the_decode_buffer_stays_where_captured_graphs_read_it(rows: TableRows) -> None:
    address = rows(DECODE_TOKENS, decode=True).data_ptr()
    for tokens in (1, 7, DECODE_TOKENS):
        rows.read([np.array([4, 5, 6])] * tokens, [1] * tokens, decode=True)
        assert rows(tokens, decode=True).data_ptr() == address


def test_a_chunk_leaves_the_decode_buffer_alone(rows: TableRows) -> None:
    rows.read([np.array([4, 5, 6])], [1], decode=True)
    before = rows(1, decode=True).clone()
    rows.read([np.arange(300)], [300], decode=False)
    assert torch.equal(rows(1, decode=True), before)
    assert rows(300, decode=False).shape == (300, rows.embed_dim)


def test_more_tokens_than_the_decode_buffer_holds_are_refused(rows: TableRows) -> None:
    with pytest.raises(InputError, match="--max-running-requests"):
        rows(DECODE_TOKENS + 1, decode=True)


def test_it_adds_no_parameter_and_nothing_to_the_state(rows: TableRows) -> None:
    assert not list(rows.parameters())
    assert not rows.state_dict()
