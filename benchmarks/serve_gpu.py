"""A server on a GPU: speed, hit rate, bytes over the link, and what it survives. The figures of docs/performance.md.

    q38 synth full DIR --gpu-scale
    PYTHONPATH=. python -m benchmarks.serve_gpu DIR --hold 23.9GiB --out result.json --ram 28GiB
    CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=50 PYTHONPATH=. python -m benchmarks.serve_gpu DIR --hold 23.9GiB --ram 28GiB
    PYTHONPATH=. python -m benchmarks.serve_gpu DIR --hold 23.9GiB --ram 28GiB --parts following --without-profile
    PYTHONPATH=. python -m benchmarks.serve_gpu DIR --quick --device cpu --context 1024        # a tiny model, without a GPU

Options that are none of these go to `q38 serve`. --hold takes device memory in a second process until only so much is
free, as on a smaller card. Prompts are random token ids, no two alike; every figure is the median of --repeats. A part
that fails is recorded and the next one runs; --out is written after every result.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from pathlib import Path

from benchmarks import serve_parts  # noqa: F401  registers the parts
from benchmarks.serve_session import Measured, Run, held, limit, part, parts, prompt
from q38.base.units import parse_bytes

__all__ = ["Measured", "Run", "held", "limit", "part", "parts", "prompt"]

PARTS = "products,load,speed,profile,abandoned,burst,malformed,too_long,killed,scheduler_killed"


def numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--hold", help="leave only so much device memory free")
    parser.add_argument("--parts", default=PARTS, help=f"which, in order; known: {', '.join(parts)}")
    parser.add_argument("--contexts", type=numbers, default=[128, 2000, 10000, 100000])
    parser.add_argument("--profile-contexts", type=numbers, default=[2000])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=96, help="decoded for one figure")
    parser.add_argument(
        "--warm", type=int, default=20000, help="longest prompt that gets an uncounted first run"
    )
    parser.add_argument("--windows", type=int, default=24, help="answers of the part following")
    parser.add_argument("--window", type=int, default=256, help="tokens of each")
    parser.add_argument(
        "--without-profile", action="store_true", help="leave out the model's routing profile"
    )
    parser.add_argument("--cancels", type=int, default=100)
    parser.add_argument(
        "--stall", type=float, default=240, help="seconds without a byte after which a request fails"
    )
    parser.add_argument("--part-limit", type=float, default=400, help="seconds for one part")
    parser.add_argument(
        "--deadline", type=float, default=float("inf"), help="seconds after which no part starts"
    )
    parser.add_argument("--quick", action="store_true", help="short prompts and few of them")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--logs", type=Path, default=Path("serve-logs"))
    arguments, options = parser.parse_known_args()
    if arguments.quick:
        arguments.contexts, arguments.profile_contexts = [64, 300], [64]
        arguments.repeats, arguments.tokens, arguments.cancels = 1, 24, 5
        arguments.windows, arguments.window = 3, 24
    unknown = [name for name in arguments.parts.split(",") if name not in parts]
    if unknown:
        parser.error(f"no part {unknown[0]}; known: {', '.join(parts)}")
    profile = arguments.model / "routing-profile.safetensors"
    if profile.is_file() and "--profile" not in options and not arguments.without_profile:
        options += ["--profile", str(profile)]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that `finally` ends the server
    run = Run(arguments.model, options, arguments.logs, arguments.out, arguments)
    begun = time.monotonic()
    with held(parse_bytes(arguments.hold) if arguments.hold else None):
        try:
            for name in arguments.parts.split(","):
                measure(run, name, arguments.deadline - (time.monotonic() - begun))
        finally:
            run.record("stopped with exit code", run.stop())


def measure(run: Run, name: str, seconds_left: float) -> None:
    """Run one part within its time; what goes wrong is a result too."""
    if seconds_left <= 0:
        run.record(name, "not run: no time left")
        return
    begun = time.perf_counter()
    try:
        with limit(min(run.settings.part_limit, seconds_left)):
            parts[name](run)
    except Exception as error:  # noqa: BLE001  whatever it is, the next part is worth its time
        run.record(f"{name} failed", f"{type(error).__name__}: {error}"[:800])
    run.record(f"{name} took, s", round(time.perf_counter() - begun, 1))


if __name__ == "__main__":
    main()
