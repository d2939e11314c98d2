from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from q38.base.errors import InputError
from q38.cli.app import main
from q38.data import data_path
from q38.measure.verify import PARTS, verify
from tests.measure.packed import edit_json, edit_tensor

TEXT = data_path("assets", "text", "multilingual.jsonl")  # without the standard library: quick to tokenize
QUALITY = ("--parts", "quality", "--text", TEXT, "--tokens", 64, "--seqlen", 32)
EXPERT = "model.language_model.layers.0.mlp.experts.3.up_proj"
VALUES = "model.language_model.layers.3.self_attn.v_proj.scales"
# What is done to the model, the row that must see it, and the end of the file's name there.
FAULTS: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "one flipped sign": (
        lambda model: edit_tensor(model, f"{EXPERT}.scales", torch.neg),
        "shard hashes",
        ".safetensors",
    ),
    "values of the KV cache that are zero": (
        lambda model: edit_tensor(model, VALUES, torch.zeros_like),
        "shard hashes",
        ".safetensors",
    ),
    "another tokenizer": (
        lambda model: edit_json(
            model / "tokenizer.json", lambda t: t["model"]["vocab"].update({"zzzz": 1999})
        ),
        "manifest",
        "tokenizer.json",
    ),
}


def run_cli(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["q38", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        main()
    code = ended.value.code
    return code if isinstance(code, int) else 0


@pytest.fixture(scope="module")
def whole_report(tiny_quantized: Path, tiny_source: Path, tiny_ple: Path) -> dict[str, Any]:
    """All three parts on the model that AutoRound quantized."""
    return verify(
        tiny_quantized,
        source=tiny_source,
        ple=tiny_ple,
        text=str(TEXT),
        tokens=256,
        seqlen=64,
        max_kl=0.1,
        min_top1=0.2,
    )


def test_the_quantized_model_passes_every_part(whole_report: dict[str, Any]) -> None:
    assert [part["name"] for part in whole_report["parts"]] == list(PARTS)
    failed = [c for part in whole_report["parts"] for c in part["checks"] if c["passed"] is False]
    assert failed == []
    assert whole_report["passed"]


def test_the_report_says_what_was_checked_by_what(whole_report: dict[str, Any]) -> None:
    assert whole_report["schema"] == "q38.verify/1"
    assert {"torch", "transformers"} <= whole_report["versions"].keys()
    json.loads(json.dumps(whole_report, allow_nan=False))


def test_a_broken_model_fails_in_its_part_and_quality_is_left_out(
    broken: Callable[..., Path], tiny_source: Path, tiny_ple: Path
) -> None:
    model = broken()
    edit_tensor(model, f"{EXPERT}.scales", lambda t: t * float("inf"))
    report = verify(model, source=tiny_source, ple=tiny_ple)
    structure, numbers, quality = report["parts"]
    assert (report["passed"], structure["passed"], numbers["passed"]) == (False, True, False)
    assert quality["checks"][0]["note"] == "left out because an earlier part failed"


def test_without_a_source_quality_says_what_it_needs(packed: Path, tiny_ple: Path) -> None:
    report = verify(packed, ple=tiny_ple)
    assert report["passed"]
    assert (
        report["parts"][2]["checks"][0] | {"passed": None, "note": "needs --source"}
        == report["parts"][2]["checks"][0]
    )


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"parts": ["structure", "speed"]}, "unknown part 'speed'"),
        ({"parts": []}, "no part"),
        ({"tokens": 100, "seqlen": 256}, "100 tokens in sequences of 256"),
        ({"seqlen": 8}, "sequences of 8"),
        ({"max_kl": 0.0}, "not positive"),
        ({"min_top1": 90.0}, "no share"),
        ({"max_kl": 0.1}, "--max-kl: needs the checkpoint that MODEL was made from"),
        ({"min_top1": 0.9}, "--min-top1: needs the checkpoint"),
        ({"parts": ["structure", "quality"]}, "--parts quality: needs the checkpoint"),
        (
            {"parts": ["numbers"], "source": Path("s"), "max_kl": 0.1},
            "--max-kl: is a limit of the part quality",
        ),
    ],
)
def test_senseless_options_are_refused_before_any_work(
    tmp_path: Path, options: dict[str, Any], match: str
) -> None:
    with pytest.raises(InputError, match=match):
        verify(tmp_path, **options)


@pytest.mark.parametrize("name", ["model", "source"])
def test_a_report_does_not_go_into_the_directory_of_an_input(
    packed: Path, tiny_source: Path, tiny_ple: Path, name: str
) -> None:
    places = {"model": packed, "source": tiny_source}
    options: dict[str, Any] = {"parts": ["quality"], "text": str(TEXT), "tokens": 64, "seqlen": 32}
    with pytest.raises(InputError, match="would share a directory with an input"):
        verify(packed, source=tiny_source, ple=tiny_ple, report=places[name], fresh=True, **options)
    assert (places[name] / "config.json").exists()


def test_a_manifest_that_names_a_file_outside_is_not_followed(
    broken: Callable[..., Path], tiny_ple: Path
) -> None:
    model = broken(manifest=True)
    edit_json(model / "MANIFEST.json", lambda m: m["files"].update({"../x": {"bytes": 1, "sha256": "h"}}))
    (part,) = verify(model, ple=tiny_ple, parts=["structure"])["parts"]
    (fault,) = next(check["faults"] for check in part["checks"] if check["name"] == "manifest")
    assert fault["what"] == "names the file '../x' outside the directory"
    with pytest.raises(InputError, match="outside the directory"):
        verify(model, ple=tiny_ple, parts=["numbers"])


