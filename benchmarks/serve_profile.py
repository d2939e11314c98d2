"""Kernels of a running server: a trace by torch's profiler, and a table of it.

    PYTHONPATH=. python -m benchmarks.serve_profile TRACE.json.gz --steps 8
    PYTHONPATH=. python -m benchmarks.serve_profile ALL_SMS.json.gz --steps 8 --against HALF_THE_SMS.json.gz

benchmarks/serve_gpu.py takes the traces. Kernels are counted under CUDA graphs too.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.serve_session import Measured, prompt

Events = Sequence[dict[str, Any]]
DECODE_STEPS = 8
_GAP_US = 100.0  # a longer one is between steps or the host's
# What a kernel belongs to, the first that matches its name.
GROUPS = (
    ("shared expert", r"gate_sigmoid_mul_add|act_and_mul"),
    ("hyper-connections", r"hc_|hyper|^mix_(down|up)|^boundary$|^gate_parts$|grouped_gemma"),
    ("experts", r"gate_up|moe_decode|_down|^down|grouped(?!_gemma)|moe_prefill|^pack|moe_sort|place_rows|sum_slots|fused_moe"),
    ("counting expert choices", r"count_experts|expert_count"),
    ("INT8 projections", r"gemv|int8|unpack_int8|_unpack"),
    ("recurrence and convolution", r"delta|gated|conv1d|recurrent|chunk_|solve_tril|l2norm|cumsum|wy_fast"),
    ("sparse attention", r"attn|attend_|merge_splits|attention|qsa|topk_512|fast_topk|indexer|flash|paged|clamp_position|kvcache|store_"),
    ("routing", r"topk|softmax|router|gate"),
    ("norms", r"norm"),
    ("dense products", r"gemm|cutlass|nvjet|cublas|splitk|sm90_|matmul|wgmma"),
    ("copies by kernels", r"memcpy|memset|copy"),
)  # fmt: skip


@dataclass(frozen=True)
class Profile:
    """Times in us, of all `steps` together.

    kernels: name -> (count, time); copies: the same of memory copies and fills. busy: some kernel ran. copying: a copy
    ran. both: one of the two. span: first kernel to last. gaps: pieces without a kernel, longest first. copied: bytes.
    """

    steps: int
    kernels: dict[str, tuple[int, float]]
    copies: dict[str, tuple[int, float]]
    busy: float
    copying: float
    both: float
    span: float
    gaps: list[float]
    copied: int


def profile_steps(
    measured: Measured, directory: Path, context: int, *, cpu: bool = False
) -> dict[str, Profile]:
    """Profile one prompt of `context` tokens and the decode steps after it: {"prefill": .., "decode": ..}.

    The prompt's profile counts the chunks that it took, DECODE_STEPS at most.

    Raises:
        RuntimeError: the server wrote no trace.
    """
    directory.mkdir(parents=True, exist_ok=True)
    before = set(directory.iterdir())
    request: dict[str, Any] = {
        "output_dir": str(directory),
        "num_steps": DECODE_STEPS,
        "profile_by_stage": True,
    }
    request |= {"activities": ["CPU" if cpu else "GPU"], "with_stack": False, "record_shapes": False}
    measured.http.post("/start_profile", json=request).raise_for_status()
    # Recording begins with the first step and is written at the first step beyond.
    measured.stream(prompt(context), DECODE_STEPS + 6)
    found: dict[str, Profile] = {}
    deadline = time.monotonic() + 60
    while len(found) < 2 and time.monotonic() < deadline:
        for file in set(directory.iterdir()) - before:
            step = "decode" if "DECODE" in file.name else "prefill"
            try:
                found[step] = read_trace(file, DECODE_STEPS if step == "decode" else 1)
            except (EOFError, ValueError, OSError):
                time.sleep(0.5)  # still being written
        time.sleep(0.2)
    if not found:
        raise RuntimeError(f"no trace in {directory}")
    return found


def read_trace(file: Path, steps: int) -> Profile:
    """A chrome trace of torch's profiler; operators of the CPU where it holds no kernel."""
    text = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
    events: list[dict[str, Any]] = json.loads(text)["traceEvents"]
    timed = [event for event in events if event.get("ph") == "X" and "dur" in event]
    kernels = [e for e in timed if e.get("cat") == "kernel"]
    copies = [e for e in timed if e.get("cat") in ("gpu_memcpy", "gpu_memset")]
    return summarize(kernels or [e for e in timed if e.get("cat") == "cpu_op"], copies, steps)


def summarize(kernels: Events, copies: Events, steps: int) -> Profile:
    """Counts and times of events with `name`, `ts` and `dur` (us)."""
    busy, gaps, span = _union(kernels)
    return Profile(
        steps,
        _times(kernels),
        _times(copies),
        busy,
        _union(copies)[0],
        _union([*kernels, *copies])[0],
        span,
        sorted(gaps, reverse=True),
        sum(int(event.get("args", {}).get("bytes", 0)) for event in copies),
    )


def _times(events: Events) -> dict[str, tuple[int, float]]:
    durations: dict[str, list[float]] = defaultdict(list)
    for event in events:
        durations[event["name"]].append(event["dur"])
    return {name: (len(each), sum(each)) for name, each in durations.items()}


