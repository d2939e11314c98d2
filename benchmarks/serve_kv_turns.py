"""The part conversations of benchmarks/serve_gpu_kv.py: turns that find their prefix score as turns without.

Not to the bit, where the prefix ends inside a prompt step: the step of a turn with a hit has other tokens in it than the steps of
one without, so matrix products of other shapes. What that alone makes is measured beside it, and turns whose prefix ends
where a step does must be the same.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from benchmarks.serve_kv_client import Cache, Report
from benchmarks.serve_session import prompt

CONVERSATIONS = 10
SCORED = 64  # tokens at the end of a prompt whose log-probabilities are compared
Answer = dict[str, Any]


def conversations(cache: Cache, turn: int, report: Report) -> dict[str, Any]:
    """Two rounds of more conversations than are kept, and their last tokens scored once more without any cache.

    Args:
        turn: tokens of a first turn.
    """
    opened = []
    for _ in range(CONVERSATIONS):
        ids = prompt(turn)
        opened.append(ids + cache.ask(ids, new=8)["ids"])
    turns = [ids + prompt(SCORED) for ids in opened]
    # Backwards: the newest are still there, the oldest are not.
    second = [cache.ask(ids, scored=SCORED) for ids in reversed(turns)][::-1]
    used = cache.memory()["used"]
    fresh, again = ([_fresh(cache, ids) for ids in turns[: 10 if i else 3]] for i in (1, 0))
    # The control: the same last tokens after somebody else's beginning.
    strangers = [_fresh(cache, other + ids[-SCORED:]) for ids, other in zip(turns, opened[1:4], strict=False)]
    differences = [apart(a, b) for a, b in zip(second, fresh, strict=True)]
    noise = [apart(a, b) for a, b in zip(again, fresh, strict=False)]
    control = float(np.mean([apart(a, b) for a, b in zip(strangers, fresh, strict=False)]))
    cached = [answer["cached"] for answer in second]
    hits = [i for i, found in enumerate(cached) if found]
    report.check("conversations", "found their prefix", cached, bool(hits))
    report.check("conversations", "were evicted", sum(n == 0 for n in cached), 0 in cached)
    evicted = max((differences[i] for i in range(CONVERSATIONS) if i not in hits), default=0.0)
    report.check(
        "conversations",
        "evicted: mean |d| nats, worst (noise)",
        f"{evicted:.5f} ({max(noise):.5f})",
        evicted <= max(noise),
    )
    worst = max((differences[i] for i in hits), default=0.0)
    report.check(
        "conversations", "hits: mean |d| nats, worst (a quarter of a stranger's)",
        f"{worst:.5f} ({0.25 * control:.5f})", worst < 0.25 * control,
    )  # fmt: skip
    steps = _steps(cache, [(turns[i], cached[i], fresh[i]) for i in hits], report)
    other = max(steps, default=0.0)
    report.check(
        "conversations", "hits: mean |d| nats, worst (steps that end there)",
        f"{worst:.5f} ({other:.5f})", worst <= 1.25 * other + max(noise),
    )  # fmt: skip
    equal = _whole_steps(cache, report)
    return {
        "turn": turn, "cached": cached, "used": used, "mean_abs": differences, "noise": noise, "control": control,
        "steps": steps, "whole_steps": equal,
    }  # fmt: skip


def _steps(cache: Cache, hits: list[tuple[list[int], int, Answer]], report: Report) -> list[float]:
    """Mean |d| of turns whose prefix was a prompt of its own, which ended with a step: nothing but the shapes of the steps differs.

    The state at the end of a step is the one that the next step would begin with, so no snapshot inside a step is used.

    Args:
        hits: of each, its tokens, how many of them were found, and its answer without a cache.
    """
    found = []
    for ids, prefix, without in hits:
        cache.flush()
        cache.ask(ids[:prefix], new=1)
        after = cache.ask(ids, scored=SCORED)
        report.check(
            "conversations", f"prompt of {prefix} tokens, cached", after["cached"], after["cached"] == prefix
        )
        found.append(apart(after, without))
    return found


def _whole_steps(cache: Cache, report: Report) -> dict[str, list[float]]:
    """Mean |d| of turns whose prefix is one prompt step: with a hit and without, the same steps are computed.

    Equal to the bit, as long as the sparse attention attends to all tokens: beyond its budget the order of those it selects differs
    from run to run, so a run is compared with itself too. `--chunk 1792` stays below the release's budget of 2,048.
    """
    step = int(cache.http.get("/get_server_info").json()["chunked_prefill_size"])
    found: dict[str, list[float]] = {"hit": [], "again": []}
    for _ in range(3):
        cache.flush()
        ids = prompt(step)
        ids = ids + cache.ask(ids, new=8)["ids"] + prompt(SCORED)
        second = cache.ask(ids, scored=SCORED)
        report.check(
            "conversations",
            f"prefix of one step, {step} tokens, cached",
            second["cached"],
            second["cached"] == step,
        )
        without = _fresh(cache, ids)
        found["hit"].append(apart(second, without))
        found["again"].append(apart(_fresh(cache, ids), without))
    worst, noise = max(found["hit"]), max(found["again"])
    report.check(
        "conversations",
        "prefix of one step: mean |d| nats, worst (noise)",
        f"{worst:.5f} ({noise:.5f})",
        worst <= 1.25 * noise,
    )
    return found


def _fresh(cache: Cache, ids: list[int]) -> Answer:
    cache.flush()
    return cache.ask(ids, scored=SCORED)


def apart(a: Answer, b: Answer, count: int = SCORED, *, start: int = 0) -> float:
    """Mean |difference| of `count` scores; the first ones are those of the prompt."""
    part = slice(start, start + count)
    return float(np.abs(np.subtract(a["scores"][part], b["scores"][part])).mean())
