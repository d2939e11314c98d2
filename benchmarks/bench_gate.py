"""Does `q38 bench serve --against` see a slowdown of 5 %, and leave an identical run alone?

    python -m benchmarks.bench_gate [--trials 20] [--stretch 1.05] [--repeats 40] [--url URL] [--kinds live,stored]

Every trial measures a server through a proxy that stretches time by --stretch (the slow run) or not at all (the
identical one), against the same server through a second proxy that does not. `live`: the two take turns, round by round
(`--against URL`). `stored`: the unstretched one is measured first and stored (`--against FILE`). Without --url the server is
one that streams on schedule, so that the only noise is the machine's; with it, the server at that address.

Prints one JSON document: how many slow runs were called slower, and how many identical ones were not.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import psutil

from benchmarks.bench_gate_servers import proxy, steady_server
from q38.measure.bench.compare import SLOWER
from q38.measure.bench.plan import Plan
from q38.measure.bench.run import bench_serve


def live(plan: Plan, new: str, old: str) -> dict[str, Any]:
    """The comparison of one trial, in turns."""
    comparison: dict[str, Any] = bench_serve(new, plan, against=old)["comparison"]
    return comparison


def stored(plan: Plan, new: str, old: str) -> dict[str, Any]:
    """The comparison of one trial, one run after the other."""
    comparison: dict[str, Any] = bench_serve(new, plan, against=bench_serve(old, plan))["comparison"]
    return comparison


KINDS: dict[str, Callable[[Plan, str, str], dict[str, Any]]] = {"live": live, "stored": stored}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--stretch", type=float, default=1.05)
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--max-tokens", type=int, default=20)
    parser.add_argument("--depth", type=int, default=128)
    parser.add_argument("--url")
    parser.add_argument("--first-ms", type=float, default=100.0)
    parser.add_argument("--between-ms", type=float, default=20.0)
    parser.add_argument("--kinds", default="live,stored")
    args = parser.parse_args()
    plan = Plan((args.depth,), prefixes=("cold",), max_tokens=args.max_tokens, repeats=args.repeats)
    result: dict[str, Any] = {"stretch": args.stretch, "repeats": args.repeats, "trials": args.trials}
    loads = [psutil.getloadavg()[0]]
    with ExitStack() as stack:
        server = args.url or stack.enter_context(steady_server(args.first_ms / 1000, args.between_ms / 1000))
        old, same, slow = (
            stack.enter_context(proxy(server, stretch=stretch)) for stretch in (1.0, 1.0, args.stretch)
        )
        for kind in args.kinds.split(","):
            begun = time.monotonic()
            found: dict[str, list[dict[str, Any]]] = {"slow": [], "identical": []}
            for _ in range(args.trials):
                for name, new in (("slow", slow), ("identical", same)):
                    found[name].append(KINDS[kind](plan, new, old))
                    loads.append(psutil.getloadavg()[0])
            result[kind] = {
                "slow called slower": sum(c["verdict"] == SLOWER for c in found["slow"]),
                "identical not called slower": sum(c["verdict"] != SLOWER for c in found["identical"]),
                "ratios": {name: spread(comparisons) for name, comparisons in found.items()},
                "misjudged": [
                    (name, trial, c["rows"])
                    for name, comparisons in found.items()
                    for trial, c in enumerate(comparisons)
                    if (c["verdict"] == SLOWER) != (name == "slow")
                ],
                "seconds": round(time.monotonic() - begun, 1),
            }
    result["load"] = {"least": min(loads), "most": max(loads)}
    sys.stdout.write(json.dumps(result, indent=1) + "\n")


def spread(comparisons: list[dict[str, Any]]) -> dict[str, list[float]]:
    """Speed -> smallest and largest ratio over the trials, and the widest interval's width."""
    rows: dict[str, list[dict[str, Any]]] = {}
    for comparison in comparisons:
        for row in comparison["rows"]:
            rows.setdefault(row["speed"], []).append(row)
    return {
        speed: [
            round(x, 4)
            for x in (
                min(r["ratio"] for r in of),
                max(r["ratio"] for r in of),
                max(r["high"] - r["low"] for r in of),
            )
        ]
        for speed, of in rows.items()
    }


if __name__ == "__main__":
    main()
