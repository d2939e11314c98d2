"""kill -9 at random points, then the same command: the same bytes as an uninterrupted run."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from q38.checkpoint.writer import TEMPORARY
from q38.quantize.driver import quantize
from q38.quantize.plan import Plan
from q38.recipe.schema import Recipe
from tests.quantize.conftest import FAST

# Kills itself inside the n-th write of a file whose name contains a given text.
SUICIDE = """
import os, signal, sys
from q38.checkpoint import writer
text, left = sys.argv.pop(1), int(sys.argv.pop(1))
write, opened = writer.HashingFile.write, writer.HashingFile.__init__
def init(self, raw, path):
    self.name = raw.name
    opened(self, raw, path)
def counted(self, data):
    global left
    left -= text in self.name
    if left == 0:
        data = data[: len(data) // 2]
    write(self, data)
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)
writer.HashingFile.__init__, writer.HashingFile.write = init, counted
from q38.__main__ import main
main()
"""


def done(out: Path) -> list[str]:
    journal = out / ".q38" / "journal.jsonl"
    lines = journal.read_bytes().splitlines() if journal.exists() else []
    units = [json.loads(line)["unit"] for line in lines if line.endswith(b"}")]
    return [unit for unit in units if unit.startswith("block")]


def run_and_die(command: list[str], kill: Callable[[subprocess.Popen[bytes]], None]) -> None:
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    try:
        kill(process)
        _, err = process.communicate(timeout=240)
    finally:
        process.kill()
    assert process.returncode == -signal.SIGKILL, err.decode()


def test_killed_at_random_points_it_goes_on_bit_for_bit(
    tiny_source: Path, tiny_ple: Path, tiny_quantized: Path, plan: Plan, fast: Recipe, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    chains = 2 * fast.calibration.samples
    # Other points every time: writes into the shard, writes into the activations, seconds.
    rng = random.Random()  # from the system, whatever other tests seeded
    points = rng.randint(1, len(plan.blocks[0].parts)), rng.randint(1, chains), rng.uniform(0, 0.2)
    print("points", points)  # shown when the test fails
    arguments = ["quantize", str(tiny_source), "-o", str(out), "-r", str(FAST), "--ple", str(tiny_ple)]

    # Inside the shard of block 0, then inside the activations after block 1, then somewhere in a later block.
    suicide = [sys.executable, "-c", SUICIDE]
    run_and_die([*suicide, "model-00002", str(points[0]), *arguments], lambda process: None)
    assert done(out) == []
    run_and_die([*suicide, "activations-2", str(points[1]), *arguments], lambda process: None)
    assert done(out) == ["block 0"]

    def kill_after_block_1(process: subprocess.Popen[bytes]) -> None:
        while process.poll() is None and len(done(out)) < 2:
            time.sleep(0.02)
        time.sleep(points[2])
        process.kill()

    run_and_die([sys.executable, "-m", "q38", *arguments], kill_after_block_1)
    assert 2 <= len(done(out)) <= 4 and not (out / "MANIFEST.json").exists()

    assert quantize(tiny_source, out, fast, ple=tiny_ple)["complete"]
    for file in tiny_quantized.glob("*.safetensors"):
        assert file.read_bytes() == (out / file.name).read_bytes(), file.name
    assert not list(out.rglob(f"*{TEMPORARY}"))
    assert not (out / ".q38").exists()
