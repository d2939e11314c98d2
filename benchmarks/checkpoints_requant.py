"""requant-int8 against `cp` of the model, and its rounding against numpy doing the same arithmetic.

    python benchmarks/checkpoints_requant.py DIR [--layers 48] [--experts 10] [--repeats 3] [--threads 2] [--warm]

Writes under DIR a model as `q38 quantize` leaves it and its bf16 source, of random values, with the release's config: 85 matrices
of the true shapes (lm_head is 248,320 x 2,560), but few experts, which are only copied. Takes turns: `cp` and fsync of the model,
requant-int8 of it, numpy. The rate per core is bf16 bytes over CPU seconds (all threads, kernel time included), so other work on
the machine does not enter; numpy is timed the same way on one thread, values in memory, without reading or writing.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from checkpoints_common import (
    CONFIG,
    MB,
    alternate,
    bf16_noise,
    child,
    copy_command,
    machine,
    median,
    remove,
    settle,
    span,
)
from numpy.typing import NDArray

from q38.checkpoint.header import ITEM_BITS
from q38.checkpoint.index import INDEX
from q38.checkpoint.writer import stream_safetensors, write_json
from q38.model.expected import Expected, quantized_tensors
from q38.recipe.bits import plan_bits, quantization_config
from q38.recipe.schema import load_recipe

RECIPE = "quality-24gb"
SHARD = 2_750_000_000
POOL = 2**25  # values; each tensor takes them from its own place on
PIECE = 4 * 2**20
GROUP = 128
SLICE = 2**18  # weights numpy rounds at a time: about what a core's cache holds


def make_pair(root: Path, *, layers: int, experts: int) -> tuple[int, int]:
    """ROOT/model and ROOT/source. Returns the bytes of the model and of the bf16 matrices to re-pack."""
    config, recipe = json.loads(CONFIG.read_text()), load_recipe(RECIPE)
    text = config["text_config"]
    text["layer_types"] = text["layer_types"][:layers]
    text |= {"num_hidden_layers": layers, "num_experts": experts, "hc_lowrank": 32}
    before, after = plan_bits(config, recipe, requantized=False), plan_bits(config, recipe)
    targets = {f"{module}.weight" for module, width in after.items() if width != before[module]}
    pool = bf16_noise(np.random.default_rng(0), POOL).view(np.uint8)
    tensors = list(quantized_tensors(config, before, recipe.quantize.group_size, mtp=False, vision=False))
    packed = {
        **config,
        "language_model_only": True,
        "quantization_config": quantization_config(before, recipe),
    }
    return (
        _write(root / "model", packed, tensors, pool),
        _write(root / "source", config, [t for t in tensors if t.name in targets], pool),
    )


def _write(out: Path, config: dict[str, Any], tensors: list[Expected], pool: NDArray[np.uint8]) -> int:
    out.mkdir(parents=True)
    write_json(out / "config.json", config)
    shards: list[list[Expected]] = [[]]
    for tensor in tensors:
        if sum(map(_bytes, shards[-1])) > SHARD:
            shards.append([])
        shards[-1].append(tensor)
    places: dict[str, str] = {}
    for i, shard in enumerate(shards):
        name = f"model-{i:05d}.safetensors"
        entries = [(t.name, t.dtypes[0], t.shape, _bytes(t)) for t in shard]
        stream_safetensors(out / name, entries, (piece for t in shard for piece in _data(t, pool)))
        places |= dict.fromkeys((t.name for t in shard), name)
    total = sum(map(_bytes, tensors))
    write_json(out / INDEX, {"metadata": {"total_size": total}, "weight_map": places})
    return total


def _data(tensor: Expected, pool: NDArray[np.uint8]) -> Iterator[memoryview]:
    left, at = _bytes(tensor), zlib.crc32(tensor.name.encode()) % POOL * 2
    while left:
        piece = pool[at : at + min(left, PIECE)]
        yield piece.data
        left, at = left - len(piece), (at + len(piece)) % len(pool)


def _bytes(tensor: Expected) -> int:
    return int(np.prod(tensor.shape)) * ITEM_BITS[tensor.dtypes[0]] // 8


def numpy_rate(rows: int = 1024, columns: int = 2560) -> float:
    """bf16 bytes per CPU second of the same rounding, error and packing in numpy: one thread, all in memory."""
    patterns = bf16_noise(np.random.default_rng(1), rows * columns).reshape(rows, columns)
    step = SLICE // columns
    out = np.empty((columns // 4, rows), np.int32)
    repeats, start = 0, time.thread_time()
    while time.thread_time() - start < 1.0:
        for first in range(0, rows, step):
            part = patterns[first : first + step]
            out[:, first : first + len(part)] = _round(part)
        repeats += 1
    return repeats * patterns.nbytes / (time.thread_time() - start)


def _round(patterns: NDArray[np.uint16]) -> NDArray[np.int32]:
    """uint16 [n, K] -> int32 words [K / 4, n], with the sums of the error on the way."""
    n, k = patterns.shape
    weight = (patterns.astype(np.uint32) << 16).view(np.float32).reshape(n, k // GROUP, GROUP)
    scales = (np.abs(weight).max(-1) / np.float32(127)).astype(np.float16).astype(np.float32)[..., None]
    codes = np.divide(weight, scales)
    np.rint(codes, out=codes)
    np.clip(codes, -128, 127, out=codes)
    error = weight - codes * scales
    _ = np.einsum("ngk,ngk->ng", error, error), np.einsum("ngk,ngk->ng", weight, weight)
    codes += 128
    words: NDArray[np.int32] = codes.astype(np.uint8).reshape(n, k).view(np.int32)
    return words.T


class Phases:
    """A Progress that times each task: label -> (wall seconds, CPU seconds of the process)."""

    def __init__(self) -> None:
        self.seconds: dict[str, tuple[float, float]] = {}

    @contextmanager
    def task(self, label: str, total: float | None, unit: str = "B", done: float = 0) -> Iterator[Phases]:
        wall, cpu = time.perf_counter(), _cpu()
        yield self
        self.seconds[label] = (time.perf_counter() - wall, _cpu() - cpu)

    def say(self, text: str) -> None: ...
    def advance(self, n: float) -> None: ...
    def note(self, text: str) -> None: ...


def _cpu() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def requant(model: Path, out: Path, source: Path, threads: int) -> None:
    """The measured child."""
    from q38.quantize.requant_int8 import requant_int8

    phases, start = Phases(), time.perf_counter()
    requant_int8(model, out, source=source, recipe=load_recipe(RECIPE), threads=threads, progress=phases)
    said = {"seconds": time.perf_counter() - start, "phases": phases.seconds}
    sys.stdout.write(json.dumps(said) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", type=Path)
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--experts", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--patience", type=float, default=600, help="seconds to wait for an idle machine")
    parser.add_argument("--warm", action="store_true")
    arguments = parser.parse_args()
    root, out = arguments.directory / "requant", arguments.directory / "requant_out"
    remove(root)
    remove(out)
    model, source = root / "model", root / "source"
    commands = {
        "cp": copy_command(model, out),
        "requant-int8": child(__file__, model, out, source, str(arguments.threads)),
    }

    def prepare() -> None:
        remove(out)
        for directory in (model, source):
            settle(directory, cold=not arguments.warm)

    try:
        nbytes, matrices = make_pair(root, layers=arguments.layers, experts=arguments.experts)
        runs = alternate(commands, prepare, arguments.repeats, arguments.patience)
    finally:
        remove(out)
        remove(root)
    copied, requanted = runs.values()
    arithmetic = [numpy_rate() / MB for _ in requanted]
    rows = [
        ("cp of the model, MB/s", [nbytes / r.seconds / MB for r in copied]),
        ("requant-int8 of the model, MB/s", [nbytes / r.work_seconds / MB for r in requanted]),
        ("rounding, MB/s of bf16", [matrices / _phase(r, 0) / MB for r in requanted]),
        ("rounding, MB/s of bf16 per core", [matrices / _phase(r, 1) / MB for r in requanted]),
        ("numpy, MB/s of bf16 per core", arithmetic),
        ("requant-int8 over cp", [median(r.seconds for r in copied) / r.work_seconds for r in requanted]),
        (
            "rounding over numpy, per core",
            [matrices / _phase(r, 1) / MB / n for r, n in zip(requanted, arithmetic, strict=True)],
        ),
        ("peak RSS of requant-int8, MB", [r.peak_bytes / MB for r in requanted]),
        ("CPU of others, % of all cores", [100 * r.others for r in [*copied, *requanted]]),
    ]
    write = sys.stdout.write
    write(
        f"{machine(arguments.directory)}\nmodel {nbytes / 1e9:.2f} GB, of it {matrices / 1e9:.2f} GB bf16 to re-pack, "
        f"{arguments.threads} threads, {'in memory' if arguments.warm else 'on disk'}\n| | median | range |\n|---|---|---|\n"
    )
    for name, values in rows:
        digits = 2 if max(values) < 10 else 0
        write(f"| {name} | {median(values):,.{digits}f} | {span(values, digits)} |\n")


def _phase(result: Any, which: int) -> float:
    """Seconds (0: wall, 1: CPU) of the rounding."""
    return float(result.said["phases"]["requant-int8: rounding"][which])


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        requant(Path(sys.argv[2]), Path(sys.argv[3]), Path(sys.argv[4]), int(sys.argv[5]))
    else:
        main()