def test_too_little_text_is_refused(packed: Path, tiny_source: Path, tiny_ple: Path, tmp_path: Path) -> None:
    text = tmp_path / "two.jsonl"
    text.write_text('{"text": "one"}\n{"text": "two"}\n')
    with pytest.raises(InputError, match="tokens for"):
        verify(packed, source=tiny_source, ple=tiny_ple, parts=["quality"], text=str(text))


class TestCommand:
    def test_a_good_model_exits_0_with_one_json_document(
        self, packed: Path, tiny_ple: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
    ) -> None:
        code = run_cli(
            monkeypatch, "verify", packed, "--ple", tiny_ple, "--parts", "structure,numbers", "--json"
        )
        document = json.loads(capfd.readouterr().out)
        assert (code, document["passed"]) == (0, True)

    def test_a_broken_model_exits_1_and_prints_the_row_with_file_and_tensor(
        self,
        broken: Callable[..., Path],
        tiny_ple: Path,
        monkeypatch: pytest.MonkeyPatch,
        capfd: pytest.CaptureFixture[str],
    ) -> None:
        model = broken()
        edit_tensor(model, f"{EXPERT}.qzeros", lambda _: None)
        code = run_cli(monkeypatch, "verify", model, "--ple", tiny_ple, "--parts", "structure")
        out = capfd.readouterr().out
        assert code == 1
        assert f"{EXPERT}.qzeros: is missing" in out
        assert "verify: FAILED" in out

    @pytest.mark.parametrize("fault", FAULTS)
    def test_a_damaged_model_exits_1_with_the_row_that_sees_it(
        self,
        fault: str,
        broken: Callable[..., Path],
        tiny_ple: Path,
        monkeypatch: pytest.MonkeyPatch,
        capfd: pytest.CaptureFixture[str],
    ) -> None:
        damage, row, file = FAULTS[fault]
        model = broken(manifest=True)
        damage(model)
        code = run_cli(
            monkeypatch, "verify", model, "--ple", tiny_ple, "--parts", "structure,numbers", "--json"
        )
        checks = {
            c["name"]: c for part in json.loads(capfd.readouterr().out)["parts"] for c in part["checks"]
        }
        assert code == 1
        assert checks[row]["passed"] is False
        assert checks[row]["faults"][0]["file"].endswith(file)

    def test_a_directory_that_is_no_checkpoint_exits_2(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
    ) -> None:
        code = run_cli(monkeypatch, "verify", tmp_path / "none")
        err = capfd.readouterr().err
        assert code == 2
        assert err.count("\n") == 1 and "no such directory" in err

    def test_a_kl_above_the_limit_exits_1(
        self,
        packed: Path,
        tiny_source: Path,
        tiny_ple: Path,
        monkeypatch: pytest.MonkeyPatch,
        capfd: pytest.CaptureFixture[str],
    ) -> None:
        options = (*QUALITY, "--max-kl", 1e-7, "--json")
        code = run_cli(monkeypatch, "verify", packed, "--source", tiny_source, "--ple", tiny_ple, *options)
        (part,) = json.loads(capfd.readouterr().out)["parts"]
        assert code == 1
        assert next(c for c in part["checks"] if c["passed"] is False)["name"] == "kl divergence"

    def test_a_limit_that_nothing_is_compared_with_exits_2(
        self, packed: Path, tiny_ple: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
    ) -> None:
        code = run_cli(monkeypatch, "verify", packed, "--ple", tiny_ple, "--max-kl", 0.1)
        assert code == 2
        assert "--max-kl: needs the checkpoint" in capfd.readouterr().err

    def test_too_little_memory_exits_3_with_the_shortfall(
        self,
        packed: Path,
        tiny_source: Path,
        tiny_ple: Path,
        monkeypatch: pytest.MonkeyPatch,
        capfd: pytest.CaptureFixture[str],
    ) -> None:
        options = (*QUALITY, "--memory", "1MiB")
        code = run_cli(monkeypatch, "verify", packed, "--source", tiny_source, "--ple", tiny_ple, *options)
        err = capfd.readouterr().err
        assert code == 3
        assert "1.0 MiB are there" in err and "short" in err

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            (("--dtype", "int8"), "unknown dtype 'int8'"),
            (("--memory", "much"), "--memory"),
            (("--text", ",x"), "empty part"),
        ],
    )
    def test_a_senseless_option_exits_2(
        self,
        options: tuple[str, str],
        message: str,
        packed: Path,
        tiny_source: Path,
        tiny_ple: Path,
        monkeypatch: pytest.MonkeyPatch,
        capfd: pytest.CaptureFixture[str],
    ) -> None:
        given = ("verify", packed, "--source", tiny_source, "--ple", tiny_ple, "--parts", "quality")
        code = run_cli(monkeypatch, *given, *options)
        err = capfd.readouterr().err
        assert code == 2
        assert message in err and err.count("\n") == 1

    def test_a_report_is_written_and_printed_again_from_its_files(
        self,
        packed: Path,
        tiny_source: Path,
        tiny_ple: Path,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        capfd: pytest.CaptureFixture[str],
    ) -> None:
        options = (*QUALITY, "--report", tmp_path / "quality")
        given = ("verify", packed, "--source", tiny_source, "--ple", tiny_ple, *options)
        assert run_cli(monkeypatch, *given) == 0
        first = capfd.readouterr()
        assert (tmp_path / "quality" / "quality.md").exists()
        assert "token class" in first.out and "of the block alone" in first.out
        assert "host memory" in first.err
        assert run_cli(monkeypatch, *given) == 0
        again = capfd.readouterr()
        assert again.out == first.out
        assert "is up to date" in again.err
