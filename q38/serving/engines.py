"""The engines that can serve a model, and which of them this machine can run."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from q38.base.errors import InputError, ResourceError
from q38.serving.machine import CUDA_REMEDY, has_cuda_gpu
from q38.serving.requirements import lacking


@dataclass(frozen=True)
class ServeOptions:
    """What one server is started with. `api_key` never appears on a command line."""

    model: Path
    ple: Path | None = None
    engine: str = "auto"
    host: str = "127.0.0.1"
    port: int = 30000
    name: str | None = None
    api_key: str | None = None
    log: Path | None = None
    start_timeout_s: float = 900.0

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
class Engine:
    """One way to serve a model.

    lacks: what this machine lacks to run it; empty when it can.
    command: the child's command line.
    """

    name: str
    summary: str
    lacks: Callable[[], list[Lack]]
    command: Callable[[ServeOptions], list[str]]


def choose_engine(name: str = "auto") -> Engine:
    """The engine of that name, or for "auto" the first of `ENGINES` that this machine can run.

    Raises:
        InputError: no engine has that name.
        ResourceError: the machine lacks something for it.
    """
    if name != "auto" and name not in ENGINES:
        raise InputError(
            f"unknown engine '{name}'", where="--engine", remedy=f"known: auto, {', '.join(ENGINES)}"
        )
    candidates = list(ENGINES.values()) if name == "auto" else [ENGINES[name]]
    lacks: list[Lack] = []
    for engine in candidates:
        lacks = engine.lacks()
        if not lacks:
            return engine
    raise ResourceError(
        f"engine {candidates[-1].name} cannot run here: {'; '.join(lack.what for lack in lacks)}",
        where="--engine",
        remedy="; ".join(lack.remedy for lack in lacks),
    )


def _transformers_lacks() -> list[Lack]:
    return [Lack(str(need), need.remedy) for need in lacking("serve")]


def _transformers_command(options: ServeOptions) -> list[str]:
    command = [sys.executable, "-m", "q38.serving.transformers_server", str(options.model)]
    command += ["--host", options.host, "--port", str(options.port), "--name", options.served_name]
    return command + (["--ple", str(options.ple)] if options.ple else [])


def _sglang_lacks() -> list[Lack]:
    lacks = [] if has_cuda_gpu() else [Lack("no CUDA GPU", CUDA_REMEDY)]
    lacks += [Lack(str(need), need.remedy) for need in lacking("sglang")]
    if importlib.util.find_spec("q38.sglang_ext") is None:
        lacks.append(Lack("this release of q38 has no SGLang extension", "use --engine transformers"))
    return lacks


def _sglang_command(options: ServeOptions) -> list[str]:
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(options.model)]
    command += ["--host", options.host, "--port", str(options.port)]
    command += ["--served-model-name", options.served_name]
    # The earlier public recipe for this model: parsers that match its chat template, no vision tower.
    command += ["--reasoning-parser", "qwen3", "--tool-call-parser", "qwen3_coder"]
    return [*command, "--language-model-only"]


# In order of preference: "auto" takes the first that can run.
ENGINES = {
    engine.name: engine
    for engine in (
        Engine("sglang", "SGLang on a CUDA GPU, with q38's extension", _sglang_lacks, _sglang_command),
        Engine(
            "transformers",
            "the server of transformers on the CPU, for small models",
            _transformers_lacks,
            _transformers_command,
        ),
    )
}
