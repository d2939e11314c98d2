"""What each mechanism of the extension is in an SGLang tree: native, plugin, patched or unsupported."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from q38.base.errors import CheckFailed
from q38.sglang_ext import manifest
from q38.sglang_ext.options import enabled
from q38.sglang_ext.patch_tree import patched_mechanisms
from q38.sglang_ext.source import digest, release, source_of
from q38.sglang_ext.targets import AUTOROUND, BREAKABLE, MECHANISMS, SERVER_ARGS, Mechanism

# Text in a target that says SGLang has the mechanism itself.
_NATIVE = {
    "packed-modules": (AUTOROUND + ".from_config", "packed_modules_mapping"),
    "language-model-only": (
        SERVER_ARGS + ".LANGUAGE_MODEL_ONLY_ARCHITECTURES",
        "Qwen4ExpForConditionalGeneration",
    ),
    "graph-output": (BREAKABLE + "._alloc_full_buffer", "LogitsProcessorOutput"),
}


@dataclass(frozen=True)
class Status:
    """One mechanism. `state` is native, plugin, patched or unsupported; `why` explains the last one."""

    mechanism: str
    summary: str
    state: str
    why: str = ""


@dataclass(frozen=True)
class CheckReport:
    """What was found. `known` are the releases that have a manifest; `plugins` all of SGLang's in this environment."""

    tree: str
    release: str
    known: list[str]
    enabled: bool
    plugins: list[str]
    mechanisms: list[Status]

    @property
    def fits(self) -> bool:
        """Whether every mechanism works with this release."""
        return all(s.state != "unsupported" for s in self.mechanisms)

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "fits": self.fits}


def check(tree: Path) -> CheckReport:
    """Compare a tree with the extension. Imports nothing of SGLang and needs no GPU.

    Raises:
        InputError: the tree holds no SGLang.
    """
    version, known = release(tree), manifest.known_releases()
    plugins = [entry.name for entry in metadata.entry_points(group="sglang.srt.plugins")]
    if version in known:
        hashes: dict[str, str] = manifest.load(version)["targets"]
        patched = patched_mechanisms(tree)
        found = [_status(tree, m, hashes, patched) for m in MECHANISMS]
    else:
        why = f"SGLang {version} is not one of {', '.join(known)}"
        found = [Status(m.name, m.summary, "unsupported", why) for m in MECHANISMS]
    return CheckReport(str(tree), version, known, enabled(), plugins, found)


def refuse_unfit(report: CheckReport) -> None:
    """Raises CheckFailed where a mechanism does not work with this release."""
    bad = [s for s in report.mechanisms if s.state == "unsupported"]
    if bad:
        raise CheckFailed(
            f"{len(bad)} of {len(report.mechanisms)} mechanisms do not fit SGLang {report.release}: {bad[0].why}",
            where=report.tree,
            remedy=f"install one of: {', '.join(report.known)}",
        )


def _status(tree: Path, mechanism: Mechanism, hashes: dict[str, str], patched: set[str]) -> Status:
    if mechanism.name in patched:
        return Status(mechanism.name, mechanism.summary, "patched")
    target, sign = _NATIVE.get(mechanism.name, ("", ""))
    if target and sign in (source_of(tree, target) or ""):
        return Status(mechanism.name, mechanism.summary, "native")
    bad = []
    for name in (*mechanism.hooked, *mechanism.relied):
        source = source_of(tree, name)
        if source is None:
            bad.append(f"{name} is missing")
        elif digest(source) != hashes.get(name):
            bad.append(f"{name} is changed")
    state = "unsupported" if bad else "plugin"
    return Status(mechanism.name, mechanism.summary, state, ", ".join(bad))
