"""Varied text for speed measurements: prose in many languages and code, shipped with q38.

One repeated sentence would route to few experts, hit few rows of the n-gram table and flatter every cache.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from q38.base.errors import InputError
from q38.data import data_path

# Two questions about one text: the second one meets a server that has read the text before.
CONTINUE = "Continue the text above in the same manner, at length."
RETELL = "Tell the text above again in other words, at length."


@dataclass(frozen=True)
class PromptText:
    """Passages, and the sha256 over their files in name order."""

    passages: tuple[str, ...]
    sha256: str

    @property
    def chars(self) -> int:
        """Characters in one pass over all passages."""
        return sum(len(p) for p in self.passages)

    def prompt(
        self,
        tokens: int,
        *,
        count: Callable[[str], float],
        nonce: str,
        seed: int,
        task: str = CONTINUE,
        passages: Sequence[str] | None = None,
    ) -> str:
        """A prompt of about `tokens` tokens: nonce, passages in an order that `seed` decides, task.

        The nonce comes first, so that no prefix cache of the server knows more than the chat template's
        opening. Beyond one pass the passages come again, in another order.

        Args:
            count: estimates the tokens of a text.
            task: the question at the end. With another one, all before it stays the same.
            passages: choose among these instead of all.
        """
        order = random.Random(seed)
        passages = self.passages if passages is None else passages
        frame = [f"[{nonce}]", task]
        room = tokens - count(f"[{nonce}]\n\n{CONTINUE}")
        parts: list[str] = []
        while room > 0:
            for passage in order.sample(passages, len(passages)):
                part = _cut(passage, room, count)
                parts.append(part)
                room -= count("\n\n" + part) - count("")
                if room <= 0 or part != passage:
                    return "\n\n".join([frame[0], *parts, frame[1]])
        return "\n\n".join(frame)


@dataclass
class TokenEstimate:
    """tokens = overhead + a * (ASCII characters) + b * (bytes of all others), fitted to counts that a server gave.

    Two rates, because a tokenizer that packs four letters of English into a token may need one for each
    byte of Thai.
    """

    samples: list[tuple[tuple[int, int, int], int]] = field(default_factory=list)
    weights: tuple[float, float, float] = (10.0, 0.3, 0.4)  # typical of byte-level BPE with a chat template

    def learn(self, text: str, tokens: int) -> None:
        """Take one exact count and fit again, by least squares of the relative error."""
        self.samples.append((_features(text), tokens))
        counts = np.array([n for _, n in self.samples], dtype=np.float64)
        features = np.array([f for f, _ in self.samples], dtype=np.float64)  # [samples, 3]
        # A weak pull towards the previous weights settles what few samples leave open.
        pull = np.diag(1e-3 / np.maximum(self.weights, 1e-6))
        left = np.vstack([features / counts[:, None], pull])
        right = np.concatenate([np.ones(len(counts)), np.full(3, 1e-3)])
        solution = np.linalg.lstsq(left, right, rcond=None)[0]
        overhead, ascii_rate, other_rate = (float(w) for w in solution)
        self.weights = (max(overhead, 0.0), max(ascii_rate, 0.01), max(other_rate, 0.01))

    def __call__(self, text: str) -> float:
        """Estimated tokens of a request with this prompt."""
        return sum(w * f for w, f in zip(self.weights, _features(text), strict=True))


def load_prompt_text(file: Path | None = None) -> PromptText:
    """Read the shipped passages, or those of a text file; a blank line separates two of them.

    Raises:
        InputError: the file cannot be read, is not UTF-8, or holds no text.
    """
    files = sorted(data_path("assets", "prompts").glob("*.txt")) if file is None else [file]
    digest = hashlib.sha256()
    passages: list[str] = []
    for name in files:
        try:
            content = name.read_bytes()
            text = content.decode("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"cannot be read ({error})", where=name, remedy="give a UTF-8 text") from None
        digest.update(name.name.encode() + b"\0" + content)
        passages += [p for p in text.strip().split("\n\n") if p.strip()]
    if not passages:
        raise InputError("holds no text", where=files[0], remedy="give a UTF-8 text")
    return PromptText(tuple(passages), digest.hexdigest())


def _features(text: str) -> tuple[int, int, int]:
    ascii_chars = sum(c.isascii() for c in text)
    return 1, ascii_chars, len(text.encode()) - ascii_chars


def _cut(passage: str, room: float, count: Callable[[str], float]) -> str:
    """The longest beginning of `passage` within `room` tokens, one character at least."""
    low, high = 1, len(passage)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if count(passage[:middle]) - count("") <= room else (low, middle - 1)
    return passage[:low]
