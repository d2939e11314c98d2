"""SGLang's engine on a CPU, with plain torch in place of its GPU kernels: for tests and tiny models only.

An out-of-tree platform for SGLang (entry point `sglang.srt.platforms`), taken when SGLANG_PLATFORM=q38cpu.
`prepare` must run before sglang is imported.
"""

from __future__ import annotations

PLATFORM = "q38cpu"


def activate() -> str | None:
    """The platform class; SGLang asks the plugin that SGLANG_PLATFORM names, or every one if none is named."""
    from q38.base import settings

    return (
        "q38.sglang_ext.cpu.platform.CpuReferencePlatform" if settings.sglang_platform() == PLATFORM else None
    )
