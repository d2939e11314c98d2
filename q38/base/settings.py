"""Every environment variable that q38 reads or sets. No other module touches `os.environ`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Settings:
    """Values read once from the environment.

    debug: print tracebacks (Q38_DEBUG).
    threads: CPU threads for tensor work, 0 = all cores this process may use (Q38_THREADS).
    api_key: key that the HTTP client sends to a server (Q38_API_KEY, then OPENAI_API_KEY).
    """

    debug: bool = False
    threads: int = 0
    api_key: str = "none"


def load() -> Settings:
    """Read the settings from the environment."""
    env = os.environ
    threads = env.get("Q38_THREADS", "0")
    return Settings(
        debug=env.get("Q38_DEBUG", "") not in ("", "0"),
        threads=int(threads) if threads.isdigit() else 0,
        api_key=env.get("Q38_API_KEY") or env.get("OPENAI_API_KEY") or "none",
    )


def cpu_count() -> int:
    """Cores this process may run on (the affinity mask, not the machine)."""
    return load().threads or len(os.sched_getaffinity(0))


def export(variables: Mapping[str, str]) -> None:
    """Set variables for libraries imported later in this process (AutoRound's AR_*, OMP_NUM_THREADS)."""
    os.environ.update(variables)


def child_env(extra: Mapping[str, str] | None = None, *, drop: tuple[str, ...] = ()) -> dict[str, str]:
    """The environment for a child process: ours, less `drop`, plus `extra`."""
    env = {k: v for k, v in os.environ.items() if k not in drop}
    return {**env, **(extra or {})}
