"""Host memory that a process can still take."""

from __future__ import annotations

import resource
from pathlib import Path

import psutil
import pytest

from q38.base import memory
from q38.base.memory import available_memory, cgroup_memory, memlock_limit


def write_cgroup(directory: Path, limit: str, used: int, inactive: int) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "memory.max").write_text(limit + "\n")
    (directory / "memory.current").write_text(f"{used}\n")
    (directory / "memory.stat").write_text(f"anon 5\ninactive_file {inactive}\n")


@pytest.fixture
def nested(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(memory, "_cgroup_directories", lambda root: [root / "a/b", root / "a", root])
    return tmp_path


def test_the_cgroup_with_the_least_room_counts_without_its_droppable_cache(nested: Path) -> None:
    write_cgroup(nested / "a/b", "5000", 1000, 0)
    write_cgroup(nested / "a", "3000", 2500, 900)
    write_cgroup(nested, "max", 9000, 0)
    assert cgroup_memory(nested) == (3000, 1600)


def test_without_a_limit_there_is_none(nested: Path) -> None:
    write_cgroup(nested, "max", 9000, 0)
    assert cgroup_memory(nested) == (None, 0)


def test_version_1_has_other_names_and_a_number_for_no_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "_cgroup_directories", lambda root: [root])
    (tmp_path / "memory.limit_in_bytes").write_text(f"{2**63 - 4096}\n")
    (tmp_path / "memory.usage_in_bytes").write_text("5\n")
    assert cgroup_memory(tmp_path) == (None, 0)
    (tmp_path / "memory.limit_in_bytes").write_text("900\n")
    (tmp_path / "memory.usage_in_bytes").write_text("300\n")
    assert cgroup_memory(tmp_path) == (900, 300)


@pytest.mark.parametrize(("limit", "expected"), [(10, 4), (2**50, None)])
def test_available_memory_is_the_smaller_of_the_machine_and_the_cgroup(
    monkeypatch: pytest.MonkeyPatch, limit: int, expected: int | None
) -> None:
    machine = psutil.virtual_memory().available
    monkeypatch.setattr(memory, "cgroup_memory", lambda: (limit, 6))
    found = available_memory()
    assert found == expected if expected else abs(found - machine) < machine / 2


@pytest.mark.parametrize(("free", "expected"), [(False, 4096), (True, None)])
def test_the_memlock_limit_does_not_bind_a_process_that_may_lock_freely(
    monkeypatch: pytest.MonkeyPatch, free: bool, expected: int | None
) -> None:
    monkeypatch.setattr(memory, "_may_lock_freely", lambda: free)
    monkeypatch.setattr(resource, "getrlimit", lambda which: (4096, 4096))
    assert memlock_limit() == expected


def test_an_infinite_limit_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_may_lock_freely", lambda: False)
    monkeypatch.setattr(resource, "getrlimit", lambda which: (resource.RLIM_INFINITY,) * 2)
    assert memlock_limit() is None
