"""q38's extension of an installed SGLang: checked, switched, exported, applied. One function per action."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from q38.base import settings
from q38.base.errors import ResourceError
from q38.base.files import begins_with, holds
from q38.checkpoint.writer import atomic_file, writing
from q38.serving.machine import has_cuda_gpu
from q38.sglang_ext import patch_tree
from q38.sglang_ext.options import marker
from q38.sglang_ext.patch_edits import unified_diff
from q38.sglang_ext.source import release

if TYPE_CHECKING:
    from q38.sglang_ext.check import CheckReport

_VERIFY_TIMEOUT_S = 300.0
_MARK = "q38 patch-sglang export-patch: SGLang "  # first words of a patch, which patch and git apply skip


def check(tree: Path | None = None) -> CheckReport:
    """What each mechanism is in an SGLang tree; see q38.sglang_ext.check."""
    from q38.sglang_ext.check import check as examine

    return examine(patch_tree.find_tree(tree))


def set_enabled(on: bool, *, dry_run: bool = False) -> dict[str, Any]:
    """Let every SGLang process of this Python environment load the extension, or no longer.

    Returns the file that says so, and whether it changed.

    Raises:
        ResourceError: SGLang is not installed. InputError: the environment is read-only.
    """
    patch_tree.find_tree(None)
    file = marker()
    changed = file.is_file() != on
    if changed and not dry_run:
        with writing(file):
            if on:
                file.parent.mkdir(parents=True, exist_ok=True)
                file.touch()
            else:
                file.unlink()
    return {"file": str(file), "enabled": on, "changed": changed}


def verify() -> dict[str, Any]:
    """Load SGLang with the extension in a child process and check every hook.

    Raises:
        ResourceError: SGLang is not installed, or the child does not end.
        CheckFailed: a target or a hook is not as it should be.
    """
    from q38.sglang_ext.verify import child_environment, read_answer

    patch_tree.find_tree(None)
    try:
        child = subprocess.run(
            [sys.executable, "-m", "q38.sglang_ext.verify"],
            env=settings.child_env(child_environment(gpu=has_cuda_gpu())),
            capture_output=True,
            text=True,
            timeout=_VERIFY_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        raise ResourceError(f"SGLang did not load in {_VERIFY_TIMEOUT_S:.0f} s", where="sglang") from None
    return read_answer(child.returncode, child.stdout, child.stderr)


def export_patch(out: Path, *, dry_run: bool = False) -> dict[str, Any]:
    """Write the edits as a unified diff against the installed release.

    Raises:
        CheckFailed: unknown release, or edited files. InputError: already patched, or `out` is no such patch.
    """
    tree = patch_tree.find_tree(None)
    holds(out, "patch of q38 patch-sglang", begins_with(_MARK))
    files = patch_tree.apply(tree, dry_run=True, writable=False)
    text = unified_diff(tree)
    if not dry_run:
        with atomic_file(out) as f:
            f.write(f"{_MARK}{release(tree)}\n{text}".encode())
    changed = [str(file.relative_to(tree)) for file in files]
    return {"file": str(out), "files": changed, "lines": text.count("\n")}


def apply(tree: Path | None = None, *, dry_run: bool = False) -> dict[str, Any]:
    """Put the edits into an SGLang tree; see q38.sglang_ext.patch_tree.apply."""
    found = patch_tree.find_tree(tree)
    return {"tree": str(found), "files": [str(f) for f in patch_tree.apply(found, dry_run=dry_run)]}


def revert(tree: Path | None = None, *, dry_run: bool = False) -> dict[str, Any]:
    """Take the edits out; see q38.sglang_ext.patch_tree.revert."""
    found = patch_tree.find_tree(tree)
    return {"tree": str(found), "files": [str(f) for f in patch_tree.revert(found, dry_run=dry_run)]}
