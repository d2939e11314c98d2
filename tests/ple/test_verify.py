import hashlib
import json
import shutil
from pathlib import Path

import pytest

from q38.base.errors import CheckFailed, InputError
from q38.ple import split as split_module
from q38.ple.split import split_ple
from q38.ple.verify import verify_ple
from tests.ple.sources import make_source, poisoned

TABLE = "ple.f8_e4m3.bin"


@pytest.fixture(scope="module")
def sources(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("verify")
    made = {"bf16": make_source(root / "bf16"), "fp8": make_source(root / "fp8", fp8=True)}
    for name, source in made.items():
        split_ple(source, root / f"{name}_ple")
    return made


@pytest.fixture(params=["bf16", "fp8"])
def pair(request, sources, tmp_path) -> tuple[Path, Path]:
    """A source and a copy of its table, to be broken."""
    source = sources[request.param]
    shutil.copytree(source.with_name(f"{source.name}_ple"), tmp_path / "ple")
    return source, tmp_path / "ple"


def flip(directory: Path, at: int) -> None:
    file = directory / TABLE
    data = bytearray(file.read_bytes())
    data[at] ^= 0x11
    file.write_bytes(data)


def test_a_right_table_passes_in_full(pair):
    source, ple = pair
    assert verify_ple(ple, against=source, full=True) == {
        "rows_compared": 20_992,
        "sha256_checked": True,
        "ok": True,
    }


@pytest.mark.parametrize(("fp8", "dtype"), [(True, "f8_e4m3"), (False, "source")])
def test_the_full_comparison_sees_a_value_that_is_no_number_on_both_sides(tmp_path, monkeypatch, fp8, dtype):
    source = poisoned(make_source(tmp_path / "source", fp8=fp8), row=1000)
    with monkeypatch.context() as patch:  # as split-ple of an earlier version passed it on
        patch.setattr(split_module, "first_not_finite", lambda *_: None)
        split_ple(source, tmp_path / "ple", dtype=dtype)
    assert verify_ple(tmp_path / "ple", full=True)["ok"]
    with pytest.raises(CheckFailed, match=r"row 1000 of .*shard_4\.weight holds NaN or infinity"):
        verify_ple(tmp_path / "ple", against=source, full=True)


def test_a_sample_takes_rows_of_every_shard(pair):
    source, ple = pair
    assert 12 * 50 < verify_ple(ple, against=source)["rows_compared"] <= 12 * 64


def test_a_sample_sees_a_changed_first_row(pair):
    source, ple = pair
    flip(ple, 3)
    with pytest.raises(CheckFailed, match="row 0 differs"):
        verify_ple(ple, against=source)


def test_the_full_comparison_names_the_row_that_changed(pair):
    source, ple = pair
    flip(ple, 12_345 * 16 + 5)
    info = json.loads((ple / "ple.json").read_text())
    info["sha256"] = hashlib.sha256((ple / TABLE).read_bytes()).hexdigest()
    (ple / "ple.json").write_text(json.dumps(info))
    with pytest.raises(CheckFailed, match="row 12345 differs"):
        verify_ple(ple, against=source, full=True)


def test_the_hash_alone_sees_a_changed_byte(pair):
    _, ple = pair
    flip(ple, 200_000)
    with pytest.raises(CheckFailed, match="sha256"):
        verify_ple(ple, full=True)


def test_the_table_of_another_model_is_refused(pair, tmp_path):
    _, ple = pair
    other = make_source(tmp_path / "other", vocab_base=1300)
    with pytest.raises(InputError, match="the source's table has"):
        verify_ple(ple, against=other)


def test_another_scale_than_the_source_has_fails(sources, tmp_path):
    shutil.copytree(sources["fp8"].with_name("fp8_ple"), tmp_path / "ple")
    file = tmp_path / "ple" / "ple.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"weight_scale": 0.5}))
    with pytest.raises(CheckFailed, match=r"weight_scale is 0\.5"):
        verify_ple(tmp_path / "ple", against=sources["fp8"])
