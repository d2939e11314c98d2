"""`q38 release check --full` against the disk's read rate and sha256's rate, all of the same run.

    python benchmarks/release_check.py DIR [--gb 4] [--repeats 5] [--patience 600] [--warm]

Writes random files under DIR, half of the bytes in one file as the n-gram table is, and seals them. Then takes turns: reading
every file in order with one thread; reading them with the threads and pieces of the check; hashing as many bytes from memory on
all cores; and the check. Files are read from disk each time, or with --warm from the page cache. The aim is 0.8 of the lower of the
better read rate and sha256's. Seconds leave out what importing Python modules takes. Each run waits for an idle machine, and one
that other processes disturbed is repeated, as long as --patience lasts.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from checkpoints_common import CORES, MB, alternate, child, machine, median, remove, settle, span

from q38.release.check import check
from q38.release.hashing import PIECE, hash_file
from q38.release.seal import read_seal, write_seal

BLOCK = 2**20
SHARDS = 4


def make_release(out: Path, nbytes: int) -> int:
    """Random files and a seal over them. Returns the bytes."""
    out.mkdir(parents=True)
    sizes = {"table.bin": nbytes // 2, **{f"shard-{i}.bin": nbytes // 2 // SHARDS for i in range(SHARDS)}}
    for name, size in sizes.items():
        with (out / name).open("wb") as f:
            for start in range(0, size, BLOCK):
                f.write(os.urandom(min(BLOCK, size - start)))
            f.flush()
            os.fsync(f.fileno())
    files = {name: hash_file(out / name, lambda n: None).to_dict() for name in sizes}
    write_seal(out, {"name": "benchmark", "piece_bytes": PIECE, "files": files})
    return sum(sizes.values())


def read_in_order(root: Path) -> None:
    """Every file from its start, one thread."""
    buffer = bytearray(4 * BLOCK)
    for file in sorted(root.iterdir()):
        with file.open("rb", buffering=0) as f:
            while f.readinto(buffer):
                pass


def read_as_check_does(root: Path) -> None:
    """The pieces of every file, by as many threads as the check takes."""

    def read(task: tuple[Path, int, int]) -> None:
        file, start, stop = task
        buffer = memoryview(bytearray(BLOCK))
        with file.open("rb", buffering=0) as f:
            while start < stop and (n := os.preadv(f.fileno(), [buffer[: stop - start]], start)):
                start += n

    seal = read_seal(root)
    tasks = [(root / name, a, b) for name, r in seal.files.items() for a, b, _ in r.ranges(seal.piece)]
    with ThreadPoolExecutor(2 * CORES) as pool:
        list(pool.map(read, tasks))


def hash_memory(root: Path) -> None:
    """As many bytes as the files have, from memory, on all cores."""
    share = read_seal(root).nbytes // CORES

    def work(_: int) -> None:
        block, digest = bytes(BLOCK), hashlib.sha256()
        for _ in range(share // BLOCK):
            digest.update(block)

    with ThreadPoolExecutor(CORES) as pool:
        list(pool.map(work, range(CORES)))


def full_check(root: Path) -> None:
    """The measured command."""
    result = check(root, full=True)
    assert result["passed"], result["faults"]


CHILDREN: dict[str, Callable[[Path], None]] = {
    "read, one thread": read_in_order,
    "read, as the check does": read_as_check_does,
    "sha256, all cores": hash_memory,
    "check --full": full_check,
}


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
    root = arguments.directory / "release_check"
    remove(root)
    nbytes = make_release(root, int(arguments.gb * 10**9))
    try:
        runs = alternate(
            {name: child(__file__, name, root) for name in CHILDREN},
            lambda: settle(root, cold=not arguments.warm),
            arguments.repeats,
            arguments.patience,
        )
    finally:
        remove(root)
    rates = {name: [nbytes / r.work_seconds / MB for r in found] for name, found in runs.items()}
    write = sys.stdout.write
    write(
        f"{machine(arguments.directory)}\n"
        f"{nbytes / 1e9:.2f} GB, files {'in memory' if arguments.warm else 'on disk'}\n"
        "| | runs | MB/s, median | range | CPU s | peak RSS MB | others' CPU |\n|---|---|---|---|---|---|---|\n"
    )
    for name, found in runs.items():
        write(
            f"| {name} | {len(found)} | {median(rates[name]):,.0f} | {span(rates[name])}"
            f" | {median(r.cpu_seconds for r in found):.1f} | {max(r.peak_bytes for r in found) / MB:,.0f}"
            f" | {max(r.others for r in found):.0%} |\n"
        )
    *reads, hashing, checked = (median(rates[name]) for name in CHILDREN)
    lower = min(max(reads), hashing)
    write(f"check / min(read {max(reads):,.0f}, sha256 {hashing:,.0f}) = {checked / lower:.2f}\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        start = time.perf_counter()
        CHILDREN[sys.argv[2]](Path(sys.argv[3]))
        sys.stdout.write(json.dumps({"seconds": time.perf_counter() - start}) + "\n")
    else:
        main()
