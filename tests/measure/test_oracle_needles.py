"""Hidden facts: where they lie in the text, what is asked, and what a cache without them scores."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import pytest

from q38.base.errors import InputError
from q38.measure.oracle_needles import Needle, Ranked, look_up, make_needles, plot_needles, summarize
from q38.measure.oracle_prompts import Item

LENGTHS, DEPTHS = (120, 200), (0.0, 0.5, 1.0)
TEXT = [-1] * 200


def encode(text: str) -> list[int]:
    return [ord(letter) for letter in text]


def decode(ids: Sequence[int]) -> str:
    return "".join(chr(i) if i >= 0 else "~" for i in ids)


def read_back(item: Item, *, trust: float) -> list[Ranked]:
    """As a model that copies whatever followed the last tokens where they stood before; `trust`: how sure it is."""
    ids, scores = list(item.prompt), list[Ranked]()
    for token in item.continuation:
        said = next((ids[i] for i in range(8, len(ids)) if ids[i - 8 : i] == ids[-8:]), None)
        right = trust > 0 and said == token
        scores.append((math.log(0.9), 1) if right else (math.log(0.01), None))
        ids.append(token)
    return scores


@pytest.fixture
def needles() -> list[Needle]:
    return make_needles(TEXT, encode, LENGTHS, DEPTHS)


def test_each_text_has_its_length_and_the_fact_at_its_depth(needles: list[Needle]) -> None:
    assert [(needle.length, needle.depth) for needle in needles] == [(n, d) for n in LENGTHS for d in DEPTHS]
    numbers = set()
    for needle in needles:
        number = decode(needle.item.continuation).strip()
        numbers.add(number)
        for item, wanted in ((needle.item, True), (needle.without, False)):
            text = decode(item.prompt)
            before, fact = text[: text.index("\nThe")], text[text.index("\nThe") :]
            assert len(text) == needle.length
            assert len(before) == int(needle.depth * text.count("~"))
            assert (number in fact) is wanted
            assert text.endswith(fact.split(" is ")[0] + " is")  # asked for as it was told
    assert len(numbers) == len(needles)
    assert len({decode(needle.item.prompt).split(" is ")[0][-8:] for needle in needles}) > 1


def test_needles_are_the_same_every_time(needles: list[Needle]) -> None:
    assert make_needles(TEXT, encode, LENGTHS, DEPTHS) == needles


def test_a_text_without_room_is_refused() -> None:
    with pytest.raises(InputError, match="no room"):
        make_needles(TEXT, encode, (40,), DEPTHS)


class Model:
    def __init__(self, trust: float) -> None:
        self.trust = trust

    def score_ranked(self, item: Item, top: int) -> list[Ranked]:
        return read_back(item, trust=self.trust)


def test_a_model_that_reads_finds_every_fact_and_a_destroyed_cache_none(
    needles: list[Needle], tmp_path: Path
) -> None:
    sees, blind = Model(1.0), Model(0.0)
    blank = look_up(sees, needles, without=True)
    part = summarize(needles, blank, {"bf16": look_up(sees, needles), "zeros": look_up(blind, needles)})
    digits = len(needles[0].item.continuation)
    assert part["retrieves"] and part["worth"] > 1
    assert (part["runs"]["bf16"]["found"], part["runs"]["zeros"]["found"]) == (6, 0)
    assert part["runs"]["zeros"]["mean_abs"] == pytest.approx(digits * math.log(90))
    assert part["runs"]["bf16"]["d_nll"] == 0
    assert part["cells"][0]["bf16"]["rank"] == 1 and part["cells"][0]["zeros"]["rank"] is None
    assert plot_needles(part).count("without the fact") == 1


def test_a_model_that_looks_nothing_up_is_called_so(needles: list[Needle]) -> None:
    blind = Model(0.0)
    part = summarize(
        needles,
        look_up(blind, needles, without=True),
        {"bf16": look_up(blind, needles), "int4": look_up(blind, needles)},
    )
    assert (part["retrieves"], part["worth"], part["runs"]["bf16"]["found"]) == (False, 0.0, 0)
    assert "|d NLL|" in plot_needles(part)
