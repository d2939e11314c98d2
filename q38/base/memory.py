"""Host memory that this process can still take, may lock, and has taken."""

from __future__ import annotations

import re
import resource
from contextlib import suppress
from pathlib import Path

import psutil

CGROUP = Path("/sys/fs/cgroup")
_CAP_IPC_LOCK = 14  # linux/capability.h: exempt from RLIMIT_MEMLOCK


def available_memory() -> int:
    """Bytes a new allocation can use: MemAvailable, or the room under the cgroup's limit where that is smaller."""
    available: int = psutil.virtual_memory().available
    limit, used = cgroup_memory()
    return available if limit is None else min(available, limit - used)


def memlock_limit() -> int | None:
    """Bytes this process may lock (the soft limit); None where there is no limit or it is exempt."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY or _may_lock_freely() else soft


def cgroup_memory(root: Path = CGROUP) -> tuple[int | None, int]:
    """(limit, used) in bytes of the tightest cgroup (v1 or v2) this process sits in; no limit = (None, 0).

    Used counts without the page cache that the kernel can drop (inactive_file).
    """
    tightest: tuple[int | None, int] = (None, 0)
    for directory in _cgroup_directories(root):
        for limit_name, used_name in (
            ("memory.max", "memory.current"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        ):
            limit, used = _number(directory / limit_name), _number(directory / used_name)
            # v1 writes "no limit" as the largest page-aligned int64.
            if limit is None or used is None or limit >= 2**60:
                continue
            used = max(used - _inactive_file(directory), 0)
            if tightest[0] is None or limit - used < tightest[0] - tightest[1]:
                tightest = (limit, used)
    return tightest


def resident_memory() -> int:
    """Bytes of this process in memory now."""
    return _status("VmRSS")


def reset_peak() -> None:
    """Begin to measure the peak anew; where the system forbids that, it counts from the start of the process."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_memory() -> int:
    """The most bytes of this process in memory since `reset_peak`."""
    return _status("VmHWM")


def _may_lock_freely() -> bool:
    try:
        text = Path("/proc/self/status").read_text()
    except OSError:
        return False
    match = re.search(r"^CapEff:\s+([0-9a-f]+)$", text, re.MULTILINE)
    return bool(match) and bool(int(match[1], 16) >> _CAP_IPC_LOCK & 1)  # type: ignore[index]


def _cgroup_directories(root: Path) -> list[Path]:
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    directories = []
    for line in lines:
        _, controllers, group = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        base = root / controllers if controllers else root
        directory = base / group.lstrip("/")
        directories += [directory, *(p for p in directory.parents if p.is_relative_to(base))]
    return directories


def _inactive_file(directory: Path) -> int:
    try:
        text = (directory / "memory.stat").read_text()
    except OSError:
        return 0
    match = re.search(r"^(?:total_)?inactive_file (\d+)$", text, re.MULTILINE)
    return int(match[1]) if match else 0


def _number(file: Path) -> int | None:
    try:
        text = file.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _status(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    return 0
