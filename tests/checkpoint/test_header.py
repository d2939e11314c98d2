import json
import struct
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from q38.base.errors import InputError
from q38.checkpoint.header import ITEM_BITS, read_header


def write(path: Path, header: object, data: bytes) -> Path:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + data)
    return path


def entry(dtype: str, shape: list[int], begin: int, end: int) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


GOOD = {"a": entry("BF16", [2, 3], 0, 12), "b": entry("I64", [1], 12, 20)}


def refusal(path: Path) -> str:
    with pytest.raises(InputError) as caught:
        read_header(path)
    assert caught.value.where == str(path)
    assert caught.value.remedy
    return caught.value.what


def test_offsets_become_absolute(tmp_path):
    header = read_header(write(tmp_path / "f", GOOD, bytes(20)))
    start = header.data_start
    assert [(t.name, t.begin - start, t.end - start) for t in header.tensors.values()] == [
        ("a", 0, 12),
        ("b", 12, 20),
    ]


def test_tensors_come_in_file_order(tmp_path):
    header = {"b": entry("U8", [1], 1, 2), "a": entry("U8", [1], 0, 1)}
    assert list(read_header(write(tmp_path / "f", header, b"xy")).tensors) == ["a", "b"]


def test_a_file_of_the_reference_implementation_is_read_alike(tmp_path):
    tensors = {"x": torch.zeros(3, 5, dtype=torch.bfloat16), "y": torch.zeros((), dtype=torch.float32)}
    save_file(tensors, tmp_path / "f", metadata={"format": "pt"})
    header = read_header(tmp_path / "f")
    assert {n: (t.dtype, t.shape) for n, t in header.tensors.items()} == {
        "x": ("BF16", (3, 5)),
        "y": ("F32", ()),
    }
    assert header.metadata == {"format": "pt"}


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b"", "the file is empty"),
        (b"abc", "ends after 3 bytes"),
        (struct.pack("<Q", 2**40), "not a safetensors file"),
        (struct.pack("<Q", 1) + b"{", "not a safetensors file"),
        (struct.pack("<Q", 100) + b"{}", "ends inside its header"),
        (struct.pack("<Q", 2) + b"[]", "not a JSON object"),
        (struct.pack("<Q", 3) + b"{a}", "not valid JSON"),
        (struct.pack("<Q", 2) + b"\xff\xfe", "not valid JSON"),
        (struct.pack("<Q", 20_000) + b"[" * 20_000, "not valid JSON"),
    ],
)
def test_a_file_that_is_no_safetensors_is_refused(tmp_path, content, what):
    (tmp_path / "f").write_bytes(content)
    assert what in refusal(tmp_path / "f")


@pytest.mark.parametrize(
    ("header", "size", "what"),
    [
        ({"a": entry("BF16", [2, 3], 0, 10)}, 10, "spans 10 bytes, BF16 [2, 3] needs 12"),
        ({"a": entry("BF17", [2], 0, 4)}, 4, "unknown dtype BF17"),
        ({"a": entry("U8", [-1], 0, 0)}, 0, "malformed"),
        ({"a": entry("U8", [2.0], 0, 2)}, 2, "malformed"),
        ({"a": entry("U8", [True], 0, 1)}, 1, "malformed"),
        ({"a": {"dtype": "U8", "shape": [1]}}, 1, "malformed"),
        ({"a": {"dtype": "U8", "shape": [1], "data_offsets": [0]}}, 1, "malformed"),
        ({"a": [1, 2]}, 0, "malformed"),
        ({"a": entry("U8", [2], 0, 2), "b": entry("U8", [2], 1, 3)}, 3, "b overlaps another tensor"),
        ({"a": entry("U8", [2], 0, 2), "b": entry("U8", [2], 3, 5)}, 5, "b leaves a gap"),
        ({"a": entry("U8", [2], 1, 3)}, 3, "a leaves a gap"),
        (GOOD, 19, "is truncated: "),
        (GOOD, 21, "has trailing bytes"),
        ({"__metadata__": ["x"], **GOOD}, 20, "__metadata__"),
    ],
)
def test_a_header_that_does_not_describe_its_data_is_refused(tmp_path, header, size, what):
    assert what in refusal(write(tmp_path / "f", header, bytes(size)))


def test_a_tensor_that_is_there_twice_is_named(tmp_path):
    raw = b'{"a": %s, "a": %s}' % ((json.dumps(entry("U8", [1], 0, 1)).encode(),) * 2)
    assert "key a appears twice" in refusal(write(tmp_path / "f", raw, b"x"))


def test_a_missing_file_is_refused(tmp_path):
    assert refusal(tmp_path / "absent") == "no such file"


def test_a_directory_in_the_place_of_a_file_is_refused(tmp_path):
    assert "cannot be read" in refusal(tmp_path)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(
    st.lists(
        st.tuples(st.sampled_from(sorted(ITEM_BITS)), st.lists(st.integers(0, 4), max_size=3)), max_size=6
    )
)
def test_any_well_formed_file_is_read_back(tmp_path, shapes):
    header, position = {}, 0
    for n, (dtype, shape) in enumerate(shapes):
        size = int(torch.tensor(shape).prod()) * ITEM_BITS[dtype] // 8
        header[f"t{n}"] = entry(dtype, shape, position, position + size)
        position += size
    read = read_header(write(tmp_path / "f", header, bytes(position)))
    assert {name: (t.dtype, list(t.shape)) for name, t in read.tensors.items()} == {
        f"t{n}": pair for n, pair in enumerate(shapes)
    }


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=300)
@given(st.data())
def test_damage_anywhere_in_the_header_is_read_or_refused_never_a_crash(tmp_path, data):
    content = bytearray(write(tmp_path / "f", GOOD, bytes(20)).read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 21))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.one_of(st.just(len(content)), st.integers(0, len(content))))
    (tmp_path / "f").write_bytes(content[:cut])
    try:
        read_header(tmp_path / "f")
    except InputError as error:
        assert error.remedy
