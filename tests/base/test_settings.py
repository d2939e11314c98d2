"""The environment: read once, in one place."""

import os

import pytest

from q38.base import settings


def test_no_other_module_reads_the_environment() -> None:
    import re
    from pathlib import Path

    import q38

    root = Path(q38.__file__).parent
    readers = [
        str(f.relative_to(root))
        for f in root.rglob("*.py")
        if re.search(r"os\.(environ|getenv)\b", f.read_text("utf-8"))
    ]
    assert readers == ["base/settings.py"]


def test_threads_come_from_the_setting_then_from_the_affinity_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("Q38_THREADS", raising=False)
    assert settings.cpu_count() == len(os.sched_getaffinity(0))
    monkeypatch.setenv("Q38_THREADS", "3")
    assert settings.cpu_count() == 3
    monkeypatch.setenv("Q38_THREADS", "many")
    assert settings.cpu_count() == len(os.sched_getaffinity(0))


def test_openmp_threads_of_the_user_win(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("Q38_THREADS", "3")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert settings.omp_threads() == 3
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert settings.omp_threads() == 1


def test_the_parent_is_taken_once_and_not_handed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(settings.PARENT, "17")
    assert settings.take_parent() == 17
    assert settings.take_parent() == 0
    assert settings.PARENT not in settings.child_env()


def test_a_child_gets_our_environment_with_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("Q38_TEST_KEEP", "1")
    monkeypatch.setenv("Q38_TEST_DROP", "1")
    env = settings.child_env({"Q38_TEST_NEW": "2"}, drop=("Q38_TEST_DROP",))
    assert (env["Q38_TEST_KEEP"], env["Q38_TEST_NEW"]) == ("1", "2")
    assert "Q38_TEST_DROP" not in env
