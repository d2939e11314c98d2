"""The verbs that read a checkpoint, on the release's full size as sparse files: seconds and memory of each command.

    python benchmarks/checkpoints_full_size.py DIR [--repeats 3] [--requant]

Writes the three layouts (and the packed one as it is before requant-int8) with `q38 synth sparse`: true headers, holes for data,
about 4 GB on disk in all. Then runs each command, start of Python included. With --requant it also re-packs the full-size model once,
which writes 41 GB (most of them zeros, so its seconds mean nothing; its memory does).
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

from checkpoints_common import CONFIG, MB, ROOT, Run, machine, median, remove, run

Q38 = [sys.executable, "-m", "q38"]
RECIPE = ROOT / "recipes/quality-24gb.yaml"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", type=Path)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--requant", action="store_true")
    arguments = parser.parse_args()
    root = arguments.directory / "full_size"
    remove(root)
    root.mkdir(parents=True)
    try:
        recipe = root / "before.yaml"  # what q38 quantize writes: nothing at INT8 yet
        text, changed = re.subn(r"(?m)^(  groups:) .*$", r"\1 []", RECIPE.read_text())
        assert changed == 1, "one list of requant_int8 groups"
        recipe.write_text(text)
        for name, layout, extra in (
            ("bf16", "bf16", []),
            ("fp8", "fp8", []),
            ("quantized", "quantized", ["--recipe", RECIPE]),
            ("before", "quantized", ["--recipe", recipe]),
        ):
            run([*Q38, "synth", "sparse", root / name, "--layout", layout, *extra])
        pair = [root / "before", "-o", root / "out", "--source", root / "bf16", "--recipe", RECIPE]
        commands: dict[str, list[str | Path]] = {
            "inspect, bf16": ["inspect", root / "bf16"],
            "inspect, fp8": ["inspect", root / "fp8"],
            "inspect, quantized": ["inspect", root / "quantized"],
            "plan": ["plan", CONFIG, "--recipe", RECIPE],
            "split-ple --dry-run, fp8": ["split-ple", root / "fp8", "-o", root / "out", "--dry-run"],
            "requant-int8 --dry-run": ["requant-int8", *pair, "--dry-run"],
        }
        runs = {
            name: [run([*Q38, *command]) for _ in range(arguments.repeats)]
            for name, command in commands.items()
        }
        if arguments.requant:
            runs["requant-int8"] = [run([*Q38, "requant-int8", *pair])]
    finally:
        remove(root)
    write = sys.stdout.write
    write(
        f"{machine(arguments.directory)}\n| command | wall s, median | CPU s, median | peak RSS MB |\n|---|---|---|---|\n"
    )
    for name, found in runs.items():
        write(f"| {name} | {_row(found)} |\n")


def _row(runs: list[Run]) -> str:
    wall, cpu = median(r.seconds for r in runs), median(r.cpu_seconds for r in runs)
    return f"{wall:.1f} | {cpu:.1f} | {max(r.peak_bytes for r in runs) / MB:,.0f}"


if __name__ == "__main__":
    main()
