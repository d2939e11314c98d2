"""How long expert rows take to load beside a busy interpreter: read in that process, and by one of their own.

    PYTHONPATH=. python benchmarks/residency_early.py DIR [--layers 4] [--rounds 3]

Writes random packed experts of the real model's width to DIR where it is empty (0.67 GB a layer), and reads them from the disk with a
thread beside it that never lets go of the interpreter for long, as SGLang's imports and its loader. The two ways take turns; the
figure is their ratio. Without a GPU (--device cpu) device memory is ordinary memory: one thread copies, and touches it first.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from benchmarks.residency_parts import Experts, write_checkpoint
from q38.base import settings
from q38.checkpoint.index import INDEX, Checkpoint
from q38.model.shape import ModelShape
from q38.residency.layout import ExpertLayout
from q38.sglang_ext import early_rows
from q38.sglang_ext.options import ExtensionOptions
from q38.sglang_ext.residency import ExpertRows

CONFIG = Path(__file__).resolve().parents[1] / "assets/models/qwen3.8-flash-next.json"


def write(out: Path, layers: int) -> None:
    config = json.loads(CONFIG.read_text())
    text = config["text_config"]
    text |= {"num_hidden_layers": layers, "layer_types": text["layer_types"][:layers]}
    config["quantization_config"] = {
        "quant_method": "auto-round", "packing_format": "auto_round:auto_gptq", "bits": 2, "group_size": 128, "sym": True,
    }  # fmt: skip
    shape = ModelShape.from_config(config)
    write_checkpoint(out, config, shape, Experts(ExpertLayout.from_shape(shape)))


@contextmanager
def busy() -> Iterator[None]:
    """A thread that runs Python code all the time."""
    stop = threading.Event()

    def work() -> None:
        while not stop.is_set():
            sum(i * i for i in range(10_000))

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def load(options: ExtensionOptions, device: torch.device, *, uncached: bool) -> float:
    """Seconds until all rows are there."""
    if uncached:
        for file in Path(options.model).glob("*.safetensors"):
            fd = os.open(file, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)
    checkpoint = Checkpoint.open(options.model)
    with busy():
        begun = time.monotonic()
        early_rows.start(options)
        rows = ExpertRows(checkpoint, options, device)
        seconds = time.monotonic() - begun
    rows.cache.close()
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("dir", type=Path)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="cpu", help="cuda: rows go to pinned memory and to the GPU")
    parser.add_argument("--resident", type=float, default=0.375, help="share of the rows in device memory")
    parser.add_argument("--cached", action="store_true", help="leave the files in the page cache")
    parser.add_argument("--verbose", action="store_true", help="log what the extension logs")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO if arguments.verbose else logging.WARNING)
    if not (arguments.dir / INDEX).exists():
        write(arguments.dir, arguments.layers)
    shape = ModelShape.from_config(Checkpoint.open(arguments.dir).config)
    total = shape.num_layers * shape.num_experts
    name = f"/tmp/q38-early-{os.getpid()}"
    both = {}
    for early in (False, True):
        both[early] = ExtensionOptions(
            str(arguments.dir),
            device_rows=int(total * arguments.resident),
            spare=16,
            control=name,
            early_rows=early,
        )
    device = torch.device(arguments.device)
    found: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(arguments.rounds):
        for early, options in both.items():
            with settings.exported({settings.SGLANG: options.to_json()}):
                found[early].append(load(options, device, uncached=not arguments.cached))
    for early, seconds in found.items():
        told = ", ".join(f"{s:.2f}" for s in seconds)
        sys.stdout.write(f"{'by a process of its own' if early else 'in the busy process'}: {told} s\n")
    ratio = sorted(found[False])[arguments.rounds // 2] / sorted(found[True])[arguments.rounds // 2]
    sys.stdout.write(f"ratio of the medians: {ratio:.2f}\n")


if __name__ == "__main__":
    main()
