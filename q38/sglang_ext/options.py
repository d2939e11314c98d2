"""What `q38 serve` tells the plugin: one JSON document in one environment variable."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass, fields
from functools import lru_cache
from pathlib import Path

from q38.base import settings
from q38.base.errors import InputError
from q38.model.kv import RING_SLOTS

# q38's INT8 kernels; SGLang's own (Marlin); plain matrices, unpacked to bf16 at load.
DENSE = ("int8", "sglang", "unpacked")
DECODE_TOKENS = 64  # of one decode step: what the fixed buffer of n-gram rows holds


@dataclass(frozen=True)
class ExtensionOptions:
    """Options of the plugin in one server.

    model: directory of the packed checkpoint.
    ple: directory of the split n-gram table; None where the model has none.
    profile: routing profile that ranks the experts; None ranks all alike.
    device_rows: expert rows that start in device memory; None fills what `reserve` leaves.
    fewest_device_rows: the fewest there will ever be; the pinned pool holds the rest. None: as `device_rows`.
    reserve: bytes of device memory that rows leave free (KV cache, graphs, working memory).
    spare: row slots kept free on both sides, so that rows can be exchanged.
    early_rows: a process of its own begins to read the rows before SGLang is imported, where `device_rows` and `control` are given.
    early_scheduler: SGLang's scheduler imports its modules while the server's first process imports its own.
    adapt: exchange rows while serving, so that those in device memory are those that are read.
    staging: row slots in device memory that prompt steps copy their host rows to; 0: they read them in place.
    dense: how packed projections are computed, one of `DENSE`; on a CPU always "unpacked".
    control: Unix socket on which the process with the model takes changes of the rows; None: it takes none.
    kv: format of q38's own KV cache (q38.kvcache.layout); None: SGLang's cache, by its --kv-cache-dtype.
    kv_ring: slots that int8ring_int4 keeps in INT8.
    kv_lazy: map the cache's memory as pages are handed out; else all of it at the start.
    kv_headroom: bytes of device memory that mapping leaves free, for the working memory of a step.
    kv_limit: the most bytes to map for it; None: as many as there are.
    kv_zeroed: write zeros instead of keys and values: the control of `q38 oracle kv`.
    int8_mixes: round the matrices of the hyper-connections to INT8 as they are loaded.
    check_finite: look at the output of every module in prompt steps.
    """

    model: str
    ple: str | None = None
    profile: str | None = None
    device_rows: int | None = None
    fewest_device_rows: int | None = None
    reserve: int = 0
    spare: int = 16
    early_rows: bool = False
    early_scheduler: bool = False
    adapt: bool = False
    staging: int = 0
    dense: str = "int8"
    control: str | None = None
    kv: str | None = None
    kv_ring: int = RING_SLOTS
    kv_lazy: bool = True
    kv_headroom: int = 0
    kv_limit: int | None = None
    kv_zeroed: bool = False
    int8_mixes: bool = False
    check_finite: bool = False

    def to_json(self) -> str:
        """The value of the environment variable."""
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> ExtensionOptions:
        """Read that value back.

        Raises:
            InputError: not such a document.
        """
        try:
            return cls(**json.loads(text))
        except (ValueError, TypeError) as error:
            raise InputError(
                f"not options of the SGLang extension ({error})",
                where=settings.SGLANG,
                remedy=f"start SGLang with q38 serve, or give a JSON object of {', '.join(f.name for f in fields(cls))}",
            ) from None


def marker() -> Path:
    """The file that `q38 patch-sglang enable` leaves in this Python environment."""
    return Path(sys.prefix) / "etc" / "q38" / "sglang-enabled"


def enabled() -> bool:
    """Whether this process is to load the extension."""
    return bool(settings.load().sglang) or marker().is_file()


@lru_cache(maxsize=1)
def given() -> ExtensionOptions | None:
    """The options of this process; None where only the marker enables the extension."""
    text = settings.load().sglang
    return ExtensionOptions.from_json(text) if text else None


def resolve(model: str) -> ExtensionOptions:
    """The options for a model that SGLang loads: those given, else what its directory says."""
    from q38.ple.find import find_ple

    options = given()
    if options is not None:
        return options
    table = find_ple(Path(model))
    return ExtensionOptions(model, None if table is None else str(table))