def _union(events: Events) -> tuple[float, list[float], float]:
    """Time in which some event ran, the pieces between, and first to last."""
    total, end, gaps, times = 0.0, None, [], sorted((float(e["ts"]), float(e["dur"])) for e in events)
    for start, duration in times:
        if end is not None and start > end:
            gaps.append(start - end)
        total += max(start + duration - max(start, end or start), 0.0)
        end = max(start + duration, end or 0.0)
    return total, gaps, 0.0 if end is None else end - times[0][0]


def table(profile: Profile, *, most: int = 40) -> str:
    """Text: groups, then kernels by time, then gaps; all per step."""
    steps = profile.steps
    groups: dict[str, list[float]] = defaultdict(lambda: [0, 0.0])
    for name, (count, time_us) in profile.kernels.items():
        total = groups[group_of(name)]
        total[0] += count
        total[1] += time_us
    count = sum(count for count, _ in profile.kernels.values())
    lines = [
        f"{steps} steps; per step: {count / steps:.0f} kernels, busy {profile.busy / steps / 1e3:.3f} ms "
        f"of {profile.span / steps / 1e3:.3f} ms",
        "", "| group | count | ms |", "|---|---|---|",
    ]  # fmt: skip
    for name, (number, time_us) in sorted(groups.items(), key=lambda item: -item[1][1]):
        lines.append(f"| {name} | {number / steps:.1f} | {time_us / steps / 1e3:.3f} |")
    lines += ["", "| kernel | group | count | us | us each |", "|---|---|---|---|---|"]
    ranked = sorted(profile.kernels.items(), key=lambda item: -item[1][1])
    for name, (number, time_us) in ranked[:most]:
        lines.append(
            f"| {short(name)} | {group_of(name)} | {number / steps:.1f} | {time_us / steps:.1f} | {time_us / number:.2f} |"
        )
    rest = sum(time_us for _, (_, time_us) in ranked[most:])
    lines.append(f"| {len(ranked[most:])} others | | | {rest / steps:.1f} | |")
    long = [gap for gap in profile.gaps if gap > _GAP_US]
    small = sum(profile.gaps) - sum(long)
    lines += [
        "",
        f"no kernel, per step: {sum(long) / steps:.0f} us in {len(long) / steps:.1f} gaps over {_GAP_US:.0f} us, "
        f"{small / steps:.0f} us in {(len(profile.gaps) - len(long)) / steps:.0f} shorter ones",
        f"copies, per step: {profile.copying / steps:.0f} us, {profile.copied / steps / 1e6:.2f} MB, "
        f"of these {(profile.both - profile.busy) / steps:.0f} us while no kernel ran",
    ]
    for name, (number, time_us) in sorted(profile.copies.items(), key=lambda item: -item[1][1]):
        lines.append(f"  {name}: {number / steps:.1f} times, {time_us / steps:.1f} us")
    return "\n".join(lines) + "\n"


def comparison(profile: Profile, other: Profile) -> str:
    """Text: time of each group and kernel in both, ms and us per step, and how many times longer the second took.

    With half of the SMs and the same memory and link, a kernel whose time doubles waits for its own instructions, one
    whose time stays for bytes or for latency.
    """
    lines = ["| group | ms | other, ms | times |", "|---|---|---|---|"]
    totals = [_by(each, group_of) for each in (profile, other)]
    for name in sorted(totals[0], key=lambda name: -totals[0][name]):
        lines.append(_ratio(name, totals[0][name] / 1e3, totals[1].get(name, 0.0) / 1e3))
    lines += ["", "| kernel | us | other, us | times |", "|---|---|---|---|"]
    kernels = [_by(each, short) for each in (profile, other)]
    for name in sorted(kernels[0], key=lambda name: -kernels[0][name])[:40]:
        lines.append(_ratio(name, kernels[0][name], kernels[1].get(name, 0.0)))
    return "\n".join(lines) + "\n"


def _by(profile: Profile, label: Callable[[str], str]) -> dict[str, float]:
    """Time per step of the kernels with the same label, us."""
    times: dict[str, float] = defaultdict(float)
    for name, (_, time_us) in profile.kernels.items():
        times[label(name)] += time_us / profile.steps
    return times


def _ratio(name: str, first: float, second: float) -> str:
    return (
        f"| {name} | {first:.3f} | {second:.3f} | {second / first:.2f} |"
        if first
        else f"| {name} | 0 | {second:.3f} | |"
    )


def group_of(name: str) -> str:
    """The group of a kernel."""
    return next((group for group, pattern in GROUPS if re.search(pattern, name, re.IGNORECASE)), "other")


def short(name: str) -> str:
    """A kernel's name without its return type and arguments, for a table."""
    plain = re.sub(r"^void ", "", name).split("(")[0] or name
    return plain.replace("|", " ")[:90]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("trace", type=Path, nargs="+")
    parser.add_argument("--steps", type=int, default=1, help="steps that a trace covers")
    parser.add_argument("--against", type=Path, help="the same steps with another share of the SMs")
    arguments = parser.parse_args()
    for file in arguments.trace:
        profile = read_trace(file, arguments.steps)
        sys.stdout.write(table(profile))
        if arguments.against:
            sys.stdout.write("\n" + comparison(profile, read_trace(arguments.against, arguments.steps)))


if __name__ == "__main__":
    main()
