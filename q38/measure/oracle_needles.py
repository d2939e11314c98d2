"""A fact hidden in a long text, asked for at its end: what is left of it in a KV cache.

Each needle is a text of so many tokens with one sentence at a depth of it, which gives a number, and the sentence's
beginning once more at the end; the number is scored. The same text with another number in the sentence says what
the sentence is worth to the model: where that is next to nothing, the model does not look it up, and a format
can only be judged by how far it moves the scores.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from q38.base.errors import InputError
from q38.measure.oracle_prompts import Item

DEPTHS = (0.1, 0.5, 0.9)
TOP = 20  # ranks are told apart up to this one
_WORTH = 1.0  # nats of the whole number: below it the model does not retrieve
_PLACES = (
    "the harbour", "the old mill", "the northern gate", "the library", "the third bridge", "the glass house",
    "the lighthouse", "the stone barn", "the market hall", "the salt mine", "the upper lock", "the chapel",
)  # fmt: skip

Ranked = tuple[float, int | None]  # (log-probability in nats, rank from 1 on, None beyond TOP)


class Ranker(Protocol):
    """Scores a continuation, token by token; see q38.measure.oracle_sglang.SglangEngine."""

    def score_ranked(self, item: Item, top: int) -> list[Ranked]:
        """Log-probability of each continuation token, and its rank among the first `top`."""


@dataclass(frozen=True)
class Needle:
    """length: tokens of text and question. depth: of the text before the sentence, 0 to 1. item: its continuation
    is the number. without: the same with another number in the sentence."""

    length: int
    depth: float
    item: Item
    without: Item


def make_needles(
    ids: Sequence[int], encode: Callable[[str], list[int]], lengths: Sequence[int], depths: Sequence[float]
) -> list[Needle]:
    """One needle for every length and depth, each with a place and a number of its own.

    Args:
        ids: tokens of a text, at least as many as the longest needle.
        encode: text -> token ids.

    Raises:
        InputError: a length that has no room for the sentence.
    """
    draw = random.Random(38)
    needles: list[Needle] = []
    for length in lengths:
        for depth in depths:
            place = _PLACES[len(needles) % len(_PLACES)]
            number, other = (str(draw.randrange(10_000, 100_000)) for _ in range(2))
            question, answer = encode(f"\nThe number of {place} is"), encode(f" {number}")
            facts = [encode(f"\nThe number of {place} is {n}.\n") for n in (number, other)]
            items = []
            for fact in facts:
                room = length - len(fact) - len(question)
                if room < 1:
                    raise InputError(
                        f"{length} tokens have no room for a sentence of {len(fact)}",
                        where="--needles",
                        remedy="give greater lengths",
                    )
                at = int(depth * room)
                text = [*ids[:at], *fact, *ids[at:room], *question]
                items.append(Item(f"needle {length} {depth}", tuple(text), tuple(answer)))
            needles.append(Needle(length, depth, *items))
    return needles


def look_up(ranker: Ranker, needles: Sequence[Needle], *, without: bool = False) -> list[dict[str, Any]]:
    """What the number of each needle scores: {"nll": nats of the whole number, "rank": the worst of its tokens, None
    beyond TOP}."""
    found = []
    for needle in needles:
        scores = ranker.score_ranked(needle.without if without else needle.item, TOP)
        ranks = [rank for _, rank in scores]
        worst = None if None in ranks else max(rank for rank in ranks if rank is not None)
        found.append({"nll": -sum(value for value, _ in scores), "rank": worst})
    return found


def summarize(
    needles: Sequence[Needle], blank: list[dict[str, Any]], runs: dict[str, list[dict[str, Any]]]
) -> dict[str, Any]:
    """The document's part on needles.

    Args:
        blank: without the fact, by the reference. runs: with it, by format; the first is the reference.

    Returns:
        {"retrieves": whether the reference looks the facts up, "worth": nats that they are worth to it, "cells": by needle,
        "runs": by format {"found": needles whose number is the likeliest, "d_nll", "mean_abs"}; nats of the whole number}.
    """
    reference = next(iter(runs.values()))
    worth = float(np.mean([b["nll"] - r["nll"] for r, b in zip(reference, blank, strict=True)]))
    table = {}
    for name, run in runs.items():
        moved = np.array([a["nll"] - b["nll"] for a, b in zip(run, reference, strict=True)])
        found = sum(cell["rank"] == 1 for cell in run)
        table[name] = {"found": found, "d_nll": float(moved.mean()), "mean_abs": float(np.abs(moved).mean())}
    cells = [
        {
            "length": needle.length, "depth": needle.depth, "without": without["nll"],
            **{name: run[i] for name, run in runs.items()},
        }
        for i, (needle, without) in enumerate(zip(needles, blank, strict=True))
    ]  # fmt: skip
    return {
        "needles": len(needles), "retrieves": worth >= _WORTH, "worth": worth, "runs": table, "cells": cells
    }  # fmt: skip


def plot_needles(part: dict[str, Any]) -> str:
    """The number's NLL by length and depth, a line a format, and without the fact; where the model does not look it up, how far
    each format moves it from the reference."""
    from q38.measure.figures import COLOURS, MARKERS, drawing, standalone

    cells, names = part["cells"], list(part["runs"])
    at, nll = np.arange(len(cells)), {name: np.array([cell[name]["nll"] for cell in cells]) for name in names}
    with drawing(width=6.4) as plot:
        axes = plot.axes
        for name, colour, marker in zip(names, COLOURS, MARKERS, strict=False):
            values = nll[name] if part["retrieves"] else np.maximum(np.abs(nll[name] - nll[names[0]]), 1e-6)
            if part["retrieves"] or name != names[0]:
                axes.plot(at, values, marker=marker, ms=4, lw=1.2, color=colour, label=name)
        if part["retrieves"]:
            without = [cell["without"] for cell in cells]
            axes.plot(at, without, ls=":", lw=1.4, color="#808080", label="without the fact")
            axes.set_ylabel("NLL of the number, nats")
            axes.set_ylim(bottom=0)
        else:
            axes.set_yscale("log")
            axes.set_ylabel("|d NLL| of the number, nats")
        axes.set_xticks(at, [f"{cell['length']:,}\n{cell['depth']:g}" for cell in cells])
        axes.set_xlabel("tokens, and depth of the fact")
        axes.legend(loc="upper left", bbox_to_anchor=(1, 1))
    return standalone(plot.svg)
