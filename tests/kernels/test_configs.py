"""Tuned config files: format, lookup, and the shipped ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from q38.base.errors import InputError
from q38.data import data_path
from q38.kernels.configs import SCHEMA, Entry, Tuned, file_name, in_use, load, own_directory, shipped

SHAPE = {"hidden": 2560, "intermediate": 640, "group": 128, "top_k": 10}


def tuned() -> Tuned:
    entries = tuple(Entry("decode", SHAPE, t, {"tiles13": t}, 10.0, 12.0) for t in (1, 4, 16))
    return Tuned("NVIDIA Test 1", "3.6.0", "trace", entries)


def test_a_written_file_reads_back_the_same(tmp_path: Path) -> None:
    file = tmp_path / "x.json"
    file.write_text(json.dumps(tuned().to_dict()))
    assert load(file) == tuned()


@pytest.mark.parametrize(("tokens", "nearest"), [(1, 1), (2, 1), (3, 4), (4, 4), (9, 16), (7, 4), (100, 16)])
def test_the_nearest_token_count_by_ratio_is_taken(tokens: int, nearest: int) -> None:
    entry = tuned().find("decode", SHAPE, tokens)
    assert entry is not None
    assert entry.tokens == nearest


def test_another_kernel_or_shape_finds_nothing() -> None:
    assert tuned().find("prefill", SHAPE, 4) is None
    assert tuned().find("decode", {**SHAPE, "hidden": 2048}, 4) is None


@pytest.mark.parametrize(
    "damage",
    [
        {"schema": "q38.kernels/0"},
        {"entries": [{"kernel": "decode"}]},
        {"entries": [{"kernel": "other", "shape": {}, "tokens": 1, "config": {}, "us": 1, "default_us": 1}]},
        {"entries": 5},
    ],
)
def test_a_malformed_file_is_refused_with_its_name(tmp_path: Path, damage: dict[str, object]) -> None:
    file = tmp_path / "x.json"
    file.write_text(json.dumps(tuned().to_dict() | damage))
    with pytest.raises(InputError, match=r"x\.json"):
        load(file)


def test_a_device_name_becomes_a_file_name() -> None:
    assert file_name("NVIDIA RTX PRO 4000 Blackwell") == "NVIDIA_RTX_PRO_4000_Blackwell.json"


def test_an_unknown_device_has_no_shipped_file() -> None:
    assert shipped("NVIDIA Nonesuch") is None


def test_what_the_user_tuned_goes_before_what_is_shipped(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("Q38_STATE_DIR", str(tmp_path))
    in_use.cache_clear()
    try:
        assert in_use("NVIDIA Nonesuch") is None
        assert in_use("NVIDIA H200") == shipped("NVIDIA H200")
        in_use.cache_clear()
        own_directory().mkdir()
        (own_directory() / file_name("NVIDIA H200")).write_text(json.dumps(tuned().to_dict()))
        assert in_use("NVIDIA H200") == tuned() != shipped("NVIDIA H200")
    finally:
        in_use.cache_clear()


def test_every_shipped_entry_is_a_geometry_that_its_kernel_takes() -> None:
    from q38.kernels.moe_decode import DecodeConfig, unsupported
    from q38.residency.layout import ExpertLayout

    files = [
        f
        for f in data_path("assets", "triton").glob("*.json")
        if json.loads(f.read_text()).get("schema") == SCHEMA
    ]
    assert files
    for file in files:
        for entry in load(file).entries:
            assert entry.default_us is None or entry.us <= entry.default_us
            if entry.kernel == "decode":
                shape = entry.shape
                layout = ExpertLayout(shape["hidden"], shape["intermediate"], shape["group"])
                assert unsupported(layout, shape["top_k"], DecodeConfig(**entry.config)) is None
