"""The model card: what the hub reads, and no number that is not in a report."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard

from q38.base.errors import InputError
from q38.release.build import build
from q38.release.card import card
from q38.release.collect import from_model
from q38.release.licence import find_licence
from q38.release.seal import BrokenSeal

DATA = Path(__file__).parents[1] / "data"


def quality_report(**values: float) -> dict[str, Any]:
    """The quality part of a verify document, with these values."""
    checks = [
        {"name": name, "passed": None, "value": value, "standard_error": value / 10, "limit": None}
        for name, value in values.items()
    ]
    part = {
        "name": "quality", "passed": True, "checks": checks, "positions": 1016, "sequences": 8, "seqlen": 128, "dtype": "bfloat16",
        "text": {"source": "stdlib", "origin": "Python standard library"},
        "floor": {"kind": "x", **{name: {"value": value / 100} for name, value in values.items()}},
    }  # fmt: skip
    structure = {"name": "structure", "passed": True, "checks": [{"name": "x", "value": None}] * 3}
    return {"schema": "q38.verify/1", "passed": True, "parts": [structure, part]}


@pytest.fixture
def quality(tmp_path: Path) -> Path:
    file = tmp_path / "quality.json"
    file.write_text(json.dumps(quality_report(kl=0.0123456, nll=7.654321)))
    return file


def test_the_hubs_own_client_reads_the_front_matter(packed: Path, tmp_path: Path) -> None:
    build(from_model(packed), tmp_path / "out", name="Mine", base_model="owner/name", license="apache-2.0")
    assert "\n# Mine\n" in (tmp_path / "out" / "README.md").read_text()
    data = ModelCard.load(tmp_path / "out" / "README.md").data
    assert (data.base_model, data.license, data.library_name) == ("owner/name", "apache-2.0", "q38")
    assert data.to_dict()["base_model_relation"] == "quantized"
    assert {"qwen4_exp", "auto-round", "2-bit", "8-bit", "quantized"} <= set(data.tags)
    assert data.pipeline_tag == "text-generation"


def test_the_card_of_a_release_is_the_one_in_it(sealed: Path) -> None:
    assert card(sealed) == (sealed / "README.md").read_text()


def test_measured_numbers_stand_beside_their_command(packed: Path, quality: Path, tmp_path: Path) -> None:
    build(from_model(packed, quality=quality), tmp_path / "out")
    text = (tmp_path / "out" / "README.md").read_text()
    assert "| kl | 0.01235 | 0.001235 | 0.0001235 |  |" in text
    assert "| nll | 7.654 | 0.7654 | 0.07654 |  |" in text
    command = "q38 verify MODEL --source SOURCE --text stdlib --tokens 1024 --seqlen 128 --dtype bfloat16"
    assert f"\n    {command}\n" in text
    assert "Structure: passed, 3 checks." in text


def test_without_reports_there_is_no_measured_number(sealed: Path) -> None:
    text = (sealed / "README.md").read_text()
    assert "MEASURED" not in text
    for heading in ("## Quality", "## Speed", "## Behaviour"):
        assert heading not in text


def test_sizes_are_those_of_the_files(sealed: Path) -> None:
    from q38.checkpoint.index import Checkpoint

    text = (sealed / "README.md").read_text()
    rows = re.findall(r"^\| (\w+) \| ([\d,]+) \| ([\d, ]+) \|", text, flags=re.MULTILINE)
    assert len(rows) > 10
    parameters = sum(int(row[1].replace(",", "")) for row in rows)
    assert f"{parameters:,} parameters" in text
    bits = 8 * Checkpoint.open(sealed).nbytes / parameters
    assert f"{bits:.3f} bits per weight" in text
    assert ("experts", "2") in [(row[0], row[2].strip()) for row in rows]


def test_a_failed_behaviour_is_not_hidden(packed: Path, tmp_path: Path) -> None:
    file = tmp_path / "behaviour.json"
    checks = [
        {"name": "json output", "passed": True, "note": "a | b"},
        {"name": "tools", "passed": False, "note": ""},
        {"name": "reasoning", "passed": None, "note": "not supported"},
    ]
    document = {"schema": "q38.verify-server/1", "passed": False, "parts": [{"name": "x", "checks": checks}]}
    file.write_text(json.dumps(document))
    build(from_model(packed, behaviour=file), tmp_path / "out")
    text = (tmp_path / "out" / "README.md").read_text()
    assert "by `q38 verify --server`: FAILED" in text
    assert r"| json output | passed | a \| b |" in text
    assert "| tools | FAILED |  |" in text
    assert "| reasoning | no verdict | not supported |" in text


def test_a_speed_report_of_another_version_gives_no_table(packed: Path, tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    file.write_text(json.dumps({"schema": "q38.bench/0", "contexts": []}))
    build(from_model(packed, speed=file), tmp_path / "out")
    assert "## Speed" not in (tmp_path / "out" / "README.md").read_text()


def test_a_card_of_ones_own_is_taken_as_it_is_and_must_have_front_matter(
    packed: Path, tmp_path: Path
) -> None:
    own = tmp_path / "own.md"
    own.write_text("---\nlicense: mit\n---\n\n# mine\n")
    build(from_model(packed), tmp_path / "out", card=own)
    assert (tmp_path / "out" / "README.md").read_text() == own.read_text()
    for text in ("# mine\n", "---\n[1, 2]\n---\n", "---\na: [\n---\n"):
        own.write_text(text)
        with pytest.raises(InputError, match=r"own\.md"):
            build(from_model(packed), tmp_path / "other", card=own)
    assert not (tmp_path / "other").exists()


def test_the_licence_comes_from_the_source(packed: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "LICENSE").write_text("Do as you like.")
    (source / "README.md").write_text("---\nlicense: other\nlicense_name: qwen\nlicense_link: LICENSE\n---\n")
    result = build(from_model(packed, source=source), tmp_path / "out")
    assert not any("licence" in warning for warning in result["warnings"])
    assert (tmp_path / "out" / "LICENSE").read_text() == "Do as you like."
    data = ModelCard.load(tmp_path / "out" / "README.md").data
    assert (data.license, data.license_name, data.license_link) == ("other", "qwen", "LICENSE")
    text = (tmp_path / "out" / "README.md").read_text()
    assert "qwen, LICENSE (files: LICENSE), as the checkpoint that this was made from." in text


def test_no_licence_is_assumed(sealed: Path, tmp_path: Path) -> None:
    assert ModelCard.load(sealed / "README.md").data.license is None
    assert "names no licence" in (sealed / "README.md").read_text()
    (tmp_path / "LICENSE.txt").write_text("x")
    assert find_licence(tmp_path).to_dict() == {
        "license": "other", "license_name": None, "license_link": "LICENSE.txt", "files": ["LICENSE.txt"], "given": False,
    }  # fmt: skip
    (tmp_path / "README.md").write_text("no front matter")
    assert find_licence(tmp_path).identifier == "other"


def test_a_changed_release_has_no_card(release: Path) -> None:
    with (release / "RELEASE.json").open("a") as f:
        f.write(" ")
    with pytest.raises(BrokenSeal):
        card(release)
