"""The engines that can serve a model, and which of them this machine can run."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from q38.base.errors import InputError, ResourceError
from q38.checkpoint.index import Checkpoint
from q38.serving import sglang_engine
from q38.serving.requirements import lacking
from q38.serving.sglang_settings import SglangSettings, refuse_conflicts


@dataclass(frozen=True)
class ServeOptions:
    """What one server is started with. `api_key` never appears on a command line; `sglang` is for that engine.

    checkpoint: `model`, opened by `preflight`: 220,000 headers need not be read twice.
    """

    model: Path
    ple: Path | None = None
    engine: str = "auto"
    host: str = "127.0.0.1"
    port: int = 30000
    name: str | None = None
    api_key: str | None = None
    log: Path | None = None
    start_timeout_s: float = 900.0
    sglang: SglangSettings = field(default_factory=SglangSettings)
    checkpoint: Checkpoint | None = field(default=None, repr=False, compare=False)

    def opened(self) -> Checkpoint:
        """The model's checkpoint.

        Raises:
            InputError: a file is missing or broken.
        """
        return self.checkpoint or Checkpoint.open(self.model)

    @property
    def served_name(self) -> str:
        """The model's name in /v1/models: `name`, else the directory's."""
        return self.name or self.model.resolve().name

    @property
    def url(self) -> str:
        """Where a client on this machine reaches the server."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"


@dataclass(frozen=True)
class Lack:
    """One thing a machine lacks for a purpose, and what brings it."""

    what: str
    remedy: str


@dataclass(frozen=True)
class Launch:
    """How one server's child process is started.

    environment: variables beside this process's own.
    plan: lines for people, printed before loading; `figures` the same for JSON.
    read_ahead: (file, begin, end) in bytes, for the kernel to read while the child is still importing.
    settle: address to POST to, without a body, once the first token came; the start does not depend on it.
    """

    command: list[str]
    environment: dict[str, str] = field(default_factory=dict)
    plan: list[str] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)
    read_ahead: list[tuple[Path, int, int]] = field(default_factory=list)
    settle: str | None = None


@dataclass(frozen=True)
class Engine:
    """One way to serve a model.

    lacks: what this machine lacks to run it; empty when it can.
    launch: how to start the child; may refuse what cannot work.
    passed_over: why engines that come before it were not chosen.
    """

    name: str
    summary: str
    lacks: Callable[[], list[Lack]]
    launch: Callable[[ServeOptions], Launch]
    passed_over: str = ""


def choose_engine(name: str = "auto", *, given: Sequence[str] = (), on_cpu: bool = False) -> Engine:
    """The engine of that name, or for "auto" the first of `ENGINES` that this machine can run.

    Args:
        given: options of the sglang engine alone; with "auto" they ask for it.
        on_cpu: --device cpu is one of them, so that it needs no GPU.

    Returns:
        the engine; `passed_over` says why "auto" did not take those before it.

    Raises:
        InputError: no engine has that name.
        ResourceError: the machine lacks something for it.
    """
    if name != "auto" and name not in ENGINES:
        raise InputError(
            f"unknown engine '{name}'", where="--engine", remedy=f"known: auto, {', '.join(ENGINES)}"
        )
    given = given or (["--device"] if on_cpu else [])
    asked = name == "auto" and bool(given)
    wanted = "sglang" if asked else name
    reasons: list[str] = []
    lacks: list[Lack] = []
    for engine in ENGINES.values() if wanted == "auto" else [ENGINES[wanted]]:
        lacks = sglang_engine.lacks_on_cpu() if on_cpu and wanted == "sglang" else engine.lacks()
        if not lacks:
            return replace(engine, passed_over="; ".join(reasons))
        missing = f"cannot run here: {'; '.join(lack.what for lack in lacks)}"
        reasons.append(f"engine {engine.name} {missing}")
    raise ResourceError(
        f"needs engine sglang, which {missing}" if asked else reasons[-1],
        where=given[0] if asked else "--engine",
        remedy="; ".join(lack.remedy for lack in lacks),
    )


def _transformers_lacks() -> list[Lack]:
    return [Lack(str(need), need.remedy) for need in lacking("serve")]


def _transformers_launch(options: ServeOptions) -> Launch:
    refuse_conflicts(options.sglang, engine="transformers", device="cpu")
    command = [sys.executable, "-m", "q38.serving.transformers_server", str(options.model)]
    command += ["--host", options.host, "--port", str(options.port), "--name", options.served_name]
    return Launch(command + (["--ple", str(options.ple)] if options.ple else []))


# In order of preference: "auto" takes the first that can run.
ENGINES = {
    engine.name: engine
    for engine in (
        Engine(
            "sglang",
            "SGLang on a CUDA GPU, with q38's extension",
            sglang_engine.lacks,
            sglang_engine.launch,
        ),
        Engine(
            "transformers",
            "the server of transformers on the CPU, for small models",
            _transformers_lacks,
            _transformers_launch,
        ),
    )
}
