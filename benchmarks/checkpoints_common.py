"""What the checkpoint benchmarks share: a child process measured by the kernel, the page cache, the machine in words."""

from __future__ import annotations

import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

MB = 10**6
CORES = len(os.sched_getaffinity(0))
ROOT = Path(__file__).resolve().parents[1]
CONFIG = ROOT / "assets/models/qwen3.8-flash-next.json"


@dataclass(frozen=True)
class Run:
    """One child process. `said` is the JSON on its last line of output, if it printed one."""

    seconds: float
    cpu_seconds: float
    peak_bytes: int  # resident memory, of the largest process it waited for
    others: float  # share of all cores that other processes and the kernel's own threads took
    said: dict[str, Any]

    @property
    def work_seconds(self) -> float:
        """What the child says it took, without its start; the whole time where it says nothing."""
        return float(self.said.get("seconds", self.seconds))


def run(command: Sequence[str | Path]) -> Run:
    """Run to the end; a failure ends the benchmark."""
    start, busy = time.perf_counter(), _busy_seconds()
    process = subprocess.Popen([str(part) for part in command], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    lines = process.stdout.read().splitlines()
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - start
    cpu = usage.ru_utime + usage.ru_stime
    others = (_busy_seconds() - busy - cpu) / (seconds * CORES)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{command[0]} ended with {process.returncode}")
    said = json.loads(lines[-1]) if lines and lines[-1].startswith("{") else {}
    return Run(seconds, cpu, usage.ru_maxrss * 1024, others, said)


def alternate(
    commands: Mapping[str, Sequence[str | Path]], prepare: Callable[[], None], repeats: int, patience: float
) -> dict[str, list[Run]]:
    """Run the commands in turns until each has `repeats` runs in which others took less than a sixth of the cores.

    After `patience` seconds the undisturbed runs that there are must do; a command without any keeps its
    disturbed ones (`Run.others` shows it).
    """
    runs: dict[str, list[Run]] = {name: [] for name in commands}
    disturbed: dict[str, list[Run]] = {name: [] for name in commands}
    end = time.monotonic() + patience
    while min(map(len, runs.values())) < repeats and (time.monotonic() < end or not all(disturbed.values())):
        for name, command in commands.items():
            prepare()
            _wait_until_idle(end)
            found = run(command)
            (runs if found.others < 1 / 6 else disturbed)[name].append(found)
        if time.monotonic() > end and all(runs[name] or disturbed[name] for name in commands):
            break
    return {name: runs[name] or disturbed[name] for name in commands}


def _wait_until_idle(end: float) -> None:
    """Until all cores have been nearly idle for a second."""
    while time.monotonic() < end:
        busy = _busy_seconds()
        time.sleep(1)
        if _busy_seconds() - busy < 0.1 * CORES:
            return


def _busy_seconds() -> float:
    """CPU seconds of the whole machine since it started, waiting for disks not counted."""
    user, nice, system, _, _, irq, softirq = map(int, Path("/proc/stat").read_text().split()[1:8])
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def copy_command(source: Path, out: Path) -> list[str]:
    """`cp` of every file of a directory, then fsync of each copy and of the directory."""
    script = 'mkdir "$2" && cp --reflink=never --sparse=never "$1"/* "$2" && sync "$2"/* "$2"'
    return ["sh", "-c", script, "sh", str(source), str(out)]


def settle(source: Path, *, cold: bool) -> None:
    """Before each run: write back what earlier runs left, and read the source from disk (cold) or memory."""
    os.sync()
    for file in source.iterdir():
        with file.open("rb", buffering=0) as f:
            if cold:
                os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            else:
                while f.read(4 * 2**20):
                    pass


def child(script: str, *arguments: str | Path) -> list[str]:
    """This interpreter on a benchmark's own `--child` entry."""
    return [sys.executable, script, "--child", *map(str, arguments)]


def remove(path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True)


def median(values: Iterable[float]) -> float:
    return statistics.median(list(values))


def span(values: Iterable[float], digits: int = 0) -> str:
    ordered = sorted(values)
    return f"{ordered[0]:,.{digits}f}-{ordered[-1]:,.{digits}f}"


def bf16_noise(rng: np.random.Generator, count: int) -> NDArray[np.uint16]:
    """Normal values of standard deviation 0.02 as bf16 patterns: uint16 [count]."""
    values = rng.standard_normal(count, np.float32) * np.float32(0.02)
    return (values.view(np.uint32) >> 16).astype(np.uint16)


def machine(directory: Path) -> str:
    """Processor, cores, memory and disk space, on one line."""
    text = Path("/proc/cpuinfo").read_text()
    model = next((line.split(":")[1].strip() for line in text.splitlines() if "model name" in line), "?")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    kind = subprocess.run(["stat", "-f", "-c", "%T", str(directory)], capture_output=True, text=True)
    return (
        f"{model}, {CORES} cores, {memory / 2**30:.0f} GiB, {kind.stdout.strip()}, "
        f"Linux {platform.release()}, Python {platform.python_version()}, load {os.getloadavg()[0]:.1f}"
    )
