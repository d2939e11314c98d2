"""What a release is made of: the files, and what is known of how they came about. Nothing is written here."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from q38.base.errors import CheckFailed, InputError
from q38.base.files import require_directory
from q38.checkpoint.index import fingerprint_file, read_json
from q38.checkpoint.job import MANIFEST, STATE, read_manifest
from q38.checkpoint.writer import TEMPORARY
from q38.inspection.findings import Severity
from q38.inspection.report import inspect
from q38.ple.find import find_ple
from q38.recipe.schema import load_recipe
from q38.release.layout import MAX_FILE, PLE, RECORDS, TOOLS, files_below
from q38.release.licence import find_licence

SHOWN = 3  # files named in a refusal
# Report -> how the schema of its document begins.
SCHEMAS = {"quality": "q38.verify/", "speed": "q38.bench/", "behaviour": "q38.verify-server/"}


@dataclass(frozen=True)
class Item:
    """One file that a release takes: `source` as it is, or `data` where that is given.

    sha256: what the manifest of the step that wrote `source` says.
    """

    source: Path | None = None
    data: bytes | None = None
    sha256: str | None = None

    @property
    def nbytes(self) -> int:
        if self.data is not None:
            return len(self.data)
        assert self.source is not None
        return self.source.stat().st_size

    @property
    def identity(self) -> str:
        """Hash of the contents (sampled over 64 MiB), for telling whether an input changed between two calls."""
        if self.sha256 is not None:
            return self.sha256
        if self.data is not None:
            return hashlib.sha256(self.data).hexdigest()
        assert self.source is not None
        return fingerprint_file(self.source)


@dataclass
class Contents:
    """The files of a release by name, the facts that RELEASE.json holds, and the name of the model."""

    name: str
    files: dict[str, Item] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)


def from_model(
    model: Path,
    *,
    ple: Path | None = None,
    source: Path | None = None,
    recipe: Path | None = None,
    quality: Path | None = None,
    speed: Path | None = None,
    behaviour: Path | None = None,
) -> Contents:
    """A finished model directory, with the reports that are given beside it.

    Args:
        model: what `q38 quantize` or `q38 requant-int8` wrote.
        ple: directory of the split n-gram table; default MODEL/ple or beside MODEL.
        source: the checkpoint it was made from, for its licence.
        recipe: the recipe file it was made by.
        quality: JSON document of `q38 verify`.
        speed: JSON document of `q38 bench serve`.
        behaviour: JSON document of `q38 verify --server`.

    Raises:
        InputError: a directory is unfinished, holds files that its manifest does not list, or a link that
            leaves it; the checkpoint has faults; a report is none.
    """
    contents = Contents(model.resolve().name)
    contents.files |= listed(model, apart=(PLE,))
    manifest = read_json(model / MANIFEST)
    table = find_ple(model, ple)
    if table is not None:
        contents.files |= {f"{PLE}/{name}": item for name, item in listed(table).items()}
    _require_whole(model)
    contents.facts = {
        "recipe": None,
        "calibration": (manifest.get("result") or {}).get("calibration"),
        "source": manifest["identity"].get("source"),
        "steps": [_step(manifest)] + ([_step(read_json(table / MANIFEST))] if table else []),
        "made_on": None,
        "packages": manifest["versions"],
        "reports": {},
    }
    if recipe is not None:
        contents.files[f"{TOOLS}/recipe.yaml"] = Item(recipe.resolve())
        contents.facts["recipe"] = recipe_facts(recipe)
    for kind, file in (("quality", quality), ("speed", speed), ("behaviour", behaviour)):
        if file is not None:
            require_schema(file, SCHEMAS[kind])
            contents.files[f"{RECORDS}/{kind}.json"] = Item(file.resolve())
            contents.facts["reports"][kind] = f"{RECORDS}/{kind}.json"
    add_licence(contents, source)
    return contents


def listed(directory: Path, *, apart: Sequence[str] = ()) -> dict[str, Item]:
    """The files of a finished directory by its manifest, which must list every one. Folders in `apart` are left out.

    Raises:
        InputError: no such directory, unfinished, or it holds other files than the manifest says.
    """
    require_directory(directory, remedy="give the directory of a finished model")
    if (directory / STATE).is_dir():
        job = directory / STATE / "job.json"
        step = read_json(job)["step"] if job.exists() else "a step"
        raise InputError(
            f"is not finished: q38 {step} was stopped here",
            where=directory,
            remedy="give that command again; it goes on",
        )
    manifest = read_manifest(directory)
    if manifest is None:
        raise InputError(
            f"has no {MANIFEST}, so nothing says that it is whole",
            where=directory,
            remedy="make it with q38 quantize or q38 requant-int8",
        )
    root = directory.resolve()
    found = {n: p for n, p in files_below(directory).items() if n.partition("/")[0] not in apart}
    for name, path in found.items():
        if path.is_symlink() and not path.resolve().is_relative_to(root):
            raise InputError(
                "is a link that leaves the directory", where=path, remedy="put the file itself in its place"
            )
        if name.endswith(TEMPORARY):
            raise InputError(
                "is a file that was not finished", where=path, remedy="give the command that wrote it again"
            )
    strangers = [name for name in found if name not in manifest["files"] and name != MANIFEST]
    if strangers:
        more = f" and {len(strangers) - SHOWN} more" if len(strangers) > SHOWN else ""
        raise InputError(
            f"holds files that its {MANIFEST} does not list: {', '.join(strangers[:SHOWN])}{more}",
            where=directory,
            remedy="move them away",
        )
    items = {MANIFEST: Item((directory / MANIFEST).resolve())}
    for name, record in manifest["files"].items():
        path = directory / name
        if not path.is_file() or path.stat().st_size != record["bytes"]:
            raise InputError(
                f"is missing or of another size than {MANIFEST} says", where=path, remedy="make it again"
            )
        items[name] = Item(path.resolve(), sha256=record["sha256"])
    return items


def _require_whole(model: Path) -> None:
    """Refuse a checkpoint in which `q38 inspect` finds an error."""
    inspection = inspect(model)
    worst = next((f for f in inspection.findings.ordered() if f.severity is Severity.ERROR), None)
    if worst is not None:
        raise CheckFailed(
            f"has faults: {worst.what}", where=model, remedy="see q38 inspect; a release must have none"
        )


def recipe_facts(file: Path) -> dict[str, Any]:
    """Name, hash of the resolved recipe, and the full text. Raises InputError for a bad recipe."""
    recipe = load_recipe(file)
    return {"name": recipe.name, "sha256": recipe.sha256, "text": file.read_text(encoding="utf-8")}


def require_schema(file: Path, prefix: str) -> dict[str, Any]:
    """The JSON document of a verb. Raises InputError where it is of another."""
    value = read_json(file)
    if not str(value.get("schema", "")).startswith(prefix):
        raise InputError(
            f"is no {prefix.rstrip('/')} document",
            where=file,
            remedy="give what the verb printed with --json",
        )
    return value


def add_licence(contents: Contents, source: Path | None) -> None:
    """Take over the licence of the source checkpoint: its files, and what its model card says."""
    licence = find_licence(source)
    contents.facts["licence"] = licence.to_dict()
    # A file that the model has of its own stays: its manifest lists it.
    contents.files = {path.name: Item(path.resolve()) for path in licence.files} | contents.files


def require_uploadable(contents: Contents) -> None:
    """Refuse a file that the hub would not take."""
    for name, item in contents.files.items():
        if item.nbytes > MAX_FILE:
            raise InputError(
                f"{name} has {item.nbytes:,} bytes, the hub takes {MAX_FILE:,}",
                where=item.source or name,
                remedy="split it",
            )


def _step(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """A step of which only the manifest is left."""
    keys = ("step", "created", "q38", "versions")
    return {"command": None, **{key: manifest.get(key) for key in keys}}
