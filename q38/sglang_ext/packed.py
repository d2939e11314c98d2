"""AutoRound's configuration learns which checkpoint modules SGLang fuses, so that fused names resolve.

SGLang 0.5.23 puts the mapping into the dictionary that AutoRoundConfig is made from; from_config drops it.
"""

from __future__ import annotations

from typing import Any

from q38.sglang_ext.hooks import Hook
from q38.sglang_ext.targets import AUTOROUND


def hooks() -> list[Hook]:
    """See hooks.apply."""
    return [Hook(AUTOROUND + ".from_config", "after", keep_mapping)]


def keep_mapping(result: Any, _cls: type, config: dict[str, Any]) -> Any:
    """Hand the packed-module mapping on to the configuration object."""
    result.update_packed_modules_mapping(config.get("packed_modules_mapping") or {})
    return result
