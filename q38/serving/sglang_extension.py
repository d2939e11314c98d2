"""q38's extension of SGLang: this release has none, and says so."""

from __future__ import annotations

from typing import NoReturn

from q38.base.errors import ResourceError
from q38.serving.requirements import needs


def refuse() -> NoReturn:
    """Say what is missing: SGLang, or the extension for the SGLang that is installed.

    Raises:
        ResourceError: always.
    """
    sglang = next(need for need in needs("sglang") if need.package == "sglang")
    if sglang.found is None:
        raise ResourceError("SGLang is not installed in this environment", remedy=sglang.remedy)
    raise ResourceError(
        f"SGLang {sglang.found} is installed, and this release of q38 ships no extension for it",
        remedy="serve with --engine transformers",
    )
