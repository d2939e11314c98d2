"""What a release takes from a finished run: model, n-gram table, profile, oracle, recipe, reports, history."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

from q38.base.errors import InputError
from q38.checkpoint.index import read_json
from q38.checkpoint.job import MANIFEST
from q38.pipeline.fingerprint import fingerprint
from q38.pipeline.state import Record, RunState, lock
from q38.pipeline.steps import Workdir, plan_steps
from q38.recipe.schema import load_recipe
from q38.release.collect import Contents, Item, add_licence, from_model, recipe_facts
from q38.release.layout import RECORDS, TOOLS

Roots = tuple[tuple[Path, str], ...]  # directory -> the word in its place


def is_run(directory: Path) -> bool:
    """Whether this is the directory of a run."""
    return Workdir(directory).state.is_file()


def from_run(workdir: Path, *, source: Path | None = None, behaviour: Path | None = None) -> Contents:
    """Collect a finished run. Paths of this machine are replaced by WORKDIR and SOURCE wherever they are quoted.

    Args:
        source: the source checkpoint, for its licence; default: the one that the run read.
        behaviour: JSON document of `q38 verify --server`, which a run does not make.

    Raises:
        InputError: the run is not finished, is going on, or one of its files changed since it was written.
    """
    work = Workdir(workdir)
    state = RunState.load(work)
    assert state is not None  # is_run
    recipe = load_recipe(work.recipe)
    with lock(work):
        origin = _origin(state, work)
        steps = plan_steps(recipe, origin if state.source else None, work)  # no source: a synthetic one
        for step in steps:
            record = state.steps.get(step.name)
            if record is None or not record.ok:
                raise InputError(
                    f"step {step.name} is not done",
                    where=workdir,
                    remedy="give the q38 run command again; it goes on",
                )
        contents = from_model(work.model, ple=work.ple, behaviour=behaviour)
        contents.name = recipe.name
        written = {path for step in steps for path in step.writes}  # by this recipe
        for path in (work.placement, work.oracle, work.oracle_layers):
            if path not in written:
                continue
            _require_unchanged(path, state, work)
            contents.files[f"{TOOLS}/{path.name}"] = Item(path.resolve())
        contents.files[f"{TOOLS}/recipe.yaml"] = Item(work.recipe.resolve())
        roots = (*((root, "WORKDIR") for root in _roots(state, work)), (origin, "SOURCE"))
        for name, path in _records(work).items():
            contents.files[f"{RECORDS}/{name}"] = Item(data=portable(path.read_text("utf-8"), roots).encode())
        contents.facts |= {
            "recipe": recipe_facts(work.recipe),
            "steps": [_step(record, work, roots) for record in state.steps.values()],
            "made_on": state.machine or None,
            "packages": state.packages or state.versions,
            "reports": {
                **contents.facts["reports"],
                "quality": f"{RECORDS}/steps/verify.json",
                "speed": f"{RECORDS}/bench.json",
            },
        }
        contents.facts["calibration"] = _calibration(work)
        add_licence(contents, source or origin)
    return contents


def portable(text: str, roots: Roots) -> str:
    """A text with directories of this machine replaced by words, where they begin a path.

    A relative directory is replaced only where a slash follows: alone, it is a word like any other.
    """
    for root, word in roots:
        # The shorter spelling may be a part of the longer one.
        for path in sorted({str(root), str(root.absolute())}, key=len, reverse=True):
            end = r"(?![\w.-])" if path.startswith("/") else "(?=/)"
            text = re.sub(rf"(?<![\w./-]){re.escape(path)}{end}", word, text)
    return text


def _origin(state: RunState, work: Workdir) -> Path:
    """The source checkpoint of the run, from the command of the step that looked at it."""
    record = state.steps.get("inspect")
    if not state.source or record is None:
        return work.synth
    words = shlex.split(record.command)
    return Path(words[words.index("inspect") + 1])


def _roots(state: RunState, work: Workdir) -> list[Path]:
    """Where the directory of the run is, and where it was when its steps ran: it may have been moved."""
    commands = [shlex.split(record.command) for record in state.steps.values()]
    roots = {work.root, *(Path(w[w.index("-o") + 1]).parent for w in commands if "-o" in w)}
    return sorted(roots, key=lambda root: (-len(root.parts), root))


def _require_unchanged(path: Path, state: RunState, work: Workdir) -> None:
    name = str(path.relative_to(work.root))
    known = {key: value for record in state.steps.values() for key, value in record.outputs.items()}
    if not path.is_file() or fingerprint(path) != known.get(name):
        raise InputError(
            "is missing, or changed since its step wrote it",
            where=path,
            remedy="give the q38 run command again; it says what to redo",
        )


def _records(work: Workdir) -> dict[str, Path]:
    """Name below records/ -> file: reports, the document of each step, the manifests of earlier steps."""
    found = {path.name: path for path in (work.page, work.report, work.bench)}
    found |= {f"steps/{path.name}": path for path in sorted(work.result("x").parent.glob("*.json"))}
    for directory in (work.synth, work.quantized):
        if (directory / MANIFEST).is_file():
            found[f"manifests/{directory.name}.json"] = directory / MANIFEST
    return found


def _calibration(work: Workdir) -> Any:
    """What the model was tuned on: facts of the manifest of quantize; None where nothing was tuned."""
    return read_json(work.quantized / MANIFEST)["result"].get("calibration")


def _step(record: Record, work: Workdir, roots: Roots) -> dict[str, Any]:
    """A step as RELEASE.json tells it."""
    manifests = [work.root / name for name in record.outputs if name.endswith(f"/{MANIFEST}")]
    versions = read_json(manifests[0])["versions"] if manifests else None
    return {
        "step": record.name,
        "command": portable(record.command.removesuffix(" --json"), roots),
        "started": record.started,
        "seconds": record.seconds,
        "peak_memory": record.peak_memory,
        "versions": versions,
    }
