"""What a run is about, read before anything is written."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from q38.base.errors import InputError
from q38.pipeline.fingerprint import fingerprint_source
from q38.pipeline.steps import Step, Workdir, plan_steps
from q38.recipe.schema import Recipe, load_recipe


@dataclass(frozen=True)
class Setup:
    """The recipe, the source directory (None for a synthetic model), and the steps."""

    recipe: Recipe
    source: Path | None
    work: Workdir
    steps: list[Step]

    @property
    def step_names(self) -> list[str]:
        return [step.name for step in self.steps]

    def source_files(self) -> dict[str, str]:
        """File name -> hash of the source; empty for a synthetic model."""
        return fingerprint_source(self.source) if self.source else {}

    def portable(self, text: str | Path) -> str:
        """An argument with the directory of the run, or of the source, replaced by a fixed word."""
        text, root, source = str(text), str(self.work.root), str(self.source)
        if text.startswith(
            f"{root}/"
        ):  # never alone: `--workdir tiny` must not change the word in `synth tiny`
            return "WORKDIR" + text.removeprefix(root)
        if self.source is not None and (text == source or text.startswith(f"{source}/")):
            return "SOURCE" + text.removeprefix(source)
        return text


def prepare(recipe: str | Path, workdir: Path, source: Path | None = None) -> Setup:
    """Read the recipe and plan the steps.

    Raises:
        InputError: a bad recipe, no source, or a source that is no directory.
    """
    parsed = load_recipe(recipe)
    origin = parsed.source
    if source is None and origin is not None and origin.path is not None:
        source = Path(origin.path).expanduser()
    if source is None and origin is None:
        raise InputError(
            "the recipe names no source", where=str(recipe), remedy="give the checkpoint with --source DIR"
        )
    if source is not None and not source.is_dir():
        raise InputError(
            "no such directory", where=source, remedy="give the directory of the source checkpoint"
        )
    work = Workdir(workdir)
    if source is not None:
        _refuse_output(source, work)
    return Setup(parsed, source, work, plan_steps(parsed, source, work))


def _refuse_output(source: Path, work: Workdir) -> None:
    """A source that lies where a step writes would be removed with that step's output."""
    place = source.resolve()
    for output in work.outputs():
        if place.is_relative_to(output.resolve()):
            raise InputError(
                f"lies where this run writes ({output})", where=source, remedy="choose another --workdir"
            )
