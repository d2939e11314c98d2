"""q38 doctor --ple: what the disk under a table allows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

import q38.cli.doctor  # noqa: F401 (registers the verb)
from q38.base.errors import InputError
from q38.cli.app import app
from q38.ple.probe import rows_per_token


def test_the_rows_of_a_token_come_from_the_models_config(
    tiny_ple: Path, tiny_source: Path, tmp_path: Path
) -> None:
    heads = {"ngram_size": 2, "heads_per_ngram": 4}
    config = json.loads((tiny_source / "config.json").read_text())
    (tmp_path / "config.json").write_text(
        json.dumps({**config, "text_config": {**config["text_config"], **heads}})
    )
    assert rows_per_token(tmp_path / "ple") == 4  # beside the table
    assert rows_per_token(tmp_path / "ple", tiny_source) == 16  # as told
    assert rows_per_token(tiny_ple.parent / "elsewhere" / "ple") == 16  # of the release
    del config["text_config"]["ple_layer_ids"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match="no n-gram table"):
        rows_per_token(tmp_path / "ple")


def test_doctor_prints_what_a_prompt_could_take(tiny_ple: Path, tiny_source: Path) -> None:
    run = CliRunner()
    found = run.invoke(app, ["doctor", "--ple", str(tiny_ple), "--model", str(tiny_source), "--json"])
    assert found.exit_code == 0, found.output
    ple = json.loads(found.stdout)["ple"]
    assert ple["iops"] > 0
    assert ple["tokens_per_s"] == pytest.approx(ple["iops"] / 16)
    assert run.invoke(app, ["doctor", "--ple", str(tiny_source)]).exit_code == 2
    assert run.invoke(app, ["doctor", "--model", str(tiny_source)]).exit_code == 2
