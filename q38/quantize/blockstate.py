"""Progress through the blocks: what is finished, and the activations the next block starts from.

AutoRound chains two things from block to block: the reference output of the unquantized block, and
the output of the quantized one. Both are kept after each block in one file, written atomically
before the block is recorded, so that a run killed at any point goes on bit for bit.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from q38.checkpoint.header import read_header
from q38.checkpoint.index import to_torch_dtype
from q38.checkpoint.writer import dtype_name, stream_safetensors, tensor_bytes

Activations = list[torch.Tensor]  # one per sample, [1, T, hc_count * hidden_size]
_FILE = re.compile(r"^activations-(\d+)\.safetensors$")


def state_file(directory: Path, done: int) -> Path:
    """Where the activations lie that block `done` (zero-based) starts from."""
    return directory / f"activations-{done}.safetensors"


class BlockState:
    """Stands in for auto_round.utils.resume.ResumeState, whose methods and attributes it offers.

    Args:
        directory: where the activations are kept.
        done: blocks finished by an earlier process, as the journal has it.
        total: blocks of the model.
        seed: the random state of block i is set from seed + i, so that no block depends on how many
            blocks this process has done.
        started: called once, when the first block of this process begins.
        finished: called with the block's index once its activations are safe; records the block.
        ended: called with the block's index when nothing of it is left to do; may end the run by raising.
    """

    def __init__(
        self,
        directory: Path,
        *,
        done: int,
        total: int,
        seed: int,
        finished: Callable[[int], None],
        started: Callable[[], None] = lambda: None,
        ended: Callable[[int], None] = lambda block: None,
    ) -> None:
        self._directory = directory
        self._total = total
        self._seed = seed
        self._finished, self._started, self._ended = finished, started, ended
        self.resume_index = done

    def start(self) -> BlockState:
        """Called when AutoRound is about to enter the first block."""
        self._started()
        self._reseed()
        return self

    def load_input_ids(self) -> Activations | None:
        """Reference outputs of the last finished block: what the next one is compared against."""
        return self._load("reference")

    def load_q_input(self) -> Activations | None:
        """Outputs of the last finished block as quantized; None if the method does not chain them."""
        return self._load("quantized")

    def mark_block_done(self, name: str, q_input: Any, input_ids: Any) -> None:
        """Keep what the next block needs, then record this one."""
        del name
        done = self.resume_index + 1
        if done < self._total:
            self._save(done, {"reference": input_ids, "quantized": q_input})
        self._finished(self.resume_index)
        self.resume_index = done
        self._remove_others()
        self._reseed()
        self._ended(done - 1)

    def clear(self) -> None:
        """Part of AutoRound's interface; the job removes its own state."""

    def _reseed(self) -> None:
        seed = self._seed + self.resume_index
        random.seed(seed)
        np.random.seed(seed % 2**32)
        torch.manual_seed(seed)

    def _save(self, done: int, chains: dict[str, Any]) -> None:
        tensors = {
            f"{chain}.{i}": t for chain, values in chains.items() for i, t in enumerate(_samples(values))
        }
        entries = [
            (name, dtype_name(t.dtype), tuple(t.shape), t.numel() * t.element_size())
            for name, t in tensors.items()
        ]
        stream_safetensors(
            state_file(self._directory, done), entries, (tensor_bytes(t.cpu()) for t in tensors.values())
        )

    def _load(self, chain: str) -> Activations | None:
        if self.resume_index in (0, self._total):
            return None
        header = read_header(state_file(self._directory, self.resume_index))
        infos = [info for info in header.tensors.values() if info.name.startswith(chain + ".")]
        infos.sort(key=lambda info: int(info.name.rpartition(".")[2]))
        return [
            torch.frombuffer(_read(info.file, info.begin, info.nbytes), dtype=to_torch_dtype(info.dtype)).view(info.shape)
            for info in infos
        ] or None  # fmt: skip

    def _remove_others(self) -> None:
        for path in self._directory.iterdir():
            if (match := _FILE.match(path.name)) and int(match[1]) != self.resume_index:
                path.unlink()


def _samples(values: Any) -> Iterator[torch.Tensor]:
    if values is None:
        return
    if not isinstance(values, list) or not all(isinstance(v, torch.Tensor) for v in values):
        raise TypeError(f"AutoRound chains {type(values).__name__} between blocks, not a list of tensors")
    yield from values


def _read(file: Path, begin: int, size: int) -> bytearray:
    buffer = bytearray(size)
    with file.open("rb") as f:
        f.seek(begin)
        f.readinto(buffer)
    return buffer
