"""Hashes of what a step read and wrote, for telling whether it is still as it was."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

from q38.checkpoint.header import read_header
from q38.checkpoint.index import fingerprint_file
from q38.checkpoint.job import STATE
from q38.checkpoint.writer import TEMPORARY

# What a source directory is read for; a README that changes beside them changes nothing.
_SOURCE_SUFFIXES = frozenset({".json", ".safetensors", ".jinja", ".txt", ".model"})


def fingerprint_source(source: Path) -> dict[str, str]:
    """File name -> hash, for the files of a source checkpoint (shards over 64 MiB are sampled)."""
    files = sorted(p for p in source.iterdir() if p.suffix in _SOURCE_SUFFIXES and p.is_file())
    return {p.name: fingerprint(p) for p in files}


def fingerprint_outputs(paths: tuple[Path, ...], root: Path) -> dict[str, str]:
    """Name under `root` -> hash, for every finished file at or below `paths`."""
    return {str(p.relative_to(root)): fingerprint(p) for p in output_files(paths)}


def output_files(paths: tuple[Path, ...]) -> list[Path]:
    """The finished files at or below `paths`: no job state, no temporaries."""
    found: list[Path] = []
    for path in paths:
        candidates = sorted(path.rglob("*")) if path.is_dir() else [path]
        found += [p for p in candidates if p.is_file() and STATE not in p.parts and p.suffix != TEMPORARY]
    return found


def fingerprint(file: Path) -> str:
    """Hash of one file; a large safetensors file is sampled together with its header."""
    header = read_header(file).raw if file.suffix == ".safetensors" else b""
    return fingerprint_file(file, header=header)


def combine(files: Mapping[str, str]) -> str:
    """One hash for a set of files."""
    return hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()


def tree_bytes(paths: tuple[Path, ...]) -> int:
    """Bytes of all finished files at or below `paths`."""
    return sum(p.stat().st_size for p in output_files(paths))
