"""Every environment variable that q38 reads or sets. No other module touches `os.environ`."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

PARENT = "Q38_PARENT"
SGLANG = "Q38_SGLANG"


@dataclass(frozen=True)
class Settings:
    """Values read once from the environment.

    debug: print tracebacks (Q38_DEBUG).
    threads: CPU threads for tensor work, 0 = all cores this process may use (Q38_THREADS).
    api_key: key that the HTTP client sends to a server (Q38_API_KEY; never OPENAI_API_KEY, which belongs to another service).
    state_dir: PID files and logs of servers (Q38_STATE_DIR, then XDG_STATE_HOME/q38, then ~/.local/state/q38).
    cache_dir: compiled kernels, safe to delete (Q38_CACHE_DIR, then XDG_CACHE_HOME/q38, then ~/.cache/q38).
    sglang: options of q38's SGLang extension as JSON, set by `q38 serve` (Q38_SGLANG); empty leaves it inert.
    """

    debug: bool = False
    threads: int = 0
    api_key: str = "none"
    state_dir: Path = Path("~/.local/state/q38")
    cache_dir: Path = Path("~/.cache/q38")
    sglang: str = ""


def load() -> Settings:
    """Read the settings from the environment."""
    env = os.environ
    threads = env.get("Q38_THREADS", "0")
    state_home = Path(env.get("XDG_STATE_HOME") or "~/.local/state")
    cache_home = Path(env.get("XDG_CACHE_HOME") or "~/.cache")
    return Settings(
        debug=env.get("Q38_DEBUG", "") not in ("", "0"),
        threads=int(threads) if threads.isdigit() else 0,
        api_key=env.get("Q38_API_KEY") or "none",
        state_dir=Path(env.get("Q38_STATE_DIR") or state_home / "q38").expanduser(),
        cache_dir=Path(env.get("Q38_CACHE_DIR") or cache_home / "q38").expanduser(),
        sglang=env.get(SGLANG, ""),
    )


def cpu_count() -> int:
    """Cores this process may run on (the affinity mask, not the machine)."""
    return load().threads or len(os.sched_getaffinity(0))


def take_parent() -> int:
    """Process id of the `q38 run` that started this process (Q38_PARENT), 0 if none.

    Removed from the environment on reading: it must not reach our own children.
    """
    value = os.environ.pop(PARENT, "0")
    return int(value) if value.isdigit() else 0


def omp_threads() -> int:
    """Threads for OpenMP in a child process: OMP_NUM_THREADS where it is set, else `cpu_count()`."""
    value = os.environ.get("OMP_NUM_THREADS", "")
    return int(value) if value.isdigit() and value != "0" else cpu_count()


def calm_threads() -> None:
    """Let OpenMP threads sleep while they wait, unless the user chose otherwise. Call before torch is imported.

    Spinning threads of two processes on the same cores starve each other (docs/decisions.md).
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def export(variables: Mapping[str, str]) -> None:
    """Set variables for libraries imported later in this process (AutoRound's AR_*, OMP_NUM_THREADS)."""
    os.environ.update(variables)


@contextmanager
def exported(variables: Mapping[str, str]) -> Iterator[None]:
    """Set variables for the body and restore them after it."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def child_env(extra: Mapping[str, str] | None = None, *, drop: tuple[str, ...] = ()) -> dict[str, str]:
    """The environment for a child process: ours, less `drop`, plus `extra`."""
    env = {k: v for k, v in os.environ.items() if k not in drop}
    return {**env, **(extra or {})}


def cuda_home() -> Path | None:
    """Where the CUDA toolkit is said to be (CUDA_HOME, then CUDA_PATH)."""
    value = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    return Path(value) if value else None


def sglang_platform() -> str:
    """The out-of-tree platform that SGLang is told to use (SGLANG_PLATFORM); empty: its own choice."""
    return os.environ.get("SGLANG_PLATFORM", "")
