"""The rounds of one group of cells: warm-up until the speed is steady, then the measured ones."""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from q38.base.errors import CheckFailed
from q38.measure.bench.counters import read_counters
from q38.measure.bench.plan import COLD, WARM, Cell, Plan
from q38.measure.bench.sample import Round
from q38.measure.bench.target import Target
from q38.measure.prompts import CONTINUE, RETELL, PromptText, TokenEstimate

_PROBE_TOKENS = 192  # prompt length of the calibration
STEADY = 1.1  # two rounds agree when neither time differs by more than this factor
_SLACK = 64  # tokens; the nonce, the question and the chat template of a short prompt


@dataclass
class Prompter:
    """Makes prompts. Their lengths get closer to the depth with every answer."""

    text: PromptText
    seed: int
    estimate: TokenEstimate = field(default_factory=TokenEstimate)
    made: int = 0

    def calibrate(self, target: Target) -> None:
        """Learn the tokenizer's rates from text that is mostly ASCII and from text that is not, and which request
        fields the server takes."""
        plain = [p for p in self.text.passages if sum(c.isascii() for c in p) > 0.9 * len(p)]
        other = [p for p in self.text.passages if p not in plain]
        for passages in filter(None, (plain, other)):
            prompt = self.text.prompt(
                _PROBE_TOKENS,
                count=self.estimate,
                nonce=secrets.token_hex(8),
                seed=self.seed,
                passages=passages,
            )
            self.estimate.learn(prompt, target.learn_fields(prompt).prompt_tokens)

    def seeds(self, n: int) -> list[int]:
        """Seeds of n texts that no other prompt has had."""
        self.made += n
        return [self.seed * 1_000_003 + self.made - i for i in range(n)]

    def pairs(self, depth: int, seeds: Sequence[int]) -> list[tuple[str, str]]:
        """(cold, warm) per seed: the same text behind the same fresh nonce, with two questions."""
        pairs = []
        for seed in seeds:
            nonce = secrets.token_hex(8)
            cold, warm = (
                self.text.prompt(depth, count=self.estimate, nonce=nonce, seed=seed, task=task)
                for task in (CONTINUE, RETELL)
            )
            pairs.append((cold, warm))
        return pairs


@dataclass
class Series:
    """The rounds of one server in one group, by prefix; `counted` is how far the server's own counters rose in them."""

    target: Target
    warmup: list[Round] = field(default_factory=list)
    measured: dict[str, list[Round]] = field(default_factory=lambda: {COLD: [], WARM: []})
    counted: dict[str, dict[str, float]] = field(default_factory=lambda: {COLD: {}, WARM: {}})

    def play(self, prefix: str, prompts: Sequence[str], max_tokens: int) -> Round:
        """One round, with the server's counters read before and after it."""
        before = read_counters(self.target)
        played = self.target.play(prompts, max_tokens)
        if before:
            after = read_counters(self.target)
            total = self.counted[prefix]
            for name, value in after.items():
                total[name] = total.get(name, 0.0) + value - before.get(name, 0.0)
        return played

    def begin(self) -> None:
        """Forget the counters of the warm-up."""
        for counter in self.counted.values():
            counter.clear()

    @property
    def steady(self) -> bool:
        """Whether the last two warm-up rounds agree."""
        if len(self.warmup) < 2:
            return False
        a, b = self.warmup[-2:]
        pairs = ((a.first_token_s, b.first_token_s), (a.last_token_s, b.last_token_s))
        return all(abs(math.log(x / y)) <= math.log(STEADY) for x, y in pairs)


def play_group(
    cells: Sequence[Cell],
    plan: Plan,
    prompter: Prompter,
    series: Sequence[Series],
    note: Callable[[str], None],
) -> None:
    """Fill `series`, one entry per server. Two servers take turns (A B, B A, ...) with the same texts.

    `note` is told what is under way before each round.

    Raises:
        Q38Error: a request failed, a prompt missed its depth, or a cold prompt was in the cache. What was measured
            until then is in `series`.
    """
    warm = cells[-1].prefix == WARM
    for i in range(plan.max_warmup):
        note(f"warm-up {i + 1}")
        for one, (cold, _) in zip(series, _both(cells, plan, prompter, series, warm, i), strict=True):
            one.warmup.append(cold)
        if all(one.steady for one in series):
            break
    for one in series:
        one.begin()
    for i in range(plan.repeats):
        note(f"repeat {i + 1} of {plan.repeats}")
        for one, (cold, again) in zip(series, _both(cells, plan, prompter, series, warm, i), strict=True):
            _require_depth(cold, cells[0].depth)
            _require_cold(cold, where=one.target.client.url)
            one.measured[COLD].append(cold)
            one.measured[WARM] += [] if again is None else [again]


def _both(
    cells: Sequence[Cell],
    plan: Plan,
    prompter: Prompter,
    series: Sequence[Series],
    warm: bool,
    turn: int,
) -> list[tuple[Round, Round | None]]:
    """One cold round of each server, and the warm one that follows it. In the order of `series`."""
    depth, n = cells[0].depth, cells[0].concurrency
    seeds = prompter.seeds(n)
    texts = [prompter.pairs(depth, seeds) for _ in series]
    done: dict[int, tuple[Round, Round | None]] = {}
    for k in range(len(series)) if turn % 2 == 0 else reversed(range(len(series))):
        cold = series[k].play(COLD, [p for p, _ in texts[k]], plan.max_tokens)
        again = series[k].play(WARM, [p for _, p in texts[k]], plan.max_tokens) if warm else None
        done[k] = (cold, again)
    for k, pairs in enumerate(texts):
        for (prompt, _), sample in zip(pairs, done[k][0].samples, strict=True):
            prompter.estimate.learn(prompt, sample.prompt_tokens)
    return [done[k] for k in range(len(series))]


def _require_depth(played: Round, depth: int) -> None:
    shortest = min(s.prompt_tokens for s in played.samples)
    if shortest < 0.85 * depth - _SLACK:
        raise CheckFailed(
            f"a prompt has {shortest} tokens, not {depth}: its length cannot be foreseen with this tokenizer",
            remedy="give a more uniform text with --text",
        )


def _require_cold(played: Round, *, where: str) -> None:
    for sample in played.samples:
        if (sample.cached_tokens or 0) > 0.1 * sample.prompt_tokens + _SLACK:
            raise CheckFailed(
                f"{sample.cached_tokens} of {sample.prompt_tokens} prompt tokens were in the server's cache, although "
                "the prompt begins with a number that no other has",
                where=where,
                remedy="put no cache of answers in front of the server",
            )
