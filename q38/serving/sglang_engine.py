"""The sglang engine: what it lacks here, its plan, and how its child process is started."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from q38.base.errors import InputError
from q38.base.units import GIB, format_bytes
from q38.checkpoint.index import Checkpoint
from q38.ple.fetch import obstacle
from q38.serving.kv_choice import choose_kv
from q38.serving.machine import CUDA_REMEDY, has_cuda_gpu
from q38.serving.profile_choice import choose_profile
from q38.serving.records import control_socket
from q38.serving.requirements import lacking
from q38.serving.scope import scoped
from q38.serving.sglang_plan import ServePlan, make_plan
from q38.serving.sglang_settings import (
    Resolved,
    SglangSettings,
    command,
    environment,
    refuse_conflicts,
    resolve,
)

if TYPE_CHECKING:
    from q38.serving.engines import Lack, Launch, ServeOptions

_SOCKET_NAME = 100  # Linux takes 107 characters
# The early reader's own memory, at most: modules, headers, a buffer a thread, device rows that wait.
_READER = GIB
# Has SGLang's processes leave what they hold by then out of later garbage collections. SGLang asks itself after its
# warm-up; without one it asks while it begins to listen, too early to reach anyone or for what the first token makes.
_FREEZE_GC = "/freeze_gc"


def lacks() -> list[Lack]:
    """What this machine lacks to serve on its GPU."""
    from q38.serving.engines import Lack

    missing = (
        [] if has_cuda_gpu() else [Lack("no CUDA GPU", f"{CUDA_REMEDY}, or --device cpu for a tiny model")]
    )
    return missing + lacks_on_cpu()


def lacks_on_cpu() -> list[Lack]:
    """What it lacks to serve a tiny model on the CPU."""
    from q38.serving.engines import Lack

    missing = [Lack(str(need), need.remedy) for need in lacking("sglang")]
    if not missing and importlib.util.find_spec("orjson") is None:
        missing.append(Lack("SGLang is installed without its dependencies", 'pip install "q38[sglang]"'))
    return missing


def launch(options: ServeOptions) -> Launch:
    """Resolve the settings, plan, and make the command line.

    Raises:
        InputError: options that contradict each other or the model.
        ResourceError: it does not fit.
    """
    from q38.serving.engines import Launch
    from q38.sglang_ext.options import ExtensionOptions

    settings = options.sglang
    refuse_conflicts(settings, engine="sglang", device=settings.device or "cuda")
    checkpoint = options.opened()
    resolved = resolve(settings, checkpoint.config, where=str(options.model / "config.json"))
    if settings.overlap is None and options.ple is not None and obstacle(options.ple) is not None:
        resolved = replace(resolved, overlap=False)
    profile, about_profile = choose_profile(checkpoint, settings.profile)
    resolved, plan = choose_kv(resolved, lambda chosen: make_plan(checkpoint, settings, chosen, options.ple))
    resolved = replace(resolved, chunk=plan.chunk)
    control = control_socket(options.port).resolve()
    if len(str(control)) > _SOCKET_NAME:
        raise InputError(
            f"the name of a socket there is longer than {_SOCKET_NAME} characters",
            where=control.parent,
            remedy="set Q38_STATE_DIR to a shorter directory",
        )
    extension = ExtensionOptions(
        model=str(options.model.resolve()),
        ple=None if options.ple is None else str(options.ple.resolve()),
        profile=None if profile is None else str(profile.resolve()),
        device_rows=plan.device_rows,
        fewest_device_rows=plan.fewest_device_rows,
        reserve=plan.reserve,
        spare=plan.spare,
        early_rows=_read_early(settings, resolved, plan),
        early_scheduler=resolved.device != "cpu"
        if settings.early_scheduler is None
        else settings.early_scheduler,
        adapt=resolved.device != "cpu" if settings.adapt is None else settings.adapt,
        staging=plan.staging,
        control=str(control),
        kv=resolved.stored_kv,
        kv_ring=min(resolved.kv_ring, resolved.context),
        kv_lazy=plan.kv_lazy,
        kv_headroom=plan.kv_headroom,
        kv_limit=settings.kv_limit,
        kv_zeroed=bool(settings.kv_zeroed),
        int8_mixes=bool(settings.int8_mixes),
        check_finite=bool(settings.check_finite),
    )
    arguments = _arguments(options, resolved, checkpoint, plan.static)
    words = [sys.executable, "-m", "q38.serving.sglang_server", *arguments]
    lines = [*plan.lines(), about_profile]
    # The plan of a GPU shares out all host memory that the server may use.
    limit = sum(plan.host.values())
    if resolved.device != "cpu" and (inside := scoped(words, limit)) is not None:
        words = inside
        lines.append(f"host memory: {format_bytes(limit)} at most, by a systemd scope")
    return Launch(
        words,
        environment(resolved, extension.to_json()),
        lines,
        {**plan.to_dict(), "profile": None if profile is None else str(profile)},
        _read_ahead(checkpoint, plan),
        _FREEZE_GC,
    )


def _read_early(settings: SglangSettings, resolved: Resolved, plan: ServePlan) -> bool:
    """Whether a process of its own is to read expert rows while SGLang is imported, and has the memory that it needs itself."""
    if settings.early_rows is not None:
        return settings.early_rows
    return resolved.device != "cpu" and _spare_memory(plan) >= _READER


def _spare_memory(plan: ServePlan) -> int:
    """Bytes of host memory that nothing is planned for, or only the page cache."""
    return plan.host.get("left", 0) + plan.host.get("n-gram page cache", 0)


def _read_ahead(checkpoint: Checkpoint, plan: ServePlan) -> list[tuple[Path, int, int]]:
    """Every tensor that SGLang's own loader reads one by one, where the page cache has room for them beside the plan."""
    from q38.sglang_ext.selection import for_sglang

    found = list(checkpoint.match(lambda name: for_sglang(name, table_on_disk=True)))
    fits = sum(t.nbytes for t in found) <= _spare_memory(plan)
    return [(t.file, t.begin, t.end) for t in found] if fits else []


def _arguments(options: ServeOptions, resolved: Resolved, checkpoint: Checkpoint, static: float) -> list[str]:
    text_only = bool(checkpoint.config.get("language_model_only", False))
    return command(options, resolved, language_model_only=text_only, static=static)
