"""What this machine is: processors, memory, disks, packages. Probed without importing torch."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from q38.base import settings
from q38.base.errors import ResourceError
from q38.base.memory import available_memory, cgroup_memory, memlock_limit
from q38.serving.requirements import installed

THIS_MACHINE = "machine"  # in place of a size
CUDA_REMEDY = "use a machine with an NVIDIA GPU and its driver (nvidia-smi must work)"
# The packages whose versions decide what a measurement means.
PACKAGES = (
    "q38", "torch", "transformers", "auto-round", "sglang", "sglang-kernel", "triton", "flashinfer-python", "safetensors", "tokenizers",
    "numpy",
)  # fmt: skip
_GPU_FIELDS = (
    "name", "compute_cap", "memory.total", "memory.free", "pcie.link.gen.max", "pcie.link.width.max", "driver_version"
)  # fmt: skip


@dataclass(frozen=True)
class Gpu:
    """One NVIDIA GPU. Memory in bytes; `pcie` like "gen 5 x16", None where the driver does not say."""

    name: str
    compute_capability: str
    memory_total: int
    memory_free: int
    pcie: str | None
    driver: str


@dataclass(frozen=True)
class Disk:
    """The disk under `path`. Bytes; `kind` is "nvme", "ssd", "rotational", "virtual" or "unknown"."""

    path: str
    device: str | None
    kind: str
    filesystem: str | None
    total: int
    free: int


@dataclass(frozen=True)
class Machine:
    """A machine as one process sees it. All sizes in bytes; None means no limit or not known.

    memory_available: what a new process can take now: the smaller of MemAvailable and the room left
        under the cgroup's limit.
    memlock: bytes this process may lock; None where there is no limit or it is exempt.
    torch_build: the local part of torch's version: "cpu", "cu130"; "" when the wheel names none.
    """

    system: str
    python: str
    cpu: str
    cores: int
    memory_total: int
    memory_available: int
    cgroup_limit: int | None
    swap_total: int
    swap_free: int
    memlock: int | None
    torch_build: str | None
    gpus: tuple[Gpu, ...]
    disk: Disk
    packages: dict[str, str | None]

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "gpus": [asdict(gpu) for gpu in self.gpus]}

    def to_record(self) -> dict[str, Any]:
        """What stays the same from one hour to the next: for the record of a build."""
        keys = ("system", "python", "cpu", "cores", "memory_total")
        gpus = [{k: v for k, v in asdict(gpu).items() if k != "memory_free"} for gpu in self.gpus]
        return {**{key: getattr(self, key) for key in keys}, "gpus": gpus}


def probe(path: Path | None = None) -> Machine:
    """Probe this machine; `path` picks the disk (default: the current directory)."""
    memory, swap = psutil.virtual_memory(), psutil.swap_memory()
    limit, _ = cgroup_memory()
    packages = {name: installed(name) for name in PACKAGES}
    torch = packages["torch"]
    return Machine(
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        python=".".join(map(str, sys.version_info[:3])),
        cpu=_cpu_model(),
        cores=settings.cpu_count(),
        memory_total=memory.total,
        memory_available=available_memory(),
        cgroup_limit=limit,
        swap_total=swap.total,
        swap_free=swap.free,
        memlock=memlock_limit(),
        torch_build=None if torch is None else torch.partition("+")[2],
        gpus=probe_gpus(),
        disk=probe_disk(path or Path.cwd()),
        packages=packages,
    )


def memory_sizes(gpu: str, ram: str) -> tuple[str, str]:
    """Memory sizes as a user writes them, with "machine" replaced by what is free here, in bytes.

    That is the memory of the GPU with the most of it free, and what a new process can take of the host's.

    Raises:
        ResourceError: "machine" for the GPU, and there is none.
    """
    if gpu == THIS_MACHINE:
        gpus = probe_gpus()
        if not gpus:
            raise ResourceError("there is no GPU here", where="--gpu", remedy="give a size like 24GiB")
        gpu = str(max(found.memory_free for found in gpus))
    return gpu, str(available_memory()) if ram == THIS_MACHINE else ram


def has_cuda_gpu() -> bool:
    """Whether an NVIDIA GPU answers here. Cheap where there is no driver."""
    return bool(probe_gpus())


def probe_gpus() -> tuple[Gpu, ...]:
    """The GPUs that nvidia-smi lists; none where it is absent or fails."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return ()
    command = [tool, f"--query-gpu={','.join(_GPU_FIELDS)}", "--format=csv,noheader,nounits"]
    try:
        output = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ()
    return parse_gpus(output)


def parse_gpus(csv: str) -> tuple[Gpu, ...]:
    """Rows of `nvidia-smi --query-gpu` (memory in MiB) -> GPUs."""
    gpus = []
    for line in csv.strip().splitlines():
        values = [value.strip() for value in line.split(",")]
        if len(values) != len(_GPU_FIELDS):
            continue
        name, capability, total, free, generation, width, driver = values
        pcie = f"gen {generation} x{width}" if generation.isdigit() and width.isdigit() else None
        gpus.append(Gpu(name, capability, _mib(total), _mib(free), pcie, driver))
    return tuple(gpus)


def probe_disk(path: Path) -> Disk:
    """The disk that holds `path`, or its nearest existing parent."""
    path = path.absolute()
    while not path.exists():
        path = path.parent
    usage = shutil.disk_usage(path)
    mount = _mount_of(path)
    device = _block_device(path)
    return Disk(str(path), device, _disk_kind(device), mount, usage.total, usage.free)


def _number(file: Path) -> int | None:
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return None


def _mib(text: str) -> int:
    return int(text) * 2**20 if text.isdigit() else 0


def _cpu_model() -> str:
    try:
        match = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        match = None
    return match[1] if match else platform.processor() or platform.machine()


def _mount_of(path: Path) -> str | None:
    best, kind = "", None
    for partition in psutil.disk_partitions(all=True):
        if path.is_relative_to(partition.mountpoint) and len(partition.mountpoint) >= len(best):
            best, kind = partition.mountpoint, partition.fstype
    return kind


def _block_device(path: Path) -> str | None:
    """Kernel name of the whole disk under `path` ("nvme0n1"); None for tmpfs, overlay and network mounts."""
    number = path.stat().st_dev
    link = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}")
    if not link.exists():
        return None
    real = link.resolve()
    return real.parent.name if (real / "partition").exists() else real.name


def _disk_kind(device: str | None) -> str:
    if device is None:
        return "unknown"
    # LVM and LUKS: the disk below decides.
    slaves = Path("/sys/block") / device / "slaves"
    below = sorted(p.name for p in slaves.iterdir()) if slaves.is_dir() else []
    if below:
        return _disk_kind(below[0])
    if device.startswith("nvme"):
        return "nvme"
    # A hypervisor's disk reports "rotational" whatever is under it.
    if device.startswith(("vd", "xvd")):
        return "virtual"
    rotational = _number(Path("/sys/block") / device / "queue/rotational")
    return {0: "ssd", 1: "rotational"}.get(-1 if rotational is None else rotational, "unknown")
