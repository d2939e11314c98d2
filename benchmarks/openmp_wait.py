"""How OpenMP's waiting policy fares when several processes share the cores.

    python benchmarks/openmp_wait.py MODEL [--processes 3] [--tokens 8]

Starts the given number of processes at once, each generating tokens with MODEL (a tiny checkpoint) on all cores, once with
spinning and once with sleeping threads, and prints the median seconds per process as JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys

GENERATE = """
import sys, time
from pathlib import Path
import torch
from q38.hf.load import load_model
model = load_model(Path(sys.argv[1]))
ids = torch.arange(16)[None]
model.generate(ids, max_new_tokens=1, do_sample=False)
print("ready", flush=True)
sys.stdin.readline()
start = time.perf_counter()
model.generate(ids, max_new_tokens=int(sys.argv[2]), min_new_tokens=int(sys.argv[2]), do_sample=False)
print(time.perf_counter() - start, flush=True)
"""


def measure(model: str, tokens: int, processes: int, policy: str) -> float:
    """Median seconds of `processes` simultaneous generations."""
    env = {**os.environ, "OMP_WAIT_POLICY": policy, "OMP_NUM_THREADS": str(len(os.sched_getaffinity(0)))}
    command = [sys.executable, "-c", GENERATE, model, str(tokens)]
    running = [
        subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(processes)
    ]
    for child in running:
        assert child.stdout and child.stdout.readline().strip() == "ready"
    for child in running:
        assert child.stdin
        child.stdin.write("\n")
        child.stdin.flush()
    seconds = [float(child.communicate()[0]) for child in running]
    return statistics.median(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--processes", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=8)
    args = parser.parse_args()
    result = {
        policy: measure(args.model, args.tokens, args.processes, policy) for policy in ("ACTIVE", "PASSIVE")
    }
    sys.stdout.write(
        json.dumps({"processes": args.processes, "tokens": args.tokens, "seconds": result}) + "\n"
    )


if __name__ == "__main__":
    main()
