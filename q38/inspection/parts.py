"""The parts beside the language model, and the files beside the shards."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from q38.checkpoint.index import INDEX
from q38.inspection.findings import Findings
from q38.inspection.opened import Opened

_COPY = "copy it from the release"


def check_parts(opened: Opened, findings: Findings) -> dict[str, Any]:
    """Which parts are there; findings for those that should be and are not."""
    described = isinstance(opened.config.get("vision_config"), Mapping)
    dropped = bool(opened.config.get("language_model_only", False))
    vision, mtp = opened.has("model.visual."), opened.has("mtp.")
    if described and not vision and dropped:
        findings.add(
            "vision-dropped", "there are no model.visual tensors", "nothing to do", file="config.json"
        )
    elif described and not vision:
        findings.add(
            "vision-absent",
            "there are no model.visual tensors",
            "download the missing shards, or set language_model_only to true if the tower was dropped",
            file="config.json",
        )
    if opened.shape.mtp_layers and not mtp:
        findings.add("mtp-absent", "there are no mtp tensors", "nothing to do unless you want speculation")
    tokenizer = "tokenizer.json" in opened.files
    template = _has_chat_template(opened)
    generation = "generation_config.json" in opened.files
    if not tokenizer:
        findings.add("tokenizer-absent", "is missing", _COPY, file="tokenizer.json")
    if not template:
        findings.add("chat-template-absent", "is missing", _COPY, file="chat_template.jinja")
    if not generation:
        findings.add("generation-config-absent", "is missing", _COPY, file="generation_config.json")
    _check_stale_config(opened, findings)
    _check_total_size(opened, findings)
    return {
        "vision": vision,
        "mtp": mtp,
        "text_only": not described or dropped,
        "tokenizer": tokenizer,
        "chat_template": template,
        "generation_config": generation,
    }


def _has_chat_template(opened: Opened) -> bool:
    if {"chat_template.jinja", "chat_template.json"} & opened.files.keys():
        return True
    return bool((opened.json("tokenizer_config.json") or {}).get("chat_template"))


def _check_stale_config(opened: Opened, findings: Findings) -> None:
    name = "quantization_config.json"
    if name not in opened.files:
        return
    beside = opened.json(name)
    if beside is None or json.dumps(beside, sort_keys=True) != json.dumps(
        dict(opened.quantization), sort_keys=True
    ):
        findings.add(
            "quantization-stale",
            "differs from config.json's",
            "remove it; engines read config.json",
            file=name,
        )


def _check_total_size(opened: Opened, findings: Findings) -> None:
    if INDEX not in opened.files or any(
        code.startswith(("index-", "shard-", "duplicate-")) for code in findings.counts
    ):
        return  # then the sum means nothing
    metadata = (opened.json(INDEX) or {}).get("metadata")
    total = metadata.get("total_size") if isinstance(metadata, Mapping) else None
    if total is not None and total != opened.nbytes:
        findings.add(
            "index-size",
            f"total_size is {total}, the tensors have {opened.nbytes} bytes",
            f"download {INDEX} again",
            file=INDEX,
        )
