"""A stop string cuts the text in one place, however the text arrives."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from q38.serving.stop_strings import StopStrings

LETTERS = st.text("ab\u00e9", max_size=30)
STOPS = st.lists(st.text("ab\u00e9", min_size=1, max_size=4), max_size=3)


def run(pieces: list[str], stops: list[str]) -> tuple[str, str | None]:
    cut = StopStrings(stops)
    text = "".join(cut.feed(piece) for piece in pieces)
    return text + cut.flush(), cut.hit


@given(LETTERS, STOPS, st.lists(st.integers(0, 30)))
def test_the_pieces_do_not_matter(text: str, stops: list[str], cuts: list[int]) -> None:
    edges = sorted({0, len(text), *(c for c in cuts if c < len(text))})
    pieces = [text[a:b] for a, b in pairwise(edges)]
    assert run(pieces, stops) == run([text], stops) == run(list(text), stops)


@given(LETTERS, STOPS)
def test_the_text_ends_before_the_stop_string_that_completes_first(text: str, stops: list[str]) -> None:
    kept, hit = run([text], stops)
    if hit is None:
        assert kept == text
        assert not any(stop in text for stop in stops)
    else:
        end = len(kept) + len(hit)
        assert text[:end] == kept + hit
        assert not any(stop in text[: end - 1] for stop in stops)


@given(LETTERS, STOPS)
def test_nothing_that_may_begin_a_stop_string_is_emitted_early(text: str, stops: list[str]) -> None:
    cut = StopStrings(stops)
    emitted = "".join(cut.feed(c) for c in text)
    kept, _ = run([text], stops)
    assert kept.startswith(emitted)


def test_nothing_comes_after_the_stop_string() -> None:
    cut = StopStrings(["x"])
    assert cut.feed("axb") == "a"
    assert cut.feed("more") == ""
    assert cut.flush() == ""
