"""What a quantization method is: something that writes the shards of the blocks of a plan."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from q38.base.progress import Progress
from q38.checkpoint.index import Checkpoint
from q38.checkpoint.job import Job
from q38.checkpoint.writer import FileRecord
from q38.quantize.plan import Plan
from q38.recipe.schema import Recipe


@dataclass(frozen=True)
class Work:
    """One quantization: from which source, to where, by which plan."""

    source: Checkpoint
    out: Path
    plan: Plan
    recipe: Recipe
    progress: Progress


class Method(Protocol):
    """All methods write the same files; they differ in how the packed matrices come about.

    A method checks everything it needs when it is made, before anything is written.
    """

    def identity(self) -> dict[str, Any]:
        """What its output depends on beside the source and the recipe's quantize section."""

    def run(self, job: Job, last: int) -> None:
        """Write and commit the shard of every block up to `last` that `job.done` lacks, in order.

        Each block is committed under its shard's unit with {"seconds": ...} and what else it measured.
        """

    def facts(self) -> dict[str, Any]:
        """Fields that it adds to the quantization_config of the output."""

    def extra_files(self, job: Job) -> dict[str, FileRecord]:
        """Write what it has to tell beside the shards, once all blocks are committed: file name -> record."""
