"""patch-sglang apply and revert: byte for byte, resumable, and refused with the reason."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
from itertools import combinations
from pathlib import Path

import pytest

from q38.base.errors import CheckFailed, InputError, ResourceError
from q38.sglang_ext import patch_tree
from q38.sglang_ext.activate import check_targets
from q38.sglang_ext.check import check
from q38.sglang_ext.patch_edits import EDITS, unified_diff
from q38.sglang_ext.source import _parsed, release
from q38.sglang_ext.targets import EDITED_FILES


def content(tree: Path) -> dict[str, bytes]:
    return {str(f.relative_to(tree)): f.read_bytes() for f in sorted(tree.rglob("*")) if f.is_file()}


@pytest.fixture(autouse=True)
def forget_sources() -> None:
    _parsed.cache_clear()


def test_revert_restores_every_byte_and_leaves_nothing(tree: Path) -> None:
    before = content(tree)
    assert [f.relative_to(tree).as_posix() for f in patch_tree.apply(tree)] == list(EDITED_FILES)
    changed = {name for name, data in content(tree).items() if before.get(name) != data}
    assert set(EDITED_FILES) <= changed
    patch_tree.revert(tree)
    assert content(tree) == before
    assert not (tree / patch_tree.BACKUP).exists()


def test_patched_files_are_python_and_keep_their_mode(tree: Path) -> None:
    (tree / EDITED_FILES[0]).chmod(0o640)
    patch_tree.apply(tree)
    for name in EDITED_FILES:
        ast.parse((tree / name).read_text())
    assert (tree / EDITED_FILES[0]).stat().st_mode & 0o777 == 0o640


def test_a_patched_tree_passes_the_plugins_check_and_says_so(tree: Path) -> None:
    states = {s.mechanism: s.state for s in check(tree).mechanisms}
    assert set(states.values()) == {"plugin"}
    patch_tree.apply(tree)
    _parsed.cache_clear()
    states = {s.mechanism: s.state for s in check(tree).mechanisms}
    assert {name for name, state in states.items() if state == "patched"} == {e.mechanism for e in EDITS}
    assert "unsupported" not in states.values()
    check_targets(tree, patch_tree.patched_mechanisms(tree))
    with pytest.raises(CheckFailed):
        check_targets(tree)  # not without knowing that the edits are q38's


def test_the_exported_diff_makes_the_same_files(tree: Path, tmp_path: Path) -> None:
    copy = tmp_path / "checkout"
    shutil.copytree(tree, copy)
    (tmp_path / "x.diff").write_text(unified_diff(tree))
    subprocess.run(["git", "apply", str(tmp_path / "x.diff")], cwd=copy, check=True)
    patch_tree.apply(tree)
    for name in EDITED_FILES:
        assert (copy / name).read_bytes() == (tree / name).read_bytes()


def test_a_second_apply_is_refused_and_changes_nothing(tree: Path) -> None:
    patch_tree.apply(tree)
    before = content(tree)
    with pytest.raises(InputError, match="already patched"):
        patch_tree.apply(tree)
    assert content(tree) == before


def test_revert_without_apply_is_refused(tree: Path) -> None:
    with pytest.raises(InputError, match="not patched"):
        patch_tree.revert(tree)


@pytest.mark.parametrize("action", [patch_tree.apply, patch_tree.revert])
def test_a_dry_run_changes_nothing(tree: Path, action: object) -> None:
    if action is patch_tree.revert:
        patch_tree.apply(tree)
    before = content(tree)
    assert len(action(tree, dry_run=True)) == len(EDITED_FILES)  # type: ignore[operator]
    assert content(tree) == before


DONE = [set(some) for n in range(4) for some in combinations(range(3), n)]


@pytest.mark.parametrize("done", DONE)
def test_a_killed_apply_goes_on_or_goes_back(
    tree: Path, done: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever files were renamed when it was killed."""
    before = content(tree)
    real = patch_tree._replace

    def stop(path: Path, data: bytes) -> None:
        index = next((i for i, f in enumerate(EDITED_FILES) if path == tree / f), None)
        if index is None or index in done:
            real(path, data)

    monkeypatch.setattr(patch_tree, "_replace", stop)
    patch_tree.apply(tree)
    monkeypatch.undo()
    copy = tree.parent / "copy"
    shutil.copytree(tree, copy)
    if len(done) < len(EDITED_FILES):
        patch_tree.apply(copy)
        assert {s.state for s in patch_tree.states(copy)} == {"patched"}
        patch_tree.revert(copy)
        assert content(copy) == before
    patch_tree.revert(tree)
    assert content(tree) == before


@pytest.mark.parametrize("name", EDITED_FILES)
def test_a_foreign_edit_is_refused_before_anything_is_written(tree: Path, name: str) -> None:
    (tree / name).write_text((tree / name).read_text() + "# mine\n")
    before = content(tree)
    with pytest.raises(CheckFailed, match=f"edited by someone else: {name}"):
        patch_tree.apply(tree)
    assert content(tree) == before


def test_an_edit_after_apply_keeps_revert_from_losing_it(tree: Path) -> None:
    patch_tree.apply(tree)
    file = tree / EDITED_FILES[1]
    file.write_text(file.read_text() + "# mine\n")
    before = content(tree)
    with pytest.raises(CheckFailed, match="edited by someone else"):
        patch_tree.revert(tree)
    assert content(tree) == before


def test_a_damaged_backup_is_refused_before_anything_is_restored(tree: Path) -> None:
    patch_tree.apply(tree)
    backup = tree / patch_tree.BACKUP / EDITED_FILES[2]
    backup.write_text("x")
    before = content(tree)
    with pytest.raises(CheckFailed, match="backup"):
        patch_tree.revert(tree)
    assert content(tree) == before


def test_an_unknown_release_is_refused(tree: Path) -> None:
    version = tree / "sglang" / "_version.py"
    version.write_text(version.read_text().replace(release(tree), "0.5.99"))
    with pytest.raises(CheckFailed, match=r"0\.5\.99"):
        patch_tree.apply(tree)


@pytest.mark.parametrize("action", ["apply", "revert"])
def test_a_read_only_tree_is_refused_with_the_reason(
    tree: Path, action: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if action == "revert":
        patch_tree.apply(tree)
    before = content(tree)
    # Root may write anywhere, so the answer of the file system is what is changed here.
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(ResourceError, match="read-only"):
        getattr(patch_tree, action)(tree)
    assert content(tree) == before


def test_the_package_is_found_from_the_tree_its_parent_or_a_checkout(tree: Path, tmp_path: Path) -> None:
    assert patch_tree.find_tree(tree) == tree
    assert patch_tree.find_tree(tree / "sglang") == tree
    (tmp_path / "checkout").mkdir()
    shutil.move(tree, tmp_path / "checkout" / "python")
    assert patch_tree.find_tree(tmp_path / "checkout") == tmp_path / "checkout" / "python"
    with pytest.raises(InputError, match="no sglang package"):
        patch_tree.find_tree(tmp_path / "nowhere")
