"""Full-size expert rows on a real GPU, with the memory of a 24 GB card and a 32 GB host.

    PYTHONPATH=. python benchmarks/residency_gpu.py DIR [--out FILE.json]   # needs a GPU, 33 GB of disk at DIR, 21 GB of RAM
    PYTHONPATH=. python benchmarks/residency_gpu.py DIR --rehearse           # a small model on the fake driver, anywhere
    PYTHONPATH=. python benchmarks/residency_gpu.py DIR --write              # the checkpoint alone; a later run takes it

Writes a packed checkpoint of random experts to DIR, unless it is there, loads it, and prints a table: loading against the
disk's sequential read, pinned against needed memory, waste of the arena, time and memory of a resize,
rows verified by checksum after random moves under a replaying graph.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from residency_parts import Checker, Experts, FakeChecker, sequential_read, write_checkpoint

from q38.base.errors import ResourceError
from q38.base.progress import SILENT
from q38.base.units import GIB, MIB, parse_bytes
from q38.checkpoint.index import Checkpoint
from q38.model.shape import ModelShape
from q38.residency import pool as pool_module
from q38.residency.cache import ExpertCache, open_cache
from q38.residency.driver import Cuda, CudaError, Driver
from q38.residency.layout import ExpertLayout
from q38.residency.loader import load_rows
from q38.residency.pool import HostLimits, HostPool
from q38.residency.reader import aligned
from q38.residency.shards import expert_layout

ROOT = Path(__file__).resolve().parents[1]
T0 = time.monotonic()
THREADS = (
    1,
    8,
)  # of the sequential reads before the load; after it in the other order, since the rate drifts
RESULTS: dict[str, Any] = {}


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def log(name: str, value: object) -> None:
    RESULTS[name] = value
    say(f"[{time.monotonic() - T0:6.1f}] {name}: {value}")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("dir", type=Path, nargs="?")
    parser.add_argument("--config", type=Path, default=ROOT / "assets/models/qwen3.8-flash-next.json")
    parser.add_argument("--layers", type=int, help="only so many layers of the model")
    parser.add_argument("--resident", type=int, default=184, help="experts per layer in VRAM")
    parser.add_argument("--vram", default="23.9GiB", help="device memory left free by the holder process")
    parser.add_argument(
        "--other", default="11.9GiB", help="device memory taken as the rest of a server takes it"
    )
    parser.add_argument(
        "--ram", default="32GB", help="emulated host memory, of which 7 GiB are the system's and the server's"
    )
    parser.add_argument("--moves", type=int, default=1000)
    parser.add_argument("--resize", type=int, default=8, help="rows per layer of the timed resize")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rehearse", action="store_true")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--hold", type=int, help=argparse.SUPPRESS)
    return parser.parse_args()


def model_config(arguments: argparse.Namespace) -> dict[str, Any]:
    config: dict[str, Any] = json.loads(arguments.config.read_text())
    if arguments.rehearse:
        config["text_config"] |= {
            "num_hidden_layers": 8,
            "num_experts": 24,
            "hidden_size": 512,
            "moe_intermediate_size": 256,
        }
        config["text_config"]["layer_types"] = config["text_config"]["layer_types"][:8]
        arguments.resident, arguments.resize = 8, 2
    if arguments.layers:
        text = config["text_config"]
        text |= {
            "num_hidden_layers": arguments.layers,
            "layer_types": text["layer_types"][: arguments.layers],
        }
    config["quantization_config"] = {
        "quant_method": "auto-round", "packing_format": "auto_round:auto_gptq", "bits": 2, "group_size": 128, "sym": True,
    }  # fmt: skip
    return config


def checkpoint_sums(out: Path, config: dict[str, Any], shape: ModelShape, experts: Experts) -> np.ndarray:
    """Write the checkpoint unless it is there; the checksum of every row."""
    file, start = out / "sums.npy", time.monotonic()
    if file.exists():
        return np.load(file)
    sums = write_checkpoint(out, config, shape, experts)
    written = sum(f.stat().st_size for f in out.glob("*.safetensors"))
    log("checkpoint written, GB/s", round(written / (time.monotonic() - start) / 1e9, 2))
    np.save(file, sums)
    return sums


def pinned_pages() -> int:
    """Pages the kernel has pinned for good since boot, less those released."""
    text = dict(line.split() for line in Path("/proc/vmstat").read_text().splitlines())
    return int(text.get("nr_foll_pin_acquired", 0)) - int(text.get("nr_foll_pin_released", 0))


def resident_bytes() -> int:
    fields = Path("/proc/self/statm").read_text().split()
    return int(fields[1]) * resource.getpagesize()


def timed(call: Callable[[], object]) -> float:
    """Milliseconds on the host's clock; every call here ends with a fence."""
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e3


