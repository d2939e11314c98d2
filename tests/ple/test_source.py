import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from q38.base.errors import InputError
from q38.checkpoint.index import INDEX, Checkpoint
from q38.checkpoint.writer import write_safetensors
from q38.ple.source import find_table
from tests.ple.sources import PREFIX, make_source


def rewrite(source: Path, change) -> Path:
    """Put all tensors into one file after `change(tensors)`."""
    tensors = {}
    for file in sorted(source.glob("*.safetensors")):
        tensors |= load_file(file)
        file.unlink()
    (source / INDEX).unlink()
    change(tensors)
    write_safetensors(source / "model.safetensors", tensors)
    return source


def edit_config(source: Path, **text) -> None:
    file = source / "config.json"
    config = json.loads(file.read_text())
    config["text_config"] |= text
    file.write_text(json.dumps(config))


def refusal(source: Path) -> str:
    with pytest.raises(InputError) as caught:
        find_table(Checkpoint.open(source))
    assert caught.value.remedy
    return str(caught.value)


def test_shards_come_in_numeric_order(tmp_path):
    table = find_table(Checkpoint.open(make_source(tmp_path / "source")))
    assert [s.name for s in table.shards] == [f"{PREFIX}.shard_{n}.weight" for n in range(12)]


def test_an_fp8_table_brings_its_scale(tmp_path):
    table = find_table(Checkpoint.open(make_source(tmp_path / "source", fp8=True)))
    assert (table.dtype, table.scale) == ("F8_E4M3", 1 / 4096)


def test_one_unsharded_tensor_is_a_table_too(tmp_path):
    def join(tensors):
        parts = [tensors.pop(f"{PREFIX}.shard_{n}.weight") for n in range(12)]
        tensors[f"{PREFIX}.weight"] = torch.cat(parts)

    table = find_table(Checkpoint.open(rewrite(make_source(tmp_path / "source"), join)))
    assert table.rows_per_shard == [table.rows]


def test_a_missing_shard_is_named(tmp_path):
    source = rewrite(make_source(tmp_path / "source"), lambda t: t.pop(f"{PREFIX}.shard_7.weight"))
    assert "shard 7 of 12" in refusal(source)


def test_a_missing_last_shard_shows_in_the_row_count(tmp_path):
    source = rewrite(make_source(tmp_path / "source"), lambda t: t.pop(f"{PREFIX}.shard_11.weight"))
    assert "rows in 11 shards" in refusal(source)


def test_mixed_dtypes_are_refused(tmp_path):
    name = f"{PREFIX}.shard_3.weight"
    source = rewrite(make_source(tmp_path / "source"), lambda t: t.update({name: t[name].float()}))
    assert "shard_3.weight is F32, shard 0 is BF16" in refusal(source)


def test_rows_of_another_width_are_refused(tmp_path):
    name = f"{PREFIX}.shard_3.weight"
    source = rewrite(
        make_source(tmp_path / "source"), lambda t: t.update({name: t[name][:, :8].contiguous()})
    )
    assert "rows of 16 values expected" in refusal(source)


def test_a_dtype_that_is_neither_bf16_nor_fp8_is_refused(tmp_path):
    source = rewrite(
        make_source(tmp_path / "source"), lambda t: t.update({k: v.half() for k, v in t.items()})
    )
    assert "the n-gram table is F16" in refusal(source)


def test_another_row_count_than_the_config_gives_is_refused(tmp_path):
    source = make_source(tmp_path / "source")
    edit_config(source, ngram_vocab_size_base=1300)
    assert "config.json asks for" in refusal(source)


def test_an_fp8_table_without_its_scale_is_refused(tmp_path):
    source = rewrite(make_source(tmp_path / "source", fp8=True), lambda t: t.pop(f"{PREFIX}.weight_scale"))
    assert "weight_scale is missing" in refusal(source)


@pytest.mark.parametrize("scale", [[0.0], [-1.0], [float("nan")], [float("inf")], [1.0, 2.0]])
def test_a_senseless_scale_is_refused(tmp_path, scale):
    source = make_source(tmp_path / "source", fp8=True)
    rewrite(source, lambda t: t.update({f"{PREFIX}.weight_scale": torch.tensor(scale)}))
    assert "is not one finite positive number" in refusal(source)


def test_a_checkpoint_without_the_table_says_where_it_may_be(tmp_path):
    def drop(tensors):
        tensors.clear()
        tensors["lm_head.weight"] = torch.zeros(2, 2)

    assert "keeps its table in a ple directory" in refusal(rewrite(make_source(tmp_path / "source"), drop))


def test_an_index_that_leaves_the_table_out_is_refused(tmp_path):
    source = make_source(tmp_path / "source")
    index = json.loads((source / INDEX).read_text())
    index["weight_map"].pop(f"{PREFIX}.shard_4.weight")
    (source / INDEX).write_text(json.dumps(index))
    with pytest.raises(InputError, match=r"does not list tensor .*shard_4\.weight") as caught:
        Checkpoint.open(source)
    assert caught.value.remedy


def test_a_missing_index_is_refused(tmp_path):
    source = make_source(tmp_path / "source")
    (source / INDEX).unlink()
    with pytest.raises(InputError, match=r"but no model\.safetensors\.index\.json"):
        Checkpoint.open(source)


def test_codes_offered_as_a_bf16_table_need_their_scale(tmp_path):
    source = make_source(tmp_path / "source")
    rewrite(source, lambda t: t.update({k: v.to(torch.float8_e4m3fn) for k, v in t.items()}))
    assert "fp8 and its weight_scale is missing" in refusal(source)


def test_a_model_without_a_table_is_refused(tmp_path):
    source = make_source(tmp_path / "source")
    edit_config(source, ple_layer_ids=[])
    assert "has no n-gram table" in refusal(source)


def test_two_tables_are_refused(tmp_path):
    source = make_source(tmp_path / "source")
    edit_config(source, ple_layer_ids=[2, 3])
    assert "2 n-gram tables" in refusal(source)
