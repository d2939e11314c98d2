import json
from pathlib import Path

import pytest
import torch

from q38.base.errors import InputError
from q38.checkpoint.index import INDEX, Checkpoint, fingerprint_file, read_json
from q38.checkpoint.writer import write_safetensors

FIRST = {"a": torch.arange(12, dtype=torch.float32).view(4, 3), "b": torch.tensor([7], dtype=torch.int64)}
SECOND = {"c": torch.randn(2, 5).bfloat16(), "d": torch.zeros(0, 4)}


@pytest.fixture
def root(tmp_path) -> Path:
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text('{"model_type": "qwen4_exp"}')
    write_safetensors(path / "1.safetensors", FIRST)
    write_safetensors(path / "2.safetensors", SECOND)
    write_index(
        path, {"a": "1.safetensors", "b": "1.safetensors", "c": "2.safetensors", "d": "2.safetensors"}
    )
    return path


def write_index(path: Path, weight_map: object) -> None:
    (path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def refusal(path: Path) -> InputError:
    with pytest.raises(InputError) as caught:
        Checkpoint.open(path)
    assert caught.value.remedy
    return caught.value


def test_tensors_read_back_in_their_own_dtype(root):
    checkpoint = Checkpoint.open(root)
    for name, tensor in (FIRST | SECOND).items():
        assert torch.equal(checkpoint.read(name), tensor)
        assert checkpoint.read(name).dtype == tensor.dtype


def test_a_file_that_went_away_after_it_was_opened_is_named(root):
    checkpoint = Checkpoint.open(root)
    (root / "1.safetensors").unlink()
    for read in (lambda: checkpoint.read_bytes("a"), lambda: checkpoint.fingerprint):
        with pytest.raises(InputError, match="cannot be read") as caught:
            read()
        assert caught.value.where == str(root / "1.safetensors")


def test_rows_are_read_without_the_rest(root):
    assert torch.equal(Checkpoint.open(root).read_rows("a", 1, 3), FIRST["a"][1:3])


def test_bytes_count_tensors_and_not_headers(root):
    assert Checkpoint.open(root).nbytes == 48 + 8 + 20


def test_a_single_file_needs_no_index(root):
    for file in (root / INDEX, root / "2.safetensors"):
        file.unlink()
    (root / "1.safetensors").rename(root / "model.safetensors")
    assert set(Checkpoint.open(root).tensors) == {"a", "b"}


def test_an_absent_tensor_is_named(root):
    with pytest.raises(InputError, match="tensor nowhere is missing"):
        Checkpoint.open(root).read("nowhere")


def test_a_missing_directory_is_refused(tmp_path):
    assert "no such directory" in str(refusal(tmp_path / "absent"))


def test_a_directory_without_config_is_refused(root):
    (root / "config.json").unlink()
    assert refusal(root).where == str(root / "config.json")


def test_a_config_that_is_not_json_is_refused(root):
    (root / "config.json").write_text("{")
    assert "not valid JSON" in str(refusal(root))


def test_a_directory_without_weights_is_refused(root):
    for file in root.glob("*.safetensors*"):
        file.unlink()
    assert "holds no safetensors files" in str(refusal(root))


def test_several_files_without_an_index_are_refused(root):
    (root / INDEX).unlink()
    assert f"2 safetensors files but no {INDEX}" in str(refusal(root))


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        (["a"], "has no weight_map"),
        ({"a": 1}, "has no weight_map"),
        ({}, "lists no tensors"),
        ({"a": "3.safetensors"}, "names 3.safetensors, which is absent"),
        ({"a": "../model/1.safetensors"}, "outside the directory"),
        (
            {"a": "1.safetensors", "b": "1.safetensors", "x": "1.safetensors"},
            "places tensor x in 1.safetensors",
        ),
        (
            {"a": "1.safetensors", "b": "1.safetensors", "c": "1.safetensors", "d": "2.safetensors"},
            "it is in 2.safetensors",
        ),
        ({"a": "1.safetensors"}, "does not list tensor b"),
    ],
)
def test_an_index_that_disagrees_with_the_files_is_refused(root, weight_map, message):
    write_index(root, weight_map)
    error = refusal(root)
    assert message in str(error)
    assert error.where == str(root / INDEX)


def test_a_tensor_in_two_files_is_refused(root):
    write_safetensors(root / "2.safetensors", {**SECOND, "a": FIRST["a"]})
    assert "tensor a is also in 1.safetensors" in str(refusal(root))


@pytest.mark.parametrize("damage", [b"", b"abcdefgh12345"])
def test_a_broken_shard_is_refused_by_name(root, damage):
    (root / "2.safetensors").write_bytes(damage)
    assert refusal(root).where == str(root / "2.safetensors")


def test_a_shard_cut_after_opening_is_noticed(root):
    checkpoint = Checkpoint.open(root)
    with (root / "1.safetensors").open("r+b") as f:
        f.truncate(checkpoint.info("a").begin + 5)
    with pytest.raises(InputError, match="the file ended inside tensor a"):
        checkpoint.read("a")


def test_the_fingerprint_changes_with_any_byte_of_a_small_file(root):
    before = Checkpoint.open(root).fingerprint
    data = bytearray((root / "1.safetensors").read_bytes())
    data[-1] ^= 1
    (root / "1.safetensors").write_bytes(data)
    after = Checkpoint.open(root).fingerprint
    assert {name for name in before if before[name] != after[name]} == {"1.safetensors"}


def test_a_large_file_is_fingerprinted_by_its_size_header_and_samples(tmp_path):
    file = tmp_path / "large"
    with file.open("wb") as f:
        f.truncate(70 * 2**20)
    before = fingerprint_file(file)
    with file.open("r+b") as f:
        f.seek(-1, 2)
        f.write(b"x")
    assert before.startswith("sampled-")
    assert fingerprint_file(file) != before
    assert fingerprint_file(file, header=b"h") != fingerprint_file(file)


@pytest.mark.parametrize("content", ["[1]", "", "{'a': 1}", "[" * 100_000])
def test_only_a_json_object_is_read(tmp_path, content):
    (tmp_path / "f.json").write_text(content)
    with pytest.raises(InputError):
        read_json(tmp_path / "f.json")
