"""The n-gram table: complete, of the right size, and with the constants that its seed gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from q38.base.errors import InputError
from q38.checkpoint.header import TensorInfo
from q38.inspection.findings import Findings
from q38.inspection.opened import Opened
from q38.model.names import LAYERS, NGRAM_SHARD
from q38.model.ngram import constants, head_sizes, table_rows
from q38.ple.find import PLE_JSON, find_ple
from q38.ple.scales import DTYPES
from q38.ple.table import read_info

_RESTORE = "download the checkpoint again, or correct config.json"


def check_ngram(opened: Opened, findings: Findings) -> dict[str, Any] | None:
    """Check each table. Returns what the report shows about the first; None if the model has none."""
    ngram = opened.shape.ngram
    if ngram is None:
        return None
    if opened.shape.eos_token_id is None:
        findings.add(
            "ple-eos", "text_config.eos_token_id is missing", "restore config.json", file="config.json"
        )
    tables = []
    for index, layer in enumerate(ngram.layer_ids):
        if opened.shape.layer_types[layer] != "linear_attention":
            findings.add(
                "ple-layer-kind",
                f"layer {layer} (ple_layer_ids {layer + 1}) is {opened.shape.layer_types[layer]}",
                "restore config.json",
                file="config.json",
            )
        _constants(opened, index, findings)
        tables.append(_table(opened, index, findings))
    return {"layers": list(ngram.layer_ids), "seed": ngram.seed, **tables[0]}


def _table(opened: Opened, index: int, findings: Findings) -> dict[str, Any]:
    ngram = opened.shape.ngram
    assert ngram is not None
    prefix = f"{LAYERS}.{ngram.layer_ids[index]}.ple.ple_embedding.ngram_embedding"
    expected = table_rows(ngram, index)
    shards = _shards(opened, prefix)
    facts = {"rows_expected": expected, "dim": ngram.dim, "head_sizes": list(head_sizes(ngram, index))}
    if not shards:
        return {**facts, **_split_table(opened, expected, ngram.dim, findings)}
    numbers, first = sorted(shards), shards[min(shards)]
    if numbers != list(range(len(numbers))):
        gap = next(n for n in range(numbers[-1] + 1) if n not in shards)
        findings.add(
            "ple-shards",
            f"shard {gap} of {numbers[-1] + 1} is missing",
            _RESTORE,
            tensor=f"{prefix}.shard_{gap}.weight",
        )
    for info in shards.values():
        if info.dtype != first.dtype or len(info.shape) != 2 or info.shape[1] != ngram.dim:
            findings.add(
                "ple-shards",
                f"is {info.dtype} {list(info.shape)}, rows of {ngram.dim} {first.dtype} values expected",
                _RESTORE,
                file=info.file.name,
                tensor=info.name,
            )
    rows = sum(info.shape[0] for info in shards.values() if info.shape)
    if rows != expected:
        findings.add(
            "ple-rows",
            f"{rows:,} rows, {expected:,} expected ({ngram.heads} primes from {ngram.vocab_base:,}, padded to {ngram.divisor})",
            _RESTORE,
            tensor=f"{prefix}.shard_*.weight",
        )
    elif len(shards) not in (1, ngram.parts):
        findings.add(
            "ple-parts",
            f"{len(shards)} shards, split_ngram_parts is {ngram.parts}",
            "correct split_ngram_parts in config.json",
            file="config.json",
        )
    if first.dtype not in ("BF16", "F8_E4M3"):
        findings.add(
            "ple-shards", f"is {first.dtype}", "known: BF16, F8_E4M3", file=first.file.name, tensor=first.name
        )
    if first.dtype == "F8_E4M3":
        _scale(opened, f"{prefix}.weight_scale", rows, findings)
    return {**facts, "rows": rows, "shards": len(shards), "dtype": first.dtype, "where": "checkpoint"}


def _shards(opened: Opened, prefix: str) -> dict[int, TensorInfo]:
    whole = opened.tensors.get(f"{prefix}.weight")
    if whole is not None:
        return {0: whole}
    return {
        int(match["n"]): info
        for name, info in opened.tensors.items()
        if (match := NGRAM_SHARD.match(name)) and match["prefix"] == prefix
    }


def _split_table(opened: Opened, rows: int, dim: int, findings: Findings) -> dict[str, Any]:
    """No table in the checkpoint: is one split off where q38 looks for it?"""
    root = Path(opened.where)
    directory = find_ple(root) if root.is_dir() else None
    if directory is None:
        code = "ple-not-beside" if opened.has_packed else "ple-absent"
        findings.add(
            code, "no n-gram table here, in ple/ or beside it", "make it with q38 split-ple from the source"
        )
        return {"rows": 0, "shards": 0, "dtype": None, "where": None}
    try:
        info = read_info(directory)
    except InputError as error:
        findings.add("ple-dir-broken", error.what, error.remedy or "", file=error.where)
        return {"rows": 0, "shards": 0, "dtype": None, "where": str(directory)}
    if (info.rows, info.dim) != (rows, dim):
        findings.add(
            "ple-rows",
            f"{info.rows:,} rows of {info.dim}, {rows:,} of {dim} expected",
            "split the table of this model's source",
            file=str(directory / PLE_JSON),
        )
    else:
        findings.add(
            "ple-elsewhere",
            f"the n-gram table is in {directory}",
            "nothing to do",
            file=str(directory / PLE_JSON),
        )
    return {"rows": info.rows, "shards": info.n_shards, "dtype": info.dtype, "where": str(directory)}


def _scale(opened: Opened, name: str, rows: int, findings: Findings) -> None:
    info = opened.tensors.get(name)
    if info is not None and info.shape in ((rows,), (rows, 1)) and info.dtype in DTYPES and rows > 1:
        return  # one per row; split-ple checks each
    if info is None:
        findings.add("ple-scale", "the table is fp8 and its scale is missing", _RESTORE, tensor=name)
    elif info.numel != 1 or info.dtype not in DTYPES:
        findings.add(
            "ple-scale",
            f"is {info.dtype} {list(info.shape)}, one number or one per row expected",
            _RESTORE,
            file=info.file.name,
            tensor=name,
        )
    elif opened.checkpoint is not None:
        value = _number(bytes(opened.checkpoint.read_bytes(info.name)), info.dtype)
        if not 0 < value < float("inf"):
            findings.add("ple-scale", f"is {value}", _RESTORE, file=info.file.name, tensor=name)


def _constants(opened: Opened, index: int, findings: Findings) -> None:
    """The three int64 tensors against the values rebuilt from config.json."""
    ngram = opened.shape.ngram
    assert ngram is not None
    for leaf, values in constants(opened.shape, index).items():
        name = f"{LAYERS}.{ngram.layer_ids[index]}.ple.ple_embedding.{leaf}"
        info = opened.tensors.get(name)
        if info is None or opened.checkpoint is None or info.shape != (len(values),) or info.dtype != "I64":
            continue  # absence and shape are reported with all other tensors
        stored = np.frombuffer(opened.checkpoint.read_bytes(info.name), "<i8").tolist()
        if stored != list(values):
            place = next(i for i, pair in enumerate(zip(stored, values, strict=True)) if pair[0] != pair[1])
            findings.add(
                "ple-constants",
                f"[{place}] is {stored[place]}, {values[place]} follows from seed {ngram.seed} and the config",
                "correct seed, vocab_size, ngram_vocab_size_base or heads_per_ngram in config.json, or download it again",
                file=info.file.name,
                tensor=name,
            )


def _number(raw: bytes, dtype: str) -> float:
    """One BF16, F16 or F32 value; numpy, because importing torch takes longer than the whole inspection."""
    if dtype == "BF16":
        raw, dtype = b"\0\0" + raw, "F32"  # bf16 is the upper half of float32
    return float(np.frombuffer(raw, "<f2" if dtype == "F16" else "<f4")[0])
