"""Rows that a decode step fetches itself: in its own order, by SGLang's hash, and never wrong ones."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from q38.base.errors import InputError
from q38.checkpoint.index import read_json
from q38.model.shape import ModelShape
from q38.ple.reader import PleTable
from q38.sglang_ext.stream_rows import StreamRows
from q38.sglang_ext.table_rows import DECODE_TOKENS, TableRows
from tests.sglang_ext.conftest import Child


@pytest.fixture
def rows(tiny_source: Path, tiny_ple: Path) -> TableRows:
    shape = ModelShape.from_config(read_json(tiny_source / "config.json"))
    return TableRows(PleTable.open(tiny_ple), shape, 0, in_stream=True)


def stream_of(rows: TableRows) -> StreamRows:
    assert rows.stream is not None
    return rows.stream


def ids_of(rows: TableRows, tokens: int, seed: int = 0) -> torch.Tensor:
    assert rows.shape.ngram is not None
    random = torch.Generator().manual_seed(seed)
    return torch.randint(0, rows.table.num_rows, (tokens, rows.shape.ngram.heads), generator=random)


def test_rows_are_those_of_the_table(rows: TableRows) -> None:
    stream = stream_of(rows)
    for seed, tokens in enumerate((1, 5, DECODE_TOKENS, 1)):
        ids = ids_of(rows, tokens, seed)
        stream.start(ids)
        assert stream.started
        assert torch.equal(stream.take(), rows.table.rows(ids.reshape(-1)).view(tokens, -1))
        assert not stream.started
    stream.fetcher.check()


def test_more_tokens_than_the_buffers_hold_are_refused(rows: TableRows) -> None:
    with pytest.raises(InputError, match=f"--requests {DECODE_TOKENS}"):
        stream_of(rows).start(ids_of(rows, DECODE_TOKENS + 1))


def test_rows_of_a_prompt_are_not_read_again_by_a_step_and_both_are_counted(rows: TableRows) -> None:
    stream, tokens = stream_of(rows), list(range(40, 50))
    rows.read([tokens], [10], decode=False)
    last = rows._ids([tokens], [1]).reshape(1, -1)
    stream.start(torch.from_numpy(last))
    assert torch.equal(stream.take(), rows(10, decode=False)[-1:])
    heads = last.size
    counts = rows.counts()
    assert (counts["rows"], stream.fetcher.counts()["hits"]) == (11 * heads, heads)


def test_sglangs_hash_is_that_of_the_table(sglang_child: Child) -> None:
    """At the size of the release, with end-of-text anywhere in the context; on a CPU its torch operators."""
    assert sglang_child.run(
        """
import numpy as np
import torch
from types import SimpleNamespace
from q38.checkpoint.index import read_json
from q38.data import data_path
from q38.model.ngram import constants, row_ids
from q38.model.shape import ModelShape
from sglang.srt.models import qwen4_exp

shape = ModelShape.from_config(read_json(data_path("assets", "models", "qwen3.8-flash-next.json")))
random = np.random.default_rng(0)
contexts = random.integers(0, shape.vocab_size, (300, 3))
contexts[random.random(contexts.shape) < 0.3] = shape.eos_token_id
embedding = object.__new__(qwen4_exp.Qwen4ExpNGramEmbedding)
torch.nn.Module.__init__(embedding)
for name, values in constants(shape).items():
    setattr(embedding, name, torch.tensor(values))
embedding.enable_ple_fusion, embedding.ngram_size = True, shape.ngram.ngram_size
embedding.heads_per_ngram, embedding.eos_token_id = shape.ngram.heads_per_ngram, shape.eos_token_id
pool, kept = SimpleNamespace(ple_window_cache=None), qwen4_exp.get_req_to_token_pool
qwen4_exp.get_req_to_token_pool = lambda: pool
found = embedding._hash_contexts(torch.from_numpy(contexts), decode_sized=True)
qwen4_exp.get_req_to_token_pool = kept
result = bool((found.numpy() == row_ids(contexts, shape)[:, -1]).all())
"""
    )


def test_no_token_leaves_a_step_whose_rows_could_not_be_read(sglang_child: Child) -> None:
    """The process ends, once the step's tokens are there and before anything is done with them."""
    code = """
from types import SimpleNamespace
from q38.base.errors import InputError
from q38.sglang_ext import ngram

happened = []
def check():
    happened.append("check")
    if failed:
        raise InputError("row 5 cannot be read", where="table.bin")

stream = SimpleNamespace(fetcher=SimpleNamespace(check=check))
model = SimpleNamespace(_q38_table_rows=[SimpleNamespace(stream=stream)])
scheduler = SimpleNamespace(tp_worker=SimpleNamespace(model_runner=SimpleNamespace(model=model)))
copied = SimpleNamespace(copy_done=SimpleNamespace(synchronize=lambda: happened.append("wait")))
try:
    ngram.process_batch_result(lambda *_: happened.append("process"), scheduler, "batch", copied)
except SystemExit as ended:
    happened.append(ended.code)
result = happened
"""
    assert sglang_child.run("failed = False\n" + code) == ["wait", "check", "process"]
    assert sglang_child.run("failed = True\n" + code) == ["wait", "check", 2]


def test_a_step_that_mixes_prompts_and_answers_is_refused(sglang_child: Child) -> None:
    """Its decoded tokens are known on the device alone, its prompts are read by the host."""
    code = """
from types import SimpleNamespace
from q38.sglang_ext import ngram

mode = SimpleNamespace(**{f"is_{n}": (lambda v=v: v) for n, v in dict(idle=0, decode=0, extend=1, target_verify=0, mixed=1).items()})
runner = SimpleNamespace(model=SimpleNamespace(_q38_table_rows=[SimpleNamespace(stream=object())]))
ngram.read_rows(None, None, SimpleNamespace(forward_mode=mode), runner)
"""
    with pytest.raises(RuntimeError, match="prompts and answers in one step"):
        sglang_child.run(code)
