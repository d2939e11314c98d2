"""The figures of one answer and of one round follow from the times and the counts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from q38.measure.bench.sample import Round, Sample, as_sample, between_tokens, weighted_percentile
from q38.serving.client import Delta, Reply, ServerError


def reply(times: list[float], end: float, tokens: int, counts: list[int] | None = None, **more: Any) -> Reply:
    deltas = [Delta(t, text="x", tokens=counts[i] if counts else None) for i, t in enumerate(times)]
    return Reply("length", 50, tokens, end_s=end, deltas=deltas, **more)


def sample(first: float = 1.0, last: float = 2.0, *, tokens: int = 5, sent: float = 0.0) -> Sample:
    step = (last - first) / (tokens - 1)
    return Sample(100, tokens, None, sent, first, last, tokens, 1, ((step, 1),) * (tokens - 1), "one a piece")


def test_one_token_a_piece() -> None:
    s = as_sample(reply([0.5, 0.6, 0.7, 0.9], 0.9, 4), where="")
    assert (s.first_token_s, s.last_token_s, s.counted) == (0.5, 0.9, "one a piece")
    assert s.decode_tokens_per_s == pytest.approx(3 / 0.4)
    assert between_tokens([s]) == pytest.approx(
        {"mean": 400 / 3, "p50": 100, "p90": 200, "p99": 200, "max": 200}
    )


def test_the_token_that_ends_the_turn_may_show_nothing() -> None:
    s = as_sample(reply([0.5, 0.6, 0.7], 0.8, 4), where="")
    assert s.counted == "one a piece"
    assert s.decode_tokens_per_s == pytest.approx(3 / 0.3)


def test_pieces_of_several_tokens_that_the_server_counts_are_exact() -> None:
    # 2, 4 and 2 tokens, then one that shows nothing: the first piece's tokens took no time that was seen.
    s = as_sample(reply([1.0, 1.4, 1.6], 1.8, 9, counts=[2, 6, 8]), where="")
    assert s.counted == "by the server"
    assert s.decode_tokens_per_s == pytest.approx(7 / 0.8)
    times = between_tokens([s])
    assert times is not None
    assert (times["p50"], times["max"]) == pytest.approx((100, 200))
    assert times["mean"] == pytest.approx(800 / 7)


def test_two_pieces_of_one_step_are_one_step() -> None:
    # The last reasoning and the first content of a token arrive together.
    s = as_sample(reply([1.0, 1.1, 1.1001, 1.2], 1.2, 3, counts=[1, 2, 2, 3]), where="")
    assert [n for _, n in s.steps] == [1, 1]
    assert [t for t, _ in s.steps] == pytest.approx([0.1, 0.1])


def test_pieces_that_nobody_counts_do_not_flatter_the_speed() -> None:
    # 4 pieces of 8 tokens in 0.3 s: 24 tokens after the first piece, not 31.
    s = as_sample(reply([1.0, 1.1, 1.2, 1.3], 1.3, 32), where="")
    assert s.counted == "on average"
    assert s.decode_tokens_per_s == pytest.approx(24 / 0.3)
    times = between_tokens([s])
    assert times is not None and times["p50"] == pytest.approx(100 / 8)


def test_a_server_that_counts_backwards_is_not_believed() -> None:
    assert as_sample(reply([1.0, 1.1, 1.2], 1.2, 3, counts=[2, 1, 3]), where="").counted == "one a piece"


def test_an_answer_in_one_piece_has_no_decode_speed() -> None:
    s = as_sample(reply([1.0], 1.0, 64), where="")
    assert s.decode_tokens_per_s is None
    assert between_tokens([s]) is None
    assert s.to_dict()["between_tokens_ms"] is None


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        (Reply("stop", None, None, end_s=1.0, deltas=[Delta(0.1, "x")]), "no token counts"),
        (Reply("stop", 5, 3, end_s=1.0, deltas=[]), "none of 3 tokens was visible"),
        (Reply("stop", 5, 1, end_s=1.0, deltas=[Delta(0.1, "x")]), "ended after 1 tokens"),
    ],
    ids=["no usage", "nothing visible", "one token"],
)
def test_an_answer_without_the_makings_of_a_speed_is_refused(broken: Reply, words: str) -> None:
    with pytest.raises(ServerError, match=words):
        as_sample(broken, where="")


def test_a_round_of_one_is_its_request() -> None:
    alone = Round((sample(),))
    assert alone.prefill_tokens_per_s == pytest.approx(100)
    assert alone.decode_tokens_per_s == pytest.approx(4)
    assert alone.output_tokens_per_s == pytest.approx(5 / 2)


def test_a_round_of_several_counts_all_tokens_over_the_whole_time() -> None:
    both = Round((sample(1, 2), sample(2, 4, sent=0.5)))
    assert both.prefill_tokens_per_s == pytest.approx(200 / 2.5)
    assert both.output_tokens_per_s == pytest.approx(10 / 4.5)
    assert both.decode_tokens_per_s == pytest.approx((4 + 2) / 2)


steps = st.lists(st.tuples(st.floats(1e-4, 10), st.integers(1, 9)), min_size=1, max_size=30)


@given(steps, st.sampled_from([50, 90, 99]))
def test_a_weighted_percentile_is_that_of_the_tokens_written_out(
    rows: list[tuple[float, int]], q: int
) -> None:
    values, weights = (np.array(x, dtype=float) for x in zip(*rows, strict=True))
    written_out = np.repeat(values, weights.astype(int))
    assert weighted_percentile(values, weights, q) == np.percentile(written_out, q, method="inverted_cdf")


@given(steps, st.floats(0.01, 5), st.integers(1, 8))
def test_however_a_server_bundles_the_speed_is_the_same(
    rows: list[tuple[float, int]], first: float, first_tokens: int
) -> None:
    """With counts by the server, decode tokens/s is tokens over time whatever the pieces are."""
    times, counts = [first], [first_tokens]
    for seconds, tokens in rows:
        times.append(times[-1] + seconds)
        counts.append(counts[-1] + tokens)
    if counts[-1] < 2:
        return
    s = as_sample(reply(times, times[-1], counts[-1], counts=counts), where="")
    expected = sum(n for _, n in rows) / sum(t for t, _ in rows)
    assert s.decode_tokens_per_s == pytest.approx(expected, rel=1e-6)
    times_ms = between_tokens([s])
    assert times_ms is not None
    assert times_ms["p50"] <= times_ms["p90"] <= times_ms["p99"] <= times_ms["max"]
