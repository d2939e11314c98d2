"""Which model a directory holds, so that a measurement of one model is not compared with another's.

A model has two hashes. `source` names the checkpoint that the weights come from: a quantized or
re-packed directory carries it in its manifest, so it stays the same through quantize, requant-int8
and any new layout of the files. `weights` names the tensor files themselves.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from q38.checkpoint.index import Checkpoint
from q38.checkpoint.job import read_manifest


def model_identity(root: Path) -> dict[str, str]:
    """{"source": hash, "weights": hash, "name": directory name}.

    A directory without a manifest that names a source is its own source.

    Raises:
        InputError: no checkpoint, or a damaged manifest.
    """
    files = Checkpoint.open(root).fingerprint
    manifest = read_manifest(root) or {}
    source = manifest.get("identity", {}).get("source")
    return {
        "source": digest(source if isinstance(source, dict) else files),
        "weights": digest({name: value for name, value in files.items() if name != "config.json"}),
        "name": root.resolve().name,
    }


def digest(value: Any) -> str:
    """sha256 of a JSON-able value, whatever the order of its keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, ensure_ascii=False).encode()).hexdigest()