def hold(nbytes: int) -> None:
    """Hold device memory until stdin closes."""
    Cuda().allocate(nbytes)
    say("held")
    sys.stdin.read()


def start_holder(leave: int) -> subprocess.Popen[str]:
    free, _ = torch.cuda.mem_get_info()
    command = [sys.executable, __file__, "--hold", str(max(free - leave - GIB // 2, 0))]
    holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    assert holder.stdout.readline().strip() == "held"
    return holder


def memlock_counts() -> str:
    """Whether pinning 16 MiB as an ordinary user under a limit of 64 KiB works; in a child process."""
    child = os.fork()
    if child == 0:
        code = 3
        try:
            resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536))
            os.setgid(65534)
            os.setuid(65534)
            memory = aligned(16 * MIB)
            Cuda().register(memory.ctypes.data, 16 * MIB)
            code = 0
        except CudaError as error:
            say(str(error))
            code = 1
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    return {0: "not counted", 1: "counted"}.get(os.waitstatus_to_exitcode(status), "unknown")


def huge_page_trial(driver: Driver, nbytes: int) -> None:
    """First touch and registration, with and without transparent huge pages."""
    for name, advice in (("huge", mmap.MADV_HUGEPAGE), ("small", mmap.MADV_NOHUGEPAGE)):
        memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        view = np.frombuffer(memory, np.uint8)
        saved, mmap.MADV_HUGEPAGE = mmap.MADV_HUGEPAGE, advice
        touch = timed(lambda m=memory, v=view: pool_module._first_touch(m, v, 16, SILENT))
        mmap.MADV_HUGEPAGE = saved
        register = timed(lambda v=view: driver.register(v.ctypes.data, nbytes))
        driver.unregister(view.ctypes.data)
        log(
            f"pages {name}: first touch, register {nbytes / GIB:.1f} GiB",
            f"{touch:.0f} ms, {register:.0f} ms",
        )


def try_batch(driver: Cuda) -> None:
    """One small batched copy; without it the figures below are those of single copies."""
    memory, stream = driver.allocate(4 * MIB), driver.new_stream()
    try:
        to, source = memory + np.array([0, MIB]), memory + np.array([2 * MIB, 3 * MIB])
        driver.copy(to, source, MIB, stream)
        driver.synchronize(stream)
        log("batched copies", driver._batch)
    except CudaError as error:
        driver._batch = None
        log("batched copies refused", str(error))


def resize(cache: ExpertCache, rows: int) -> None:
    """Time shrinking and growing by `rows`, and what the driver sees returned."""
    driver, moved = cache.store.driver, rows * cache.store.row_bytes
    down, up, returned = [], [], []
    for _ in range(5):
        free = driver.memory()[0]
        down.append(timed(lambda: cache.shrink(rows)))
        returned.append(driver.memory()[0] - free)
        up.append(timed(lambda: cache.grow(rows)))
    log(
        f"resize of {moved / 1e6:.0f} MB: shrink, grow, ms (median of 5)",
        f"{statistics.median(down):.1f}, {statistics.median(up):.1f}",
    )
    log("resize: all, ms", ([round(x, 1) for x in down], [round(x, 1) for x in up]))
    log(
        "resize: returned to the driver, MB (asked)",
        f"{statistics.median(returned) / 1e6:.1f} ({moved / 1e6:.1f})",
    )


def random_moves(cache: ExpertCache, checker: Any, target: int, replays: int) -> None:
    """Random exchanges, resizes and asynchronous swaps while graph replays are queued."""
    rng, moved, operations = np.random.default_rng(7), 0, 0
    shape = cache.resident.shape
    while moved < target:
        checker.replay(replays)
        before, kind = cache.store.place.copy(), operations % 4
        device, host = np.flatnonzero(cache.store.on_device), np.flatnonzero(~cache.store.on_device)
        n = int(rng.integers(1, 33))
        if kind == 0:  # exchange
            mask = cache.store.on_device
            mask[rng.choice(device, n, replace=False)], mask[rng.choice(host, n, replace=False)] = False, True
            cache.set_resident(mask.reshape(shape))
        elif kind == 1:
            cache.set_heat(rng.random(shape))  # so that what leaves is not what came
            cache.shrink(n)
        elif kind == 2:
            cache.grow(min(n, len(host)))
        else:  # asynchronous swaps, polled between replays
            cache.begin_swaps(rng.choice(host, 8, replace=False), rng.choice(device, 8, replace=False))
            while not cache.poll():
                checker.replay(1)  # decode goes on meanwhile, step by step
                checker.totals()
                if isinstance(checker, FakeChecker):
                    for stream in list(cache.store.driver.streams):  # type: ignore[attr-defined]
                        cache.store.driver.advance(stream, 3)  # type: ignore[attr-defined]
        moved += int((before != cache.store.place).sum())
        operations += 1
    wrong, read, steps = checker.totals()
    log("random moves under replays: rows moved, operations", f"{moved}, {operations}")
    log("replays, rows read in them, rows that differed", f"{steps}, {read}, {wrong}")


def main() -> None:
    arguments = parse_arguments()
    if arguments.hold is not None:
        hold(arguments.hold)
        return
    torch.set_num_threads(1)
    if not arguments.rehearse:
        log("memlock limit of pinned memory, as nobody under 64 KiB", memlock_counts())
    config = model_config(arguments)
    shape = ModelShape.from_config(config)
    layout = ExpertLayout.from_shape(shape)
    experts, total = Experts(layout), shape.num_layers * shape.num_experts
    log("rows, bytes each", f"{shape.num_layers} x {shape.num_experts}, {layout.row_bytes}")
    sums = checkpoint_sums(arguments.dir, config, shape, experts)
    if arguments.write:
        return
    files = sorted(arguments.dir.glob("*.safetensors"))
    sample = files[: max(len(files) // 8, 3)]
    disk = {n: round(sequential_read(sample, n), 2) for n in THREADS}
    log("disk, sequential direct read by threads, GB/s", disk)

    checker: Any
    if arguments.rehearse:
        from tests.residency.fake_driver import FakeDriver

        driver: Any = FakeDriver(total=2**31, granularity=4096)
        stream, holder = driver.new_stream(), None
    else:
        holder = start_holder(parse_bytes(arguments.vram))
        driver = Cuda()
        log("device memory free, GiB", round(driver.memory()[0] / GIB, 2))
        driver.allocate(parse_bytes(arguments.other))
        try_batch(driver)
        torch_stream = torch.cuda.Stream()
        stream = torch_stream.cuda_stream
        huge_page_trial(driver, 4 * GIB)

    resident = np.zeros((shape.num_layers, shape.num_experts), bool)
    resident[:, : arguments.resident] = True
    heat = np.random.default_rng(3).random(resident.shape)
    ram = parse_bytes(arguments.ram) - 7 * GIB
    beyond = (total - 94 * shape.num_layers) * layout.row_bytes
    if beyond > ram:
        try:
            HostPool(
                driver,
                layout.row_bytes,
                total - 94 * shape.num_layers,
                limits=HostLimits(ram, None),
                keep=2 * GIB,
            )
        except ResourceError as error:
            log("a pool beyond the host is refused", str(error))
    pages, memory = pinned_pages(), resident_bytes()
    fewest = int(resident.sum()) - arguments.resize * shape.num_layers
    box: list[ExpertCache] = []
    opening = timed(
        lambda: box.append(
            open_cache(
                driver,
                layout.row_bytes,
                resident,
                heat,
                stream=stream,
                fewest=fewest,
                limits=HostLimits(ram, None),
                keep=2 * GIB if not arguments.rehearse else 0,
                threads=16,
            )
        )
    )
    cache = box[0]
    pool, needed = cache.store.pool, (total - fewest) * layout.row_bytes
    log("pool and arena opened, s", round(opening / 1e3, 2))
    log("pinned, needed for rows, ratio", f"{pool.pinned}, {needed}, {pool.pinned / needed:.5f}")
    log(
        "pinned pages by the kernel's count, bytes over needed",
        f"{(pinned_pages() - pages) * 4096 / needed:.5f}",
    )
    log("resident memory grown, over needed", f"{(resident_bytes() - memory) / needed:.5f}")

    checkpoint = Checkpoint.open(arguments.dir)
    log("checkpoint opened", f"{len(checkpoint.tensors)} tensors")
    before = resident_bytes()
    report = load_rows(checkpoint, expert_layout(checkpoint), cache.store)
    log("load", report.to_dict())
    log("host memory grown by the load, MB", round((resident_bytes() - before) / 1e6))
    again = {n: round(sequential_read(sample, n), 2) for n in reversed(THREADS)}
    log("disk again", again)
    best, mean = max(disk.values()), max((disk[n] + again[n]) / 2 for n in THREADS)
    log(
        "load over the disk's best sequential read before it; over the mean of before and after",
        f"{report.gb_per_second / best:.3f}; {report.gb_per_second / mean:.3f}",
    )

    checker = FakeChecker(cache, sums, experts) if arguments.rehearse else Checker(cache, sums, torch_stream)
    log("rows that differ after loading, of all", f"{checker.check_all()}, {total}")
    status = cache.status()
    log(
        "arena bytes, wasted (spare slots and rounding)",
        f"{status['device_bytes']}, {status['device_bytes_wasted']}",
    )
    rows = arguments.resize * shape.num_layers
    resize(cache, rows)
    if not arguments.rehearse and (batch := driver._batch):
        driver._batch = None
        log("without the batch call:", "")
        resize(cache, rows)
        driver._batch = batch
        log("batch call", batch)
    cache.shrink(rows // 2)
    random_moves(cache, checker, arguments.moves, 2 if arguments.rehearse else 4)
    wrong, seconds = checker.check_all()
    log("rows that differ at the end, of all (seconds)", f"{wrong}, {total} ({seconds:.2f})")
    filled = cache.fill(GIB)
    log("fill to 1 GiB free: rows brought in, free MiB", f"{filled}, {driver.memory()[0] / MIB:.0f}")
    freed, had = cache.free(300 * 10**6), driver.memory()[0]
    log("free 300 MB: returned, free MiB after", f"{freed}, {had / MIB:.0f}")
    log("rows that differ after fill and free", checker.check_all()[0])
    free = driver.memory()[0]
    committed = cache.status()["device_bytes"]
    cache.close()
    log("closing: device memory returned, of committed", f"{driver.memory()[0] - free}, {committed}")
    if holder is not None:
        holder.communicate()
    if arguments.out:
        arguments.out.write_text(json.dumps(RESULTS, indent=1, default=str))


if __name__ == "__main__":
    main()
