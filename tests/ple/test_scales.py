"""An fp8 table with one scale per row: carried over, read by row, compared, refused where it is unusable."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from q38.base.errors import CheckFailed, InputError
from q38.checkpoint.index import INDEX, Checkpoint
from q38.checkpoint.writer import write_safetensors
from q38.inspection.report import inspect
from q38.ple.reader import PleTable
from q38.ple.scales import FILE
from q38.ple.split import plan_split, split_ple
from q38.ple.verify import verify_ple
from tests.ple.sources import PREFIX, make_source
from tests.ple.test_split import Killed, kill_at, values

ROWS, TABLE = 20_992, "ple.f8_e4m3.bin"


def with_row_scales(path: Path, scales: torch.Tensor) -> Path:
    """An fp8 source whose weight_scale has a value per row."""
    source = make_source(path, fp8=True)
    checkpoint = Checkpoint.open(source)
    file = checkpoint.info(f"{PREFIX}.weight_scale").file
    tensors = {name: checkpoint.read(name) for name in checkpoint.headers[file.name].tensors}
    write_safetensors(file, tensors | {f"{PREFIX}.weight_scale": scales})
    return source


def some_scales(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (torch.rand(ROWS, generator=torch.Generator().manual_seed(1)) + 0.5).to(dtype)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_row_scales(tmp_path_factory.mktemp("rows") / "source", some_scales())


@pytest.fixture(scope="module")
def split(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("rows") / "ple"
    split_ple(source, out)
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("column", [False, True])
def test_codes_and_scales_are_carried_over_unchanged(
    tmp_path: Path, dtype: torch.dtype, column: bool
) -> None:
    scales = some_scales(dtype)
    source = with_row_scales(tmp_path / "source", scales.view(-1, 1) if column else scales)
    info = split_ple(source, tmp_path / "ple")
    assert info["weight_scale"] is None
    assert (tmp_path / "ple" / TABLE).read_bytes() == values(source).view(torch.uint8).numpy().tobytes()
    assert (tmp_path / "ple" / FILE).read_bytes() == scales.float().numpy().tobytes()
    assert info["row_scales"]["bytes"] == 4 * ROWS == plan_split(source)["writes"] - ROWS * 16
    assert verify_ple(tmp_path / "ple", against=source, full=True)["ok"]


def test_a_row_is_its_codes_times_its_own_scale(source: Path, split: Path) -> None:
    ids = torch.tensor([7, ROWS - 1, 0, 7, 12_345])
    expected = (values(source).float() * some_scales()[:, None]).to(torch.bfloat16)[ids]
    for table in (PleTable.open(split), PleTable.from_checkpoint(Checkpoint.open(source))):
        assert torch.equal(table.rows(ids), expected)
        assert torch.equal(copy.deepcopy(table).rows(ids), expected)


def test_inspect_accepts_a_scale_per_row(source: Path) -> None:
    assert "ple-scale" not in inspect(source).findings.counts


@pytest.mark.parametrize("count", [2, 12, ROWS - 1])
def test_another_number_of_scales_is_refused(tmp_path: Path, count: int) -> None:
    source = with_row_scales(tmp_path / "source", torch.ones(count))
    with pytest.raises(InputError, match="not one finite positive number, nor one per row"):
        split_ple(source, tmp_path / "ple")
    assert "ple-scale" in inspect(source).findings.counts


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_a_senseless_scale_is_refused_by_its_row(tmp_path: Path, value: float) -> None:
    scales = some_scales()
    scales[4321] = value
    source = with_row_scales(tmp_path / "source", scales)
    with pytest.raises(InputError, match="the scale of row 4321 is"):
        split_ple(source, tmp_path / "ple")
    assert not (tmp_path / "ple" / "ple.json").exists()
    assert not (tmp_path / "ple" / FILE).exists()


def test_a_run_killed_before_the_scales_are_journaled_resumes(
    source: Path, split: Path, tmp_path: Path
) -> None:
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Killed):
        kill_at(patch, "scales")
        split_ple(source, tmp_path / "ple")
    assert split_ple(source, tmp_path / "ple") == json.loads((split / "ple.json").read_text())


def copied(split: Path, out: Path) -> Path:
    out.mkdir()
    for file in split.iterdir():
        (out / file.name).write_bytes(file.read_bytes())
    return out


def test_a_changed_scale_is_found(source: Path, split: Path, tmp_path: Path) -> None:
    ple = copied(split, tmp_path / "ple")
    scales = np.fromfile(ple / FILE, np.float32)
    scales *= 2
    scales.tofile(ple / FILE)
    with pytest.raises(CheckFailed, match="its sha256"):
        verify_ple(ple, full=True)
    with pytest.raises(CheckFailed, match=r"the scale of row \d+ differs"):
        verify_ple(ple, against=source)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda ple: (ple / FILE).unlink(), "the file of its row scales is absent"),
        (lambda ple: (ple / FILE).write_bytes(b"1234"), f"{ROWS} float32 scales need"),
    ],
)
def test_a_table_without_its_scales_is_not_opened(split: Path, tmp_path: Path, change, message: str) -> None:
    ple = copied(split, tmp_path / "ple")
    change(ple)
    with pytest.raises(InputError, match=message):
        PleTable.open(ple)


def test_a_table_with_one_scale_is_not_that_of_a_source_with_many(source: Path, tmp_path: Path) -> None:
    one = make_source(tmp_path / "one", fp8=True)
    split_ple(one, tmp_path / "ple")
    with pytest.raises(CheckFailed, match="the source has one scale per row"):
        verify_ple(tmp_path / "ple", against=source)
    assert (source / INDEX).exists()
