"""Qwen4-Exp joins the architectures that SGLang can serve without their vision tower."""

from __future__ import annotations

from q38.sglang_ext.hooks import Hook
from q38.sglang_ext.targets import SERVER_ARGS

ARCHITECTURE = "Qwen4ExpForConditionalGeneration"


def hooks() -> list[Hook]:
    """See hooks.apply."""
    from sglang.srt.server_args import ServerArgs

    known: tuple[str, ...] = tuple(ServerArgs.LANGUAGE_MODEL_ONLY_ARCHITECTURES)
    listed = known if ARCHITECTURE in known else (*known, ARCHITECTURE)
    return [Hook(SERVER_ARGS + ".LANGUAGE_MODEL_ONLY_ARCHITECTURES", "set", listed)]
