"""The text that speed is measured with."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from q38.measure.prompts import PromptText, TokenEstimate, load_prompt_text

TEXT = load_prompt_text()


def count(text: str) -> float:
    return 3 + len(text) / 2


def test_the_shipped_text_is_varied() -> None:
    assert len(TEXT.passages) == len(set(TEXT.passages)) > 50
    joined = "".join(TEXT.passages)
    for sign in "éя中あกคعह책{;":
        assert sign in joined


def test_its_hash_changes_with_its_content() -> None:
    assert load_prompt_text().sha256 == TEXT.sha256
    assert len(TEXT.sha256) == 64


@given(tokens=st.integers(60, 20_000), seed=st.integers(0, 10))
def test_a_prompt_has_the_asked_length_and_its_nonce_in_front(tokens: int, seed: int) -> None:
    prompt = TEXT.prompt(tokens, count=count, nonce="abc", seed=seed)
    assert prompt.startswith("[abc]\n\n")
    assert abs(count(prompt) - tokens) <= 4


def test_a_prompt_shorter_than_its_frame_is_the_frame() -> None:
    prompt = TEXT.prompt(1, count=count, nonce="abc", seed=0)
    assert prompt.startswith("[abc]\n\nContinue")


def test_the_order_depends_on_the_seed_only() -> None:
    prompts = [TEXT.prompt(500, count=count, nonce="n", seed=s) for s in (1, 1, 2)]
    assert prompts[0] == prompts[1] != prompts[2]


def test_a_long_prompt_repeats_no_order() -> None:
    text = PromptText(("a" * 10, "b" * 10, "c" * 10, "d" * 10), "0")
    prompt = text.prompt(500, count=lambda t: len(t), nonce="n", seed=3)
    rounds = [tuple(prompt.split("\n\n")[1 + 4 * i : 5 + 4 * i]) for i in range(8)]
    assert len(set(rounds)) > 2
    assert all(sorted(r) == sorted(text.passages) for r in rounds)


@pytest.mark.parametrize("rates", [(7, 0.25, 1.0), (40, 0.3, 0.22), (3, 1.0, 1.0)])
def test_the_estimate_learns_a_tokenizer(rates: tuple[float, float, float]) -> None:
    def true(text: str) -> int:
        plain = sum(c.isascii() for c in text)
        return round(rates[0] + rates[1] * plain + rates[2] * (len(text.encode()) - plain))

    estimate = TokenEstimate()
    for seed in range(3):
        text = TEXT.prompt(200, count=estimate, nonce="n", seed=seed)
        estimate.learn(text, true(text))
    long = TEXT.prompt(5000, count=estimate, nonce="n", seed=9)
    assert abs(true(long) - 5000) < 250
