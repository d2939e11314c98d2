"""Random packed experts with known checksums, and readers that check rows: parts of residency_gpu.py."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch

from q38.base.units import MIB
from q38.checkpoint.index import INDEX
from q38.checkpoint.packing import symmetric_zeros
from q38.checkpoint.writer import stream_safetensors
from q38.model.shape import ModelShape
from q38.residency.cache import ExpertCache
from q38.residency.layout import ExpertLayout
from q38.residency.reader import FileReader, aligned
from q38.residency.shards import PROJECTIONS, expected_shape


class Experts:
    """Random packed experts: shared random tensors, each expert's differing by a constant of its own."""

    def __init__(self, layout: ExpertLayout) -> None:
        self.layout = layout
        rng = np.random.default_rng(38)
        self.words = {
            p: rng.integers(0, 2**32, expected_shape(p, "qweight", layout), np.uint32) for p in PROJECTIONS
        }
        self.scales = {
            p: rng.integers(0, 2**15, expected_shape(p, "scales", layout), np.uint16) & 0xBFFF
            for p in PROJECTIONS
        }
        self.zeros = {
            p: symmetric_zeros(*expected_shape(p, "scales", layout), layout.bits).numpy() for p in PROJECTIONS
        }
        self.weights = 2 * np.arange(layout.row_bytes // 8, dtype=np.uint64) + 1

    def tensors(self, row: int) -> dict[str, dict[str, np.ndarray]]:
        key = np.uint32((row * 2654435761 + 12345) & 0xFFFFFFFF)
        return {
            p: {
                "qweight": self.words[p] ^ (key + np.uint32(i)),
                "qzeros": self.zeros[p],
                "scales": self.scales[p] ^ np.uint16(int(key) & 0x3FF),
            }
            for i, p in enumerate(PROJECTIONS)
        }

    def checksum(self, row: torch.Tensor) -> int:
        return int((row.numpy().view(np.uint64) * self.weights).sum(dtype=np.uint64))

    def expected(self, tensors: dict[str, dict[str, np.ndarray]]) -> int:
        """Checksum of the row as the layout's own reference fills it."""
        row = torch.zeros(self.layout.row_bytes, dtype=torch.uint8)
        parts = [
            (torch.from_numpy(t["qweight"].view(np.int32)), torch.from_numpy(t["scales"].view(np.float16)))
            for t in tensors.values()
        ]
        self.layout.fill(row, *parts)
        return self.checksum(row)


def write_checkpoint(out: Path, config: dict[str, Any], shape: ModelShape, experts: Experts) -> np.ndarray:
    """One shard per layer, tensors in AutoRound's order; returns the checksum of every row."""
    sums = np.zeros(shape.num_layers * shape.num_experts, np.uint64)
    names: dict[str, str] = {}
    item = {"qweight": ("I32", 4), "qzeros": ("I32", 4), "scales": ("F16", 2)}

    def shard(layer: int) -> None:
        file = f"model-{layer + 1:05d}-of-{shape.num_layers:05d}.safetensors"
        prefix = f"model.language_model.layers.{layer}.mlp.experts"
        shapes = {
            (p, k): expected_shape(p, k, experts.layout) for p in sorted(PROJECTIONS) for k in sorted(item)
        }
        entries = [
            (f"{prefix}.{e}.{p}.{k}", item[k][0], s, s[0] * s[1] * item[k][1])
            for e in sorted(range(shape.num_experts), key=str)
            for (p, k), s in shapes.items()
        ]

        def data() -> Iterator[memoryview]:
            for e in sorted(range(shape.num_experts), key=str):
                tensors = experts.tensors(layer * shape.num_experts + e)
                sums[layer * shape.num_experts + e] = experts.expected(tensors)
                for p, k in shapes:
                    yield tensors[p][k].reshape(-1).view(np.uint8).data

        stream_safetensors(out / file, entries, data())
        fd = os.open(out / file, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)
        names.update({name: file for name, *_ in entries})

    out.mkdir(parents=True, exist_ok=True)
    (out / "config.json").write_text(json.dumps(config))
    with ThreadPoolExecutor(16) as workers:
        list(workers.map(shard, range(shape.num_layers)))
    (out / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": names}))
    return sums


def sequential_read(files: list[Path], threads: int, block: int = 8 * MIB) -> float:
    """GB/s of plain direct reads of whole files, in order."""
    work = [(file, begin) for file in files for begin in range(0, file.stat().st_size, block)]
    readers = {file: FileReader(file, direct=True) for file in files}
    buffers = threading.local()

    def read(item: tuple[Path, int]) -> int:
        if not hasattr(buffers, "memory"):
            buffers.memory = aligned(block)
        file, begin = item
        return len(readers[file].read(begin, min(begin + block, file.stat().st_size), buffers.memory))

    start = time.monotonic()
    with ThreadPoolExecutor(threads) as workers:
        total = sum(workers.map(read, work))
    seconds = time.monotonic() - start
    for reader in readers.values():
        reader.close()
    return total / seconds / 1e9


class Checker:
    """Reads rows on the GPU through the address table: all of them, or random ones in a captured graph."""

    def __init__(self, cache: ExpertCache, sums: np.ndarray, stream: torch.cuda.Stream) -> None:
        from q38.kernels.nvrtc import load_kernels

        self.stream, self.rows, self.words = stream, len(sums), cache.store.row_bytes // 8
        self.table = cache.store.table.tensor()
        self.expected = torch.from_numpy(sums.view(np.int64)).cuda()
        self.counters = torch.zeros(3, dtype=torch.int64, device="cuda")
        self.check, self.advance = load_kernels(
            Path(__file__).with_name("residency_check.cu"), {}, ("check_rows", "next_step")
        )
        self._step()
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, stream=stream):
            self._step()

    def _step(self) -> None:
        self._launch(480, 0)
        self.advance.launch((1, 1), 1, [self.counters], stream=torch.cuda.current_stream().cuda_stream)

    def _launch(self, blocks: int, everything: int) -> None:
        arguments = [self.table, self.expected, self.counters, self.rows, self.words, everything]
        self.check.launch((blocks, 1), 256, arguments, stream=torch.cuda.current_stream().cuda_stream)

    def replay(self, n: int) -> None:
        with torch.cuda.stream(self.stream):
            for _ in range(n):
                self.graph.replay()

    def totals(self) -> tuple[int, int, int]:
        """(rows that differed, rows read, replays) so far."""
        self.stream.synchronize()
        wrong, read, steps = self.counters.tolist()
        return wrong, read, steps

    def check_all(self) -> tuple[int, float]:
        """(rows that differ, seconds) of reading every row once."""
        before, start = self.totals()[0], time.monotonic()
        with torch.cuda.stream(self.stream):
            self._launch(self.rows, 1)
        wrong = self.totals()[0] - before
        return wrong, time.monotonic() - start


class FakeChecker:
    """The same on the fake driver, in Python."""

    def __init__(self, cache: ExpertCache, sums: np.ndarray, experts: Experts) -> None:
        self.cache, self.sums, self.experts, self.random = cache, sums, experts, np.random.default_rng(1)
        self.wrong = self.read = self.steps = 0

    def _table(self) -> np.ndarray:
        table = self.cache.store.table
        return self.cache.store.driver.bytes_at(table.address, table.nbytes).view(np.int64).copy()  # type: ignore[attr-defined]

    def _check(self, rows: Any, table: np.ndarray) -> None:
        for row in rows:
            data = self.cache.store.driver.bytes_at(int(table[row]), self.cache.store.row_bytes)  # type: ignore[attr-defined]
            self.wrong += self.experts.checksum(torch.from_numpy(data.copy())) != int(self.sums[row])
            self.read += 1

    def replay(self, n: int) -> None:
        for _ in range(n):
            self.steps += 1
            seen: list[np.ndarray] = []
            rows = self.random.integers(0, len(self.sums), 6)
            driver: Any = self.cache.store.driver
            driver.launch(self.cache.store.stream, lambda seen=seen: seen.append(self._table()))
            driver.launch(self.cache.store.stream, lambda seen=seen, rows=rows: self._check(rows, seen[0]))

    def totals(self) -> tuple[int, int, int]:
        self.cache.store.driver.synchronize(self.cache.store.stream)
        return self.wrong, self.read, self.steps

    def check_all(self) -> tuple[int, float]:
        before = self.wrong
        self._check(range(len(self.sums)), self._table())
        return self.wrong - before, 0.0
