"""`q38 release diff`: which files and tensors of two releases differ, and by how much."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from q38.base.files import require_directory
from q38.base.progress import SILENT, Progress, Task
from q38.checkpoint.index import INDEX, SINGLE, Checkpoint
from q38.measure.checks import finite
from q38.model.names import PACKED_SUFFIXES, Group, classify, module_of
from q38.ple.find import PLE_JSON
from q38.ple.table import read_info
from q38.release.layout import PLE, files_below
from q38.release.tensors import (
    Distance,
    Side,
    changed_names,
    compare_matrix,
    compare_tensor,
    describe,
    file_as_tensor,
)
from q38.release.varying import WHOLE, fields_of, same_but_for_fields, without

SCHEMA = "q38.release-diff/1"
SHOWN_KEYS = 20  # keys of a JSON file
SHOWN_TENSORS = 1000  # rows of the document, the largest differences first
_CHUNK = 2**22
_TABLE = ".bin"
_SMALL = 2**26  # bytes up to which a file is compared as a document


def diff(a: Path, b: Path, *, progress: Progress = SILENT) -> dict[str, Any]:
    """Compare two releases, or two model directories, byte by byte; no seal is trusted.

    Returns:
        {"schema", "a", "b", "same", "identical", "files", "tensor_count", "tensors", "groups"}. `identical`: every byte is.
        `same`: what differs is declared to vary between two builds (`q38.release.varying`). Each file has "file",
        "state" ("changed", "only in A", "only in B"), "declared", "a" and "b" (bytes) and "keys" (of a JSON file: the
        first that differ). Tensors: see `q38.release.tensors.Distance`. groups: parameter group -> how many
        of its tensors differ and the largest differences.

    Raises:
        InputError: a directory is missing or a shard is damaged.
    """
    for root in (a, b):
        require_directory(root, remedy="give two releases or model directories")
    files = list(_compare_files(files_below(a), files_below(b), progress))
    tensors = sorted(_compare_tensors(a, b, files, progress), key=_rank)
    return {
        "schema": SCHEMA,
        "a": str(a),
        "b": str(b),
        "same": all(row["declared"] for row in files),
        "identical": not files,
        "files": files,
        "tensor_count": len(tensors),
        "tensors": [t.to_dict() for t in tensors[:SHOWN_TENSORS]],
        "groups": _groups(tensors),
    }


def _compare_files(a: dict[str, Path], b: dict[str, Path], progress: Progress) -> Iterator[dict[str, Any]]:
    """One row per file that differs."""
    both = sorted(a.keys() & b.keys())
    with progress.task("files", sum(a[name].stat().st_size for name in both)) as task:
        for name in sorted(a.keys() | b.keys()):
            if name not in b or name not in a:
                sizes = [side[name].stat().st_size if name in side else None for side in (a, b)]
                where = "only in A" if name in a else "only in B"
                yield _row(name, where, sizes, declared=fields_of(name) == WHOLE)
            elif not _same(a[name], b[name], task):
                yield _changed(name, a[name], b[name])


def _changed(name: str, a: Path, b: Path) -> dict[str, Any]:
    sizes = [a.stat().st_size, b.stat().st_size]
    if max(sizes) > _SMALL:
        return _row(name, "changed", sizes, declared=False)
    texts = a.read_bytes(), b.read_bytes()
    return _row(name, "changed", sizes, declared=same_but_for_fields(name, *texts), keys=_keys(name, *texts))


def _row(
    name: str,
    state: str,
    sizes: list[int | None] | list[int],
    *,
    declared: bool,
    keys: list[str] | None = None,
) -> dict[str, Any]:
    return {
        "file": name,
        "state": state,
        "declared": declared,
        "a": sizes[0],
        "b": sizes[1],
        "keys": keys or [],
    }


def _same(a: Path, b: Path, task: Task) -> bool:
    size = a.stat().st_size
    if a.samefile(b):
        task.advance(size)
        return True
    if size != b.stat().st_size:
        return False
    with a.open("rb", buffering=0) as one, b.open("rb", buffering=0) as other:
        while chunk := one.read(_CHUNK):
            task.advance(len(chunk))
            if chunk != other.read(_CHUNK):
                return False
    return True


def _keys(name: str, a: bytes, b: bytes) -> list[str]:
    """Dotted keys of a JSON file that differ and are not declared to; nothing for other files."""
    if not name.endswith(".json"):
        return []
    try:
        one, other = (without(json.loads(text), fields_of(name)) for text in (a, b))
    except ValueError:
        return []
    return [f"{key}: {before} -> {now}" for key, before, now in _differences(one, other)][:SHOWN_KEYS]


def _differences(a: Any, b: Any, path: str = "") -> Iterator[tuple[str, str, str]]:
    if isinstance(a, dict) and isinstance(b, dict):
        for key in sorted(a.keys() | b.keys()):
            yield from _differences(a.get(key), b.get(key), f"{path}.{key}" if path else key)
    elif a != b:
        yield path, _short(a), _short(b)


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 40 else text[:37] + "..."


def _compare_tensors(a: Path, b: Path, files: list[dict[str, Any]], progress: Progress) -> Iterator[Distance]:
    """The tensors in files that differ, and the n-gram table where its file does."""
    changed = {row["file"] for row in files}
    if any(name.startswith(f"{PLE}/") for name in changed):
        yield from _compare_tables(a / PLE, b / PLE)
    shards = {name for name in changed if name.endswith(".safetensors") and "/" not in name}
    if not shards or not all(_holds_checkpoint(root) for root in (a, b)):
        return
    sides = Side(Checkpoint.open(a)), Side(Checkpoint.open(b))
    one, other = (side.checkpoint.tensors for side in sides)
    names = changed_names(sides[0].checkpoint, sides[1].checkpoint, shards)
    modules = {module_of(name) for name in names if name.endswith(PACKED_SUFFIXES)}
    with progress.task("tensors", len(names), "tensors") as task:
        for module in sorted(modules):
            task.note(module)
            if (found := compare_matrix(*sides, module)) is not None:
                yield found
        for name in names:
            task.advance(1)
            if module_of(name) in modules:
                continue
            if name not in one or name not in other:
                labels = (describe(one[name]), "-") if name in one else ("-", describe(other[name]))
                yield Distance(name, "only in A" if name in one else "only in B", *labels)
            elif (found := compare_tensor(one[name], other[name])) is not None:
                yield found


def _compare_tables(a: Path, b: Path) -> Iterator[Distance]:
    if not (a / PLE_JSON).is_file() or not (b / PLE_JSON).is_file():
        return
    infos = [read_info(directory) for directory in (a, b)]
    tables = [
        file_as_tensor(d / i.file, i.dtype, (i.rows, i.dim)) for d, i in zip((a, b), infos, strict=True)
    ]
    scales = infos[0].weight_scale or 1.0, infos[1].weight_scale or 1.0
    if (found := compare_tensor(tables[0], tables[1], scales=scales)) is not None:
        yield found


def _holds_checkpoint(root: Path) -> bool:
    return (root / "config.json").is_file() and any((root / name).is_file() for name in (INDEX, SINGLE))


def _rank(distance: Distance) -> tuple[bool, float, str]:
    """Tensors that cannot be subtracted first, then by relative error."""
    error = distance.relative_error
    return error is not None, -(error or 0.0), distance.name


def _groups(tensors: list[Distance]) -> list[dict[str, Any]]:
    """Per parameter group: tensors that differ, and the largest differences among them."""
    members: dict[Group, list[Distance]] = defaultdict(list)
    for tensor in tensors:
        members[Group.NGRAM if tensor.name.endswith(_TABLE) else classify(tensor.name)].append(tensor)
    return [
        {
            "group": str(group),
            "tensors": len(own),
            "max_abs": max((finite(t.max_abs) or 0.0 for t in own if t.max_abs is not None), default=None),
            "relative_error": max((e for t in own if (e := t.relative_error) is not None), default=None),
        }
        for group, own in sorted(members.items(), key=lambda item: -len(item[1]))
    ]
