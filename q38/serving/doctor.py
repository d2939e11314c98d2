"""What each verb needs, what this machine has of it, and what brings the rest."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from q38.base.errors import InputError, ResourceError
from q38.base.units import GIB, format_bytes
from q38.serving.machine import CUDA_REMEDY, Machine, probe
from q38.serving.requirements import needs
from q38.serving.toolkit import find_toolkit

MIN_FREE_DISK = 10 * GIB  # below this even the tiny pipeline and its environment get tight


@dataclass(frozen=True)
class Finding:
    """One thing a verb needs. `advice` findings make it slower or riskier when absent, not impossible."""

    need: str
    found: str
    ok: bool
    remedy: str
    advice: bool = False
    core: bool = False  # needed by every verb

    @property
    def short(self) -> str:
        """For a list of what is there: a package with its version, else the thing itself."""
        name = self.need.split("==")[0].split(">=")[0]
        return f"{name} {self.found}" if name != self.need else self.found


@dataclass(frozen=True)
class Report:
    """The machine, and the findings per verb."""

    machine: Machine
    verbs: dict[str, list[Finding]]

    def lacks(self, verb: str) -> list[Finding]:
        """What keeps `verb` from running here."""
        return [f for f in self.verbs[verb] if not f.ok and not f.advice]

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        verbs = {
            verb: {"ready": not self.lacks(verb), "needs": [asdict(f) for f in findings]}
            for verb, findings in self.verbs.items()
        }
        return {"machine": self.machine.to_dict(), "verbs": verbs}


def examine(path: Path | None = None) -> Report:
    """Probe this machine (`path` picks the disk) and compare it with what every verb needs.

    Raises:
        InputError: no such path.
    """
    if path is not None and not path.exists():
        raise InputError("no such file or directory", where=path, remedy="name one on the disk that is meant")
    machine = probe(path)
    verbs = {
        # Two extras may name the same package.
        verb: list(dict.fromkeys(f for part in parts for f in part(machine)))
        for verb, parts in VERBS.items()
    }
    return Report(machine, verbs)


def require(report: Report, verb: str) -> None:
    """Refuse when `verb` cannot run here.

    Raises:
        InputError: no such verb.
        ResourceError: something is missing.
    """
    if verb not in report.verbs:
        raise InputError(
            f"unknown verb '{verb}'", where="--require", remedy=f"known: {', '.join(report.verbs)}"
        )
    lacks = report.lacks(verb)
    if lacks:
        raise ResourceError(
            "; ".join(f"needs {f.need}, found {f.found}" for f in lacks),
            where=f"q38 {verb}",
            remedy="; ".join(dict.fromkeys(f.remedy for f in lacks)),
        )


Part = Callable[[Machine], list[Finding]]


def _packages(extra: str) -> Part:
    def findings(_machine: Machine) -> list[Finding]:
        return [
            Finding(f"{n.package}{n.specifier}", n.found or "absent", n.satisfied, n.remedy, core=not extra)
            for n in needs(extra)
        ]

    return findings


def _python(machine: Machine) -> list[Finding]:
    ok = sys.version_info >= (3, 11)
    return [
        Finding(
            "Python>=3.11", machine.python, ok, "make the environment with Python 3.11 or newer", core=True
        )
    ]


def _cuda(machine: Machine) -> list[Finding]:
    gpus = ", ".join(
        f"{g.name} ({format_bytes(g.memory_total)}, compute capability {g.compute_capability}, driver {g.driver})"
        for g in machine.gpus
    )
    build = machine.torch_build
    return [
        Finding("a CUDA GPU", gpus or "none", bool(machine.gpus), CUDA_REMEDY),
        Finding(
            "torch built for CUDA",
            "absent" if build is None else f"torch {machine.packages['torch']}",
            build not in (None, "cpu"),
            "install SGLang with the torch that it asks for: docs/guide.md, For a GPU",
        ),
    ]


def _toolkit(_machine: Machine) -> list[Finding]:
    """SGLang compiles some of its kernels for the model at hand when it starts."""
    found = find_toolkit()
    return [
        Finding(
            "nvcc and CUDA headers of one release",
            str(found),
            found.consistent,
            "install both in one release (the pip packages nvidia-cuda-nvcc and nvidia-cuda-runtime, or a CUDA toolkit), "
            "and let CUDA_HOME name it",
        )
    ]


def _triton(machine: Machine) -> list[Finding]:
    found = machine.packages["triton"]
    return [Finding("triton", found or "absent", found is not None, "it comes with torch built for CUDA")]


def _extension(machine: Machine) -> list[Finding]:
    """The plugin that SGLang finds by q38's entry point, and a release that it was checked against."""
    from q38.sglang_ext.manifest import known_releases

    known, found = known_releases(), machine.packages["sglang"]
    entry = any(e.name == "q38" for e in metadata.entry_points(group="sglang.srt.plugins"))
    return [
        Finding(
            "q38's plugin for SGLang",
            "registered" if entry else "not registered",
            entry,
            "install q38 again: its entry point is missing",
        ),
        Finding(
            f"SGLang {' or '.join(known)}",
            found or "absent",
            found in known,
            f"install a release that the plugin was checked against: sglang=={known[-1]}",
        ),
    ]


