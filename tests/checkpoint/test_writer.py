import hashlib
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from q38.base.errors import InputError, ResourceError
from q38.checkpoint.header import read_header
from q38.checkpoint.writer import (
    atomic_file,
    copy_file,
    dtype_name,
    require_free_space,
    stream_safetensors,
    write_json,
    write_safetensors,
)
from tests.checkpoint.disks import small_disk


def left_behind(directory: Path) -> list[str]:
    return sorted(p.name for p in directory.iterdir())


def test_the_record_holds_the_bytes_and_hash_of_the_file(tmp_path):
    with atomic_file(tmp_path / "f") as f:
        f.write(b"ab")
        f.write(bytearray(b"cd"))
    record = f.record()
    assert (tmp_path / "f").read_bytes() == b"abcd"
    assert (record.bytes, record.sha256) == (4, hashlib.sha256(b"abcd").hexdigest())


def test_nothing_remains_when_writing_fails(tmp_path):
    with pytest.raises(ValueError, match="stop"), atomic_file(tmp_path / "f") as f:
        f.write(b"half")
        raise ValueError("stop")
    assert left_behind(tmp_path) == []


def test_the_old_file_stays_when_writing_the_new_one_fails(tmp_path):
    (tmp_path / "f").write_bytes(b"old")
    with pytest.raises(ValueError, match="stop"), atomic_file(tmp_path / "f") as f:
        f.write(b"new")
        raise ValueError("stop")
    assert (tmp_path / "f").read_bytes() == b"old"


def test_the_file_does_not_have_its_name_before_it_is_whole(tmp_path):
    with atomic_file(tmp_path / "f") as f:
        f.write(b"half")
        assert left_behind(tmp_path) == ["f.q38-tmp"]
    assert left_behind(tmp_path) == ["f"]


def test_a_file_in_the_place_of_the_directory_is_refused(tmp_path):
    (tmp_path / "d").write_bytes(b"")
    with pytest.raises(InputError, match="cannot be written"):
        write_json(tmp_path / "d" / "f.json", {})


def test_a_missing_directory_is_refused(tmp_path):
    with pytest.raises(InputError, match="cannot be written"):
        write_json(tmp_path / "d" / "f.json", {})


def test_a_full_disk_is_a_resource_error_and_leaves_nothing(tmp_path):
    with small_disk(tmp_path / "disk") as disk:
        with pytest.raises(ResourceError, match="the disk is full") as caught:
            write_safetensors(disk / "f", {"a": torch.zeros(2**20, dtype=torch.uint8)})
        assert caught.value.where == str(disk / "f")
        assert left_behind(disk) == []


def test_a_read_only_disk_is_refused(tmp_path):
    with small_disk(tmp_path / "disk", read_only=True) as disk, pytest.raises(InputError, match="Read-only"):
        write_json(disk / "f.json", {})


def test_too_little_space_is_refused_with_the_shortfall(tmp_path):
    free = shutil.disk_usage(tmp_path).free
    with pytest.raises(ResourceError, match=r"short"):
        require_free_space(tmp_path / "not" / "yet", free + 2**40)


def test_enough_space_is_accepted_for_a_directory_that_does_not_exist_yet(tmp_path):
    require_free_space(tmp_path / "not" / "yet", 1)


@pytest.mark.parametrize(
    "dtype",
    [
        torch.bool,
        torch.uint8,
        torch.int32,
        torch.int64,
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float8_e4m3fn,
    ],
)
def test_a_shard_is_read_back_by_the_reference_implementation(tmp_path, dtype):
    tensor = (torch.arange(24) % 2).view(4, 6).to(dtype)
    record = write_safetensors(tmp_path / "f", {"x": tensor, "t": tensor.t()})
    loaded = load_file(tmp_path / "f")
    assert torch.equal(loaded["x"].view(torch.uint8), tensor.view(torch.uint8))
    assert torch.equal(loaded["t"].float(), tensor.t().float())
    assert record.tensors == 2
    assert record.sha256 == hashlib.sha256((tmp_path / "f").read_bytes()).hexdigest()


def test_the_same_tensors_give_the_same_bytes(tmp_path):
    tensors = {"b": torch.ones(3), "a": torch.zeros(2)}
    first, second = (write_safetensors(tmp_path / name, tensors) for name in ("1", "2"))
    assert first.sha256 == second.sha256
    assert list(read_header(tmp_path / "1").tensors) == ["b", "a"]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40)
@given(st.binary(max_size=200), st.integers(1, 50))
def test_the_data_may_come_in_any_chunking(tmp_path, data, step):
    chunks = (data[i : i + step] for i in range(0, len(data), step))
    stream_safetensors(tmp_path / "f", [("x", "U8", (len(data),), len(data))], chunks)
    header = read_header(tmp_path / "f")
    assert header.data_start % 8 == 0
    assert (tmp_path / "f").read_bytes()[header.data_start :] == data


def test_data_that_does_not_fill_the_header_is_a_fault_of_ours_and_leaves_nothing(tmp_path):
    with pytest.raises(ValueError, match="3 bytes of data for 4"):
        stream_safetensors(tmp_path / "f", [("x", "U8", (4,), 4)], [b"abc"])
    assert left_behind(tmp_path) == []


def test_a_copy_is_hashed_on_the_way(tmp_path):
    (tmp_path / "a").write_bytes(b"content")
    assert copy_file(tmp_path / "a", tmp_path / "b").sha256 == hashlib.sha256(b"content").hexdigest()
    assert (tmp_path / "b").read_bytes() == b"content"


def test_a_copy_of_a_damaged_file_is_refused_and_the_old_target_stays(tmp_path):
    (tmp_path / "a").write_bytes(b"content")
    (tmp_path / "b").write_bytes(b"old")
    with pytest.raises(InputError, match=r"is damaged: sha256 is ed7002b4.*says 0000") as caught:
        copy_file(tmp_path / "a", tmp_path / "b", sha256="0" * 64)
    assert caught.value.where == str(tmp_path / "a")
    assert (tmp_path / "b").read_bytes() == b"old"
    assert left_behind(tmp_path) == ["a", "b"]


def test_a_copy_of_a_file_that_is_gone_names_the_source(tmp_path):
    with pytest.raises(InputError, match="cannot be read") as caught:
        copy_file(tmp_path / "a", tmp_path / "b")
    assert caught.value.where == str(tmp_path / "a")
    assert left_behind(tmp_path) == []


@pytest.mark.parametrize("error", [FileNotFoundError(2, "gone"), OSError(28, "No space left on device")])
def test_errors_of_what_feeds_a_file_are_not_those_of_the_file(tmp_path, error):
    def failing():
        yield b"ab"
        raise error

    with pytest.raises(type(error)) as caught:
        stream_safetensors(tmp_path / "f", [("x", "U8", (4,), 4)], failing())
    assert caught.value is error
    assert left_behind(tmp_path) == []


def test_bytes_that_were_still_buffered_on_a_full_disk_are_a_resource_error(tmp_path):
    with small_disk(tmp_path / "disk", "16k") as disk:
        (disk / "ballast").write_bytes(bytes(12 * 1024))
        with pytest.raises(ResourceError, match="the disk is full"), atomic_file(disk / "f") as f:
            for _ in range(5000):
                f.write(b"x")
        assert left_behind(disk) == ["ballast"]


def test_every_dtype_has_the_name_of_the_format():
    assert [dtype_name(d) for d in (torch.bfloat16, torch.float8_e4m3fn, torch.int32)] == [
        "BF16",
        "F8_E4M3",
        "I32",
    ]
