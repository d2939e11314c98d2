"""NLL of held-out text through the server: the model as it is served, KV format and kernels included."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from q38.measure.behaviour.row import Row, capability, protocol
from q38.measure.behaviour.target import Target
from q38.measure.stats import clustered_mean, perplexity
from q38.model.text import load_texts

# Of each text. The server makes logits of every scored token at once: 4 bytes times the vocabulary each.
_CHARS = 800


def check(
    target: Target, *, source: str = "multilingual", tokens: int = 4096, max_nll: float | None = None
) -> list[Row]:
    """Mean over about `tokens` tokens of held-out text, in nats; judged where `max_nll` is given."""
    texts = load_texts(source, "held_out")
    values: list[float] = []
    labels: list[int] = []
    for i, text in enumerate(in_turn(texts.texts, texts.languages)):
        if len(values) >= tokens:
            break
        scores = [-value for value in target.score(text[:_CHARS])]
        values += scores
        labels += [i] * len(scores)
    bad = int((~np.isfinite(values)).sum())
    faults = [f"{bad} of {len(values)} log-probabilities are not finite"] if bad else []
    rows = [protocol("nll-finite", faults, checked=len(values), unit="tokens")]
    if bad or not values:
        return rows
    nll = clustered_mean(values, labels)
    note = f"perplexity {perplexity(nll).value:.4g}, text {texts.sha256[:12]}"
    within = max_nll is None or nll.value <= max_nll
    fields = {"value": nll.value, "standard_error": nll.standard_error, "limit": max_nll}
    judged = max_nll is not None
    if not judged:
        note += "; --max-nll judges it"
    return [
        *rows,
        capability("nll", within, judged=judged, note=note, checked=nll.count, unit="tokens", **fields),
    ]


def in_turn(texts: Sequence[str], languages: Sequence[str]) -> list[str]:
    """One text of each language after the other, so that few tokens cover them all."""
    rank: dict[str, int] = {}
    places = []
    for text, language in zip(texts, languages, strict=True):
        rank[language] = rank.get(language, 0) + 1
        places.append((rank[language], text))
    return [text for _, text in sorted(places, key=lambda place: place[0])]
