"""split-ple of an fp8 n-gram table against `cp` of the same bytes.

    python benchmarks/checkpoints_split_ple.py DIR [--gb 4] [--repeats 5] [--patience 600] [--warm]

Writes a source of random fp8 codes under DIR (shards as large as the release's), then takes turns: `cp` and fsync of every file,
then split-ple, whose table is fsynced as it grows. The source is read from disk each time, or with --warm from the page cache.
split-ple also hashes what it writes, on one core: the rate of sha256 stands beside, and split-ple without it. The seconds of split-ple
leave out what importing Python modules takes, which 51 GB do not notice. Each run waits for an idle machine, and one that
other processes disturbed is repeated, as long as --patience lasts.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from checkpoints_common import (
    CONFIG,
    MB,
    alternate,
    child,
    copy_command,
    machine,
    median,
    remove,
    settle,
    span,
)

from q38.checkpoint.index import INDEX
from q38.checkpoint.writer import stream_safetensors, write_json
from q38.model.expected import ngram_tensors
from q38.model.shape import ModelShape

BLOCK = 4 * 2**20


def make_source(out: Path, nbytes: int) -> int:
    """A checkpoint that holds an fp8 table of about `nbytes` and nothing else. Returns its bytes."""
    config = json.loads(CONFIG.read_text())
    text = config["text_config"]
    whole = ModelShape.from_config(config).ngram
    assert whole is not None
    part = nbytes / (whole.vocab_base * whole.heads * whole.dim)
    text["ngram_vocab_size_base"] = int(whole.vocab_base * part)
    text["split_ngram_parts"] = max(round(whole.parts * part), 1)
    out.mkdir(parents=True)
    write_json(out / "config.json", config)
    rng = np.random.default_rng(0)
    places: dict[str, str] = {}
    total = 0
    for tensor in ngram_tensors(ModelShape.from_config(config), "fp8"):
        if ".ngram_embedding." not in tensor.name:
            continue
        width = 2 if tensor.dtypes[0] == "BF16" else 1
        size = int(np.prod(tensor.shape)) * width
        data = [b"\x80\x39"] if width == 2 else _codes(rng, size)
        name = f"model-{len(places):05d}.safetensors"
        stream_safetensors(out / name, [(tensor.name, tensor.dtypes[0], tensor.shape, size)], data)
        places[tensor.name] = name
        total += size
    write_json(out / INDEX, {"metadata": {"total_size": total}, "weight_map": places})
    return total


def _codes(rng: np.random.Generator, size: int) -> Iterator[memoryview]:
    for start in range(0, size, BLOCK):
        # Bit 6 cleared: no NaN code.
        yield (rng.integers(0, 256, min(BLOCK, size - start), np.uint8) & 0xBF).data


def sha256_rate(seconds: float = 1.0) -> float:
    """Bytes per CPU second of one thread."""
    block, digest, done = bytes(BLOCK), hashlib.sha256(), 0
    start = time.thread_time()
    while time.thread_time() - start < seconds:
        digest.update(block)
        done += BLOCK
    return done / (time.thread_time() - start)


class NoHash:
    """Stands in for sha256 to show what hashing costs."""

    def update(self, data: object) -> None: ...

    def copy(self) -> NoHash:
        return self

    def hexdigest(self) -> str:
        return ""


def split(source: Path, out: Path, *, hashing: bool) -> None:
    """The measured child."""
    from q38.ple import split as module
    from q38.ple.split import split_ple

    if not hashing:
        module.hashlib = SimpleNamespace(sha256=NoHash)  # type: ignore[attr-defined, assignment]
    start = time.perf_counter()
    split_ple(source, out)
    sys.stdout.write(json.dumps({"seconds": time.perf_counter() - start}) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", type=Path)
    parser.add_argument("--gb", type=float, default=4.0)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--patience", type=float, default=600, help="seconds to wait for an idle machine")
    parser.add_argument("--warm", action="store_true")
    arguments = parser.parse_args()
    source, out = arguments.directory / "split_source", arguments.directory / "split_out"
    remove(source)
    nbytes = make_source(source, int(arguments.gb * 10**9))
    commands = {
        "cp": copy_command(source, out),
        "split-ple": child(__file__, source, out),
        "split-ple without sha256": child(__file__, source, out, "bare"),
    }

    def prepare() -> None:
        remove(out)
        settle(source, cold=not arguments.warm)

    try:
        runs = alternate(commands, prepare, arguments.repeats, arguments.patience)
    finally:
        remove(out)
        remove(source)
    rates = {name: [nbytes / r.work_seconds / MB for r in found] for name, found in runs.items()}
    copy = median(rates["cp"])
    write = sys.stdout.write
    write(
        f"{machine(arguments.directory)}\n"
        f"{nbytes / 1e9:.2f} GB, source {'in memory' if arguments.warm else 'on disk'}\n"
    )
    write(
        "| | runs | MB/s, median | range | of cp | CPU s | peak RSS MB | others' CPU |\n|---|---|---|---|---|---|---|---|\n"
    )
    for name, found in runs.items():
        peak = max(r.peak_bytes for r in found) / MB
        write(
            f"| {name} | {len(found)} | {median(rates[name]):,.0f} | {span(rates[name])}"
            f" | {median(rates[name]) / copy:.2f} | {median(r.cpu_seconds for r in found):.1f}"
            f" | {peak:,.0f} | {max(r.others for r in found):.0%} |\n"
        )
    hashing = [sha256_rate() / MB for _ in range(3)]
    write(f"| sha256, MB per CPU second | 3 | {median(hashing):,.0f} | {span(hashing)} | | | | |\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        split(Path(sys.argv[2]), Path(sys.argv[3]), hashing=sys.argv[4:] != ["bare"])
    else:
        main()
