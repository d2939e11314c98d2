"""Residency policies on synthetic traces with the published skew: the table of docs/residency.md.

    python benchmarks/residency_policies.py [--resident 184] [--link 51GB] [--tokens 2496]
    python benchmarks/residency_policies.py --interval 8   # as often as q38 serve swaps
    python benchmarks/residency_policies.py --lengths      # what a longer profile is worth on tokens it has not seen
    python benchmarks/residency_policies.py --smoothing    # what a short profile gains by a long one of another workload

Sizes come from the model's config.json; traces are seeded, so the same command prints the same table.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np

from q38.base.units import parse_bytes
from q38.model.shape import ModelShape
from q38.residency.layout import ExpertLayout
from q38.residency.placement import coverage, equal_placement, marginal_placement
from q38.residency.profile import Profile, merge
from q38.residency.simulate import Settings, simulate
from q38.residency.smoothing import smoothed_rates
from q38.residency.synthetic import synthetic_trace
from q38.residency.trace import Trace

ROOT = Path(__file__).resolve().parents[1]


def coverage_by_length(sizes: dict[str, int], resident: int, tokens: int) -> None:
    """Coverage of equal S by profiles of half, one, two and three times `tokens`, on themselves and held out."""
    longest = 3 * tokens
    seen, unseen = synthetic_trace(2 * longest, **sizes).split(longest)
    tested = Profile.of_trace(unseen)
    out = sys.stdout
    out.write("| tokens of the profile | covered of itself | covered of the next tokens |\n|---|---|---|\n")
    for length in (tokens // 2, tokens, 2 * tokens, longest):
        profile = Profile.of_trace(seen.split(length)[0])
        mask = equal_placement(profile, resident)
        own, held_out = (coverage(mask, part).selections for part in (profile, tested))
        out.write(f"| {length:,} | {own:.3f} | {held_out:.3f} |\n")
    best = coverage(equal_placement(tested, resident), tested).selections
    out.write(f"| (the {longest:,} next tokens themselves) | {best:.3f} | |\n")


def smoothing_of_merged_profiles(sizes: dict[str, int], resident: int, tokens: int) -> None:
    """Coverage on unseen tokens of a workload, and of it and another in equal parts, by ways to use both profiles."""
    out = sys.stdout
    out.write(
        "| experts that differ | tokens | alone | merged by tokens | smoothed, 1 : 0 | merged 1 : 1 | smoothed 1 : 1 |\n"
        "|---|---|---|---|---|---|---|\n"
    )
    known, next_known = synthetic_trace(3 * tokens, **sizes, topic=0).split(2 * tokens)
    other = Profile.of_trace(known)
    slots = resident * sizes["layers"]
    for shift in (0.0, 0.2, 0.5):
        seen, unseen = synthetic_trace(2 * tokens, **sizes, topic=1, shift=shift).split(tokens)
        tested = Profile.of_trace(unseen)
        both = merge([tested, Profile.of_trace(next_known)])
        for length in (512, tokens // 2, tokens):
            own = Profile.of_trace(seen.split(length)[0])
            pair = [own, other]

            def smoothed(weights: list[float], pair: list[Profile] = pair) -> Profile:
                return replace(merge(pair, weights), rate=smoothed_rates(pair, weights))

            cases = (
                (own, tested), (merge(pair), tested), (smoothed([1, 0]), tested), (merge(pair, [1, 1]), both),
                (smoothed([1, 1]), both),
            )  # fmt: skip
            found = [coverage(marginal_placement(p, slots), on).selections for p, on in cases]
            out.write(f"| {shift:.0%} | {length:,} | " + " | ".join(f"{v:.4f}" for v in found) + " |\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", type=Path, default=ROOT / "assets/models/qwen3.8-flash-next.json")
    parser.add_argument("--resident", type=int, default=184)
    parser.add_argument("--link", default="51GB")
    parser.add_argument("--tokens", type=int, default=2496)
    parser.add_argument("--interval", type=int, default=Settings.interval, help="tokens between swaps")
    parser.add_argument("--lengths", action="store_true")
    parser.add_argument("--smoothing", action="store_true")
    arguments = parser.parse_args()
    shape = ModelShape.from_config(json.loads(arguments.config.read_text()))
    settings = Settings(
        arguments.resident,
        ExpertLayout.from_shape(shape).row_bytes,
        link_rate=parse_bytes(arguments.link),
        interval=arguments.interval,
    )
    sizes = {"layers": shape.num_layers, "experts": shape.num_experts, "top_k": shape.num_experts_per_tok}
    if arguments.lengths:
        coverage_by_length(sizes, arguments.resident, arguments.tokens)
        return
    if arguments.smoothing:
        smoothing_of_merged_profiles(sizes, arguments.resident, arguments.tokens)
        return
    n = arguments.tokens // 2

    def join(first: Trace, second: Trace) -> Trace:
        return Trace(np.concatenate([first.ids, second.ids]), None, first.experts)

    traces = {
        "steady": synthetic_trace(2 * n, **sizes),
        "layers differ": synthetic_trace(2 * n, **sizes, spread=0.5),
        "new topic, 20 % of experts": join(
            synthetic_trace(n, **sizes, topic=0), synthetic_trace(n, **sizes, topic=1, shift=0.2)
        ),
        "new topic, 50 % of experts": join(
            synthetic_trace(n, **sizes, topic=0), synthetic_trace(n, **sizes, topic=1, shift=0.5)
        ),
    }
    out = sys.stdout
    out.write("| trace | policy | hit rate | host MB/token | moved MB/token | predicted ms/token |\n")
    out.write("|---|---|---|---|---|---|\n")
    for name, trace in traces.items():
        for o in simulate(trace, settings):
            _, _, hit, _, host, moved, ms = o.row()
            out.write(f"| {name} | {o.policy} | {hit:.3f} | {host:.1f} | {moved:.1f} | {ms:.2f} |\n")


if __name__ == "__main__":
    main()
