"""N-gram rows fetched inside a decode step on a real GPU: in captured graphs, without waiting for the host in between."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from q38.base.errors import InputError
from q38.checkpoint.index import read_json
from q38.data import data_path
from q38.model.ngram import constants, row_ids
from q38.model.shape import ModelShape

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU"),
]
if torch.cuda.is_available() or TYPE_CHECKING:
    from q38.ple.fetch import RowFetcher
    from q38.ple.reader import PleTable, _Segment
    from q38.ple.row_cache import RowCache
    from q38.sglang_ext.stream_rows import StreamRows

ROWS, DIM, HEADS = 50_000, 160, 16


@pytest.fixture
def table(tmp_path: Path) -> PleTable:
    file = tmp_path / "table.bin"
    codes = torch.randn(ROWS * DIM, generator=torch.Generator().manual_seed(0)).to(torch.float8_e4m3fn)
    file.write_bytes(codes.view(torch.uint8).numpy().tobytes())
    return PleTable([_Segment(file, 0, ROWS)], DIM, "F8_E4M3", 0.5, file)


@pytest.fixture
def rows(table: PleTable) -> Iterator[StreamRows]:
    fetcher = RowFetcher(table, RowCache(512, DIM))
    with torch.device("cuda"):  # as SGLang builds a model
        made = StreamRows(fetcher, HEADS, 64, torch.device("cuda", 0))
    yield made
    torch.cuda.synchronize()
    fetcher.close()


class Step:
    """A captured step: hash the tokens, fetch, compute something meanwhile, take the rows, choose the next tokens by them."""

    def __init__(self, rows: StreamRows, tokens: int) -> None:
        self.tokens = torch.arange(tokens, device="cuda") + 7
        self.out = torch.zeros(tokens, HEADS * DIM, dtype=torch.bfloat16, device="cuda")
        self._filler = torch.randn(2048, 2048, device="cuda")
        self._run(rows)  # compiles, and fills the allocator
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self._run(rows)

    @staticmethod
    def ids(tokens: torch.Tensor) -> torch.Tensor:
        """int64 [tokens, heads]."""
        heads = torch.arange(1, HEADS + 1, device=tokens.device)
        return (tokens[:, None] * 2_654_435_761 ^ heads * 40_503) % ROWS

    def _run(self, rows: StreamRows) -> None:
        rows.start(self.ids(self.tokens))
        for _ in range(4):
            self._filler @ self._filler
        values = rows.take()
        self.out.copy_(values)
        self.tokens.copy_(self.tokens * 31 % 1_000_003 + values[:, 0].float().abs().mul(1000).long())


def expected(table: PleTable, tokens: torch.Tensor) -> torch.Tensor:
    return table.rows(Step.ids(tokens.cpu())).view(len(tokens), HEADS * DIM)


@pytest.mark.parametrize("tokens", [1, 4, 64])
def test_replays_read_the_rows_of_their_own_tokens(rows: StreamRows, tokens: int) -> None:
    step = Step(rows, tokens)
    for _ in range(20):
        asked = step.tokens.clone()
        step.graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(step.out.cpu(), expected(rows.fetcher.table, asked))
    rows.fetcher.check()
    assert rows.fetcher.counts()["rows"] == 21 * tokens * HEADS


def test_steps_enqueued_ahead_follow_each_other(rows: StreamRows) -> None:
    """200 steps of two sizes, each decided by the rows of the one before, and the host never waits."""
    table, steps = rows.fetcher.table, [Step(rows, 1), Step(rows, 3)]
    found: list[tuple[torch.Tensor, torch.Tensor]] = []
    for n in range(200):
        step = steps[n % 2]
        asked = step.tokens.clone()
        step.graph.replay()
        found.append((asked, step.out.clone()))
    torch.cuda.synchronize()
    rows.fetcher.check()
    for asked, out in found:
        assert torch.equal(out.cpu(), expected(table, asked))
    assert len({tuple(asked.tolist()) for asked, _ in found}) > 150


def test_a_step_without_a_graph_is_the_same(rows: StreamRows) -> None:
    tokens = torch.tensor([3, 5], device="cuda")
    for _ in range(3):
        rows.start(Step.ids(tokens))
        assert torch.equal(rows.take().cpu(), expected(rows.fetcher.table, tokens))
        tokens += 11


def test_a_step_ends_while_the_interpreter_is_locked(rows: StreamRows) -> None:
    """The scheduler may hold the interpreter's lock for all of a step."""
    step = Step(rows, 2)
    done = torch.cuda.Event()
    step.graph.replay()
    done.record()
    libc: Any = ctypes.PyDLL(None)  # keeps the lock, unlike CDLL
    libc.usleep(1_000_000)
    assert done.query()


def test_a_disk_error_reaches_the_host_before_the_tokens_do(rows: StreamRows) -> None:
    step = Step(rows, 1)
    assert rows.fetcher.table.file is not None
    with rows.fetcher.table.file.open("r+b") as file:
        file.truncate(DIM)
    for _ in range(5):
        step.graph.replay()
    torch.cuda.synchronize()
    with pytest.raises(InputError, match="the file ends before it"):
        rows.fetcher.check()


def test_more_tokens_than_the_buffers_hold_are_refused(rows: StreamRows) -> None:
    with pytest.raises(InputError, match="--requests 64"):
        rows.start(torch.zeros(65, HEADS, dtype=torch.int64, device="cuda"))


def test_the_hash_of_sglangs_kernel_is_that_of_the_table() -> None:
    """At the size of the release, with end-of-text anywhere in the context."""
    kernels = pytest.importorskip("sglang.kernels.ops.embeddings.qwen4_ngram")
    shape = ModelShape.from_config(read_json(data_path("assets", "models", "qwen3.8-flash-next.json")))
    assert shape.eos_token_id is not None
    eos, random = shape.eos_token_id, np.random.default_rng(0)
    contexts = random.integers(0, shape.vocab_size, (500, 3))
    contexts[random.random(contexts.shape) < 0.3] = eos
    names = ("layer_multipliers", "ngram_heads_vocab_sizes", "ngram_heads_offsets")
    values = [torch.tensor(constants(shape)[name], device="cuda") for name in names]
    found = kernels.fused_qwen4_ngram_hash(torch.from_numpy(contexts).cuda(), *values, eos)
    assert (found.cpu().numpy() == row_ids(contexts, shape)[:, -1]).all()
