"""Manifests: the source hash of every target of one SGLang release, and how a tree compares with it.

    python -m q38.sglang_ext.manifest [TREE]

writes assets/sglang/RELEASE.json for the SGLang in TREE (the directory that holds the package `sglang`;
default: the installed one). Read what changed between two releases before you write a manifest for the new one.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from q38.base.errors import CheckFailed, InputError, Q38Error
from q38.checkpoint.index import read_json
from q38.checkpoint.writer import write_json
from q38.data import data_path
from q38.sglang_ext.source import digest, installed_tree, release, source_of
from q38.sglang_ext.targets import EDITED_FILES, all_targets

SCHEMA = "q38.sglang-targets/1"


@dataclass(frozen=True)
class Mismatch:
    """One target that is not what the manifest says. `what` is "missing" or "changed"."""

    target: str
    what: str

    def __str__(self) -> str:
        return f"{self.target} is {self.what}"


def known_releases() -> list[str]:
    """SGLang releases that have a manifest, oldest first."""
    files = data_path("assets", "sglang").glob("*.json")
    return sorted((f.stem for f in files), key=_version_key)


def load(version: str) -> dict[str, Any]:
    """The manifest of a release: `targets` and `files`, name -> SHA-256.

    Raises:
        CheckFailed: there is none for this release.
    """
    known = known_releases()
    if version not in known:
        raise CheckFailed(
            f"SGLang {version} is not a release that q38's extension knows",
            where="sglang",
            remedy=f"install {known[-1]}" if known else "build a manifest",
        )
    file = data_path("assets", "sglang", f"{version}.json")
    document: dict[str, Any] = read_json(file)
    return document


def load_files(version: str) -> dict[str, str]:
    """File -> SHA-256 of each file that `patch-sglang apply` edits, as the release has it.

    Raises:
        CheckFailed: the release is unknown.
    """
    files: dict[str, str] = load(version)["files"]
    return files


def build(tree: Path) -> dict[str, Any]:
    """The manifest of the SGLang in `tree`.

    Raises:
        InputError: a target is missing there: the extension does not fit this release.
    """
    sources = {target: source_of(tree, target) for target in all_targets()}
    missing = [target for target, source in sources.items() if source is None]
    if missing:
        raise InputError(
            f"{len(missing)} targets are missing, first {missing[0]}",
            where=tree,
            remedy="adapt q38/sglang_ext to this release",
        )
    hashes = {target: digest(source) for target, source in sources.items() if source is not None}
    files = {file: hashlib.sha256((tree / file).read_bytes()).hexdigest() for file in EDITED_FILES}
    return {"schema": SCHEMA, "release": release(tree), "targets": hashes, "files": files}


def compare(tree: Path, targets: list[str] | None = None) -> list[Mismatch]:
    """What in `tree` differs from the manifest of its release.

    Args:
        targets: the names to compare; all by default.

    Raises:
        CheckFailed: the release is unknown.
    """
    hashes = load(release(tree))["targets"]
    found = []
    for target in all_targets() if targets is None else targets:
        source = source_of(tree, target)
        if source is None:
            found.append(Mismatch(target, "missing"))
        elif hashes.get(target) != digest(source):
            found.append(Mismatch(target, "changed"))
    return found


def _version_key(version: str) -> tuple[int, ...]:
    return tuple(int(part) if part.isdigit() else 0 for part in version.split("."))


def _main() -> None:
    parser = argparse.ArgumentParser(prog="q38.sglang_ext.manifest")
    parser.add_argument("tree", type=Path, nargs="?", help="directory that holds the package sglang")
    parser.add_argument("-o", "--out", type=Path, help="file; default: assets/sglang/RELEASE.json")
    args = parser.parse_args()
    try:
        manifest = build(args.tree or installed_tree())
        out = args.out or data_path("assets", "sglang", f"{manifest['release']}.json")
        out.parent.mkdir(parents=True, exist_ok=True)
        write_json(out, manifest)
    except Q38Error as error:
        sys.stderr.write(f"q38: {error}\n")
        sys.exit(error.exit_code)
    sys.stdout.write(f"{out}: {len(manifest['targets'])} targets of SGLang {manifest['release']}\n")


if __name__ == "__main__":
    _main()