def _host_memory(machine: Machine) -> list[Finding]:
    """The experts' rows sit in pinned host memory: it must be lockable, and there must be room beside it."""
    limit = machine.memlock
    return [
        Finding(
            "unlimited locked memory",
            "unlimited" if limit is None else format_bytes(limit),
            limit is None,
            "ulimit -l unlimited, or LimitMEMLOCK=infinity in the systemd unit",
            advice=True,
        ),
        Finding(
            "swap for idle pages",
            format_bytes(machine.swap_total),
            machine.swap_total > 0,
            "add a swap file (mkswap, swapon)",
            advice=True,
        ),
    ]


def _disk(machine: Machine) -> list[Finding]:
    disk = machine.disk
    return [
        Finding(
            f"{format_bytes(MIN_FREE_DISK)} of free disk",
            f"{format_bytes(disk.free)} at {disk.path}",
            disk.free >= MIN_FREE_DISK,
            "free space, or name another directory with --path",
            advice=True,
        )
    ]


def _fast_disk(machine: Machine) -> list[Finding]:
    """The n-gram table is read in small random rows while tokens are generated."""
    disk = machine.disk
    return [
        Finding(
            "an NVMe disk for the n-gram table",
            f"{disk.kind} ({disk.device or disk.filesystem})",
            disk.kind == "nvme",
            "put the table on an NVMe disk",
            advice=True,
        )
    ]


_CORE: tuple[Part, ...] = (_python, _packages(""))
_QUANT: tuple[Part, ...] = (*_CORE, _packages("quant"))
_SERVE: tuple[Part, ...] = (*_CORE, _packages("serve"))
_SGLANG: tuple[Part, ...] = (*_CORE, _cuda, _packages("sglang"), _extension)

# In the order of the pipeline. "serve --engine X" are the two ways to serve; plain serve needs one of them.
VERBS: dict[str, tuple[Part, ...]] = {
    "run": (*_QUANT, _packages("serve"), _disk),
    "doctor": _CORE,
    "synth": (*_QUANT, _disk),
    "inspect": _CORE,
    "plan": _CORE,
    "split-ple": (*_CORE, _disk),
    "quantize": (*_QUANT, _disk),
    "requant-int8": (*_CORE, _disk),
    "tune-triton": (*_CORE, _cuda, _triton),
    "build-placement": _SERVE,
    "patch-sglang": (*_CORE, _packages("sglang"), _extension),
    "serve": _SERVE,
    "serve --engine sglang": (*_SGLANG, _toolkit, _host_memory, _fast_disk),
    "verify": _SERVE,
    "bench": _CORE,
    "oracle": _SERVE,
    "release": (*_CORE, _disk),
}
