"""Turn the extension on in one SGLang process: check the release, apply the hooks, verify them."""

from __future__ import annotations

import importlib
import multiprocessing
import sys
from collections.abc import Sequence, Set
from pathlib import Path

from q38.base.errors import CheckFailed
from q38.sglang_ext import manifest
from q38.sglang_ext.hooks import Hook, apply, exit_on_refusal
from q38.sglang_ext.patch_edits import EDITS
from q38.sglang_ext.patch_tree import patched_mechanisms
from q38.sglang_ext.source import installed_tree, module_file
from q38.sglang_ext.targets import MECHANISMS, all_targets

# Each has a function hooks(). The first list is for every process, the second for the one that runs the model.
EVERYWHERE = ("vision", "token_ids")
ENGINE = (
    "packed",
    "quant_method",
    "weights",
    "ngram",
    "steps",
    "hyper_connections",
    "hyper_boundary",
    "hyper_mix",
    "gdn_snapshot",
    "graph_output",
    "rope",
    "fp8_clamp",
    "kv_format",
    "kv_reads",
    "kv_memory",
    "finite",
)
_SCHEDULER = "sglang.srt.managers.scheduler"


def activate_or_exit() -> None:
    """`activate`; a refusal ends the process."""
    with exit_on_refusal():
        activate(engine=runs_the_model())


def activate(*, engine: bool) -> list[Hook]:
    """Apply the hooks.

    Args:
        engine: this process runs the model; the others get the few hooks that they need.

    Raises:
        CheckFailed: unknown release, a target that is changed or missing, or a hook that did not take.
    """
    tree = installed_tree()
    in_tree = patched_mechanisms(tree)
    check_targets(tree, in_tree)
    hooks = [
        h for h in collect(EVERYWHERE + (ENGINE if engine else ())) if _mechanism(h.target) not in in_tree
    ]
    apply(hooks)
    return hooks


def check_targets(tree: Path, in_tree: Set[str] = frozenset()) -> None:
    """Compare an SGLang with the manifest of its release.

    Args:
        in_tree: mechanisms that `patch-sglang apply` has put into the tree; their files have hashes of their own.

    Raises:
        CheckFailed: it differs; the message lists every target.
    """
    edited = {tree / edit.file for edit in EDITS if edit.mechanism in in_tree}
    targets = [t for t in all_targets() if (found := module_file(tree, t)) is None or found[0] not in edited]
    mismatches = manifest.compare(tree, targets)
    if mismatches:
        raise CheckFailed(
            f"{len(mismatches)} of q38's targets are not those of the release: {', '.join(map(str, mismatches))}",
            where="sglang",
            remedy="install the release again, or remove what was changed in it",
        )


def collect(modules: Sequence[str]) -> list[Hook]:
    """The hooks of some modules of this folder. Each must belong to a mechanism of `targets`."""
    hooks = [hook for name in modules for hook in importlib.import_module(f"q38.sglang_ext.{name}").hooks()]
    declared = {target for mechanism in MECHANISMS for target in mechanism.hooked}
    stray = [hook.target for hook in hooks if hook.target not in declared]
    if stray:
        raise CheckFailed(f"hooks without a hash in the manifest: {', '.join(stray)}", where="q38.sglang_ext")
    return hooks


def _mechanism(target: str) -> str:
    return next(m.name for m in MECHANISMS if target in m.hooked)


def runs_the_model() -> bool:
    """Whether this process runs (or may run) the model: SGLang's scheduler, a child that has its module."""
    return multiprocessing.parent_process() is not None and _SCHEDULER in sys.modules
