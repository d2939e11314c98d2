import copy
import json
import pickle
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from q38.base.errors import InputError
from q38.checkpoint.index import Checkpoint
from q38.ple.reader import PleTable
from q38.ple.split import split_ple
from tests.ple.sources import PREFIX, make_source


@pytest.fixture(scope="module")
def fp8_source(tmp_path_factory) -> Path:
    return make_source(tmp_path_factory.mktemp("reader") / "fp8", fp8=True)


@pytest.fixture(scope="module")
def bf16_source(tmp_path_factory) -> Path:
    return make_source(tmp_path_factory.mktemp("reader") / "bf16")


@pytest.fixture(scope="module")
def fp8_split(fp8_source, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("reader_split") / "ple"
    split_ple(fp8_source, out)
    return out


def whole_table(source: Path) -> torch.Tensor:
    """The dequantized table as transformers would hold it, bf16 [rows, dim]."""
    checkpoint = Checkpoint.open(source)
    table = torch.cat([checkpoint.read(f"{PREFIX}.shard_{n}.weight").float() for n in range(12)])
    scale = f"{PREFIX}.weight_scale"
    if scale in checkpoint.tensors:
        table = table * checkpoint.read(scale).float()
    return table.bfloat16()


@given(ids=st.lists(st.integers(0, 20_991), max_size=300))
def test_rows_equal_an_embedding_over_the_dequantized_table(fp8_source, fp8_split, ids):
    embedding = torch.nn.Embedding.from_pretrained(whole_table(fp8_source))
    wanted = torch.tensor(ids, dtype=torch.int64)
    assert torch.equal(PleTable.open(fp8_split).rows(wanted), embedding(wanted))


def test_the_shards_of_a_bf16_checkpoint_give_its_rows_unchanged(bf16_source):
    with PleTable.from_checkpoint(Checkpoint.open(bf16_source)) as table:
        ids = torch.arange(table.num_rows)
        assert torch.equal(table.rows(ids), whole_table(bf16_source))


def test_the_shards_of_an_fp8_checkpoint_give_the_rows_of_its_split(fp8_source, fp8_split):
    split, shards = PleTable.open(fp8_split), PleTable.from_checkpoint(Checkpoint.open(fp8_source))
    ids = torch.arange(split.num_rows)
    assert torch.equal(split.rows(ids), shards.rows(ids))


def test_ids_of_any_shape_come_back_flat(fp8_split):
    table = PleTable.open(fp8_split)
    assert table.rows(torch.zeros(2, 3, dtype=torch.int64)).shape == (6, table.dim)


@pytest.mark.parametrize("row", [-1, 20_992])
def test_a_row_outside_the_table_is_refused(fp8_split, row):
    with pytest.raises(ValueError, match="of a table of 20992 rows"):
        PleTable.open(fp8_split).rows(torch.tensor([5, row]))


def through_pickle(table: PleTable) -> PleTable:
    return pickle.loads(pickle.dumps(table))  # noqa: S301 (as a process pool hands it over)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, through_pickle])
def test_a_copy_reads_on_after_the_original_is_closed(fp8_split, duplicate):
    table = PleTable.open(fp8_split)
    rows = table.rows(torch.tensor([7]))
    other = duplicate(table)
    table.close()
    assert torch.equal(other.rows(torch.tensor([7])), rows)


def broken(fp8_split: Path, tmp_path: Path, **changes) -> Path:
    copied = tmp_path / "ple"
    copied.mkdir()
    info = json.loads((fp8_split / "ple.json").read_text()) | changes
    (copied / "ple.json").write_text(json.dumps({k: v for k, v in info.items() if v is not ...}))
    (copied / "ple.f8_e4m3.bin").write_bytes((fp8_split / "ple.f8_e4m3.bin").read_bytes())
    return copied


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rows": 20_991}, "20991 rows of 16 F8_E4M3 values need"),
        ({"dim": 17}, "values need"),
        ({"dtype": "BF16"}, "values need"),
        ({"dtype": "F4"}, "dtype is 'F4'"),
        ({"weight_scale": None}, "weight_scale is missing"),
        ({"weight_scale": 0.0}, "weight_scale is missing"),
        ({"rows": "many"}, "must be positive integers"),
        ({"sha256": ...}, "has no sha256"),
        ({"file": "absent.bin"}, "which is absent"),
        ({"file": "../ple/ple.f8_e4m3.bin"}, "which is absent"),
    ],
)
def test_a_ple_json_that_does_not_fit_its_table_is_refused(fp8_split, tmp_path, changes, message):
    with pytest.raises(InputError, match=message):
        PleTable.open(broken(fp8_split, tmp_path, **changes))


def test_a_truncated_table_is_refused(fp8_split, tmp_path):
    copied = broken(fp8_split, tmp_path)
    with (copied / "ple.f8_e4m3.bin").open("r+b") as f:
        f.truncate(1000)
    with pytest.raises(InputError, match="1000 bytes"):
        PleTable.open(copied)


def test_a_table_cut_after_opening_is_noticed(fp8_split, tmp_path):
    copied = broken(fp8_split, tmp_path)
    table = PleTable.open(copied)
    with (copied / "ple.f8_e4m3.bin").open("r+b") as f:
        f.truncate(1000)
    with pytest.raises(InputError, match="the file ended at row 5000"):
        table.rows(torch.tensor([5000]))
