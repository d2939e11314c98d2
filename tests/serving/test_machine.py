"""The machine probe, fed with the files and outputs of machines that are not here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from q38.base.errors import ResourceError
from q38.base.units import GIB
from q38.serving import machine
from q38.serving.machine import Gpu, memory_sizes, parse_gpus, probe, probe_disk


def test_this_machine_is_probed_and_fits_json() -> None:
    found = probe()
    document = json.loads(json.dumps(found.to_dict()))
    assert document["cores"] >= 1
    assert 0 < document["memory_available"] <= document["memory_total"]
    assert document["packages"]["torch"]
    assert document["disk"]["total"] >= document["disk"]["free"] > 0


def test_the_probe_imports_neither_torch_nor_transformers() -> None:
    code = (
        "import sys; from q38.serving import doctor; doctor.examine(); "
        "sys.exit(any(m in sys.modules for m in ('torch', 'transformers', 'sglang', 'auto_round')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_gpus_are_read_from_nvidia_smi() -> None:
    rows = "NVIDIA RTX PRO 4000, 12.0, 24463, 23890, 5, 16, 580.65.06\nNVIDIA H200, 9.0, 143771, 100, [N/A], [N/A], 570.1\n"
    assert parse_gpus(rows) == (
        Gpu("NVIDIA RTX PRO 4000", "12.0", 24463 * 2**20, 23890 * 2**20, "gen 5 x16", "580.65.06"),
        Gpu("NVIDIA H200", "9.0", 143771 * 2**20, 100 * 2**20, None, "570.1"),
    )


@pytest.mark.parametrize("output", ["", "No devices were found\n", "\n\n"])
def test_an_output_without_gpus_is_no_gpu(output: str) -> None:
    assert parse_gpus(output) == ()


def test_a_failing_nvidia_smi_is_no_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(
        "#!/bin/sh\necho 'NVIDIA-SMI has failed because it could not communicate with the driver'\nexit 9\n"
    )
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert machine.probe_gpus() == ()


def test_a_disk_is_found_for_a_path_that_does_not_exist_yet(tmp_path: Path) -> None:
    disk = probe_disk(tmp_path / "new" / "deeper")
    assert disk.path == str(tmp_path)
    assert disk.kind in {"nvme", "ssd", "rotational", "virtual", "unknown"}


def test_sizes_of_this_machine_are_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = tuple(Gpu("card", "12.0", 24 * GIB, free, None, "1") for free in (3 * GIB, 20 * GIB))
    monkeypatch.setattr(machine, "probe_gpus", lambda: gpus)
    monkeypatch.setattr(machine, "available_memory", lambda: 29 * GIB)
    assert memory_sizes("machine", "machine") == (str(20 * GIB), str(29 * GIB))
    assert memory_sizes("23.4GiB", "30GiB") == ("23.4GiB", "30GiB")


def test_a_machine_without_a_gpu_has_no_size_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "probe_gpus", lambda: ())
    with pytest.raises(ResourceError, match="no GPU here"):
        memory_sizes("machine", "30GiB")
