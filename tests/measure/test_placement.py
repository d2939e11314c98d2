from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from q38.base.errors import InputError
from q38.cli.app import main
from q38.measure.placement import build_placement, plan_placement
from q38.residency.profile import Profile, load
from q38.residency.trace import read_trace

TOKENS, SEQLEN = 512, 64


@pytest.fixture(scope="module")
def built(
    packed: Path, tiny_ple: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path, dict[str, Any]]:
    """(profile, trace, report)."""
    folder = tmp_path_factory.mktemp("placement")
    profile, trace = folder / "profile.safetensors", folder / "trace.safetensors"
    report = build_placement(packed, profile, ple=tiny_ple, tokens=TOKENS, seqlen=SEQLEN, trace=trace)
    return profile, trace, report


def test_every_token_selects_top_k_experts_in_every_layer(built: Any, packed: Path) -> None:
    profile = load(built[0])
    text = json.loads((packed / "config.json").read_text())["text_config"]
    assert profile.count.shape == (text["num_hidden_layers"], text["num_experts"])
    assert (profile.count.sum(1) == TOKENS * text["num_experts_per_tok"]).all()
    assert profile.mass.sum(1) == pytest.approx(
        np.full(profile.layers, TOKENS), rel=1e-2
    )  # gate weights add up to 1


def test_the_counts_are_those_of_the_router_logits(built: Any, packed: Path, tiny_ple: Path) -> None:
    from q38.hf.hooks import qsa_shortcut
    from q38.hf.load import load_tokenizer
    from q38.measure.loading import load_for_measuring
    from q38.model.text import load_texts, pack_tokens

    ids = pack_tokens(
        load_texts("stdlib", "calibration").texts,
        load_tokenizer(packed),
        length=SEQLEN,
        count=TOKENS // SEQLEN,
    ).ids
    model = load_for_measuring(packed, ple=tiny_ple)
    with qsa_shortcut(), torch.inference_mode():
        logits = model(input_ids=ids[:4], use_cache=False, output_router_logits=True).router_logits
    first = read_trace(built[1]).ids[: 4 * SEQLEN]  # the first forward
    for layer, scores in enumerate(logits):
        chosen = scores.softmax(-1, dtype=torch.float).topk(first.shape[2]).indices
        assert np.array_equal(np.sort(chosen.numpy()), np.sort(first[:, layer]))


def test_the_profile_is_the_sum_of_the_trace(built: Any) -> None:
    profile, summed = load(built[0]), Profile.of_trace(read_trace(built[1]))
    assert np.array_equal(profile.count, summed.count) and profile.tokens == summed.tokens == TOKENS


def test_the_profile_says_where_it_comes_from(built: Any) -> None:
    metadata = load(built[0]).metadata
    assert all(len(metadata[key]) == 64 for key in ("model_source", "model_weights", "text_sha256"))
    assert metadata["text"] == "stdlib" and metadata["split"] == "calibration"
    assert {"q38", "torch", "transformers"} <= metadata.keys()


def test_coverage_rises_to_one_and_is_lower_on_held_out_text(
    built: Any, packed: Path, tiny_ple: Path
) -> None:
    rows = build_placement(packed, built[0], ple=tiny_ple, tokens=TOKENS, seqlen=SEQLEN, sizes=[1, 4, 16])[
        "coverage"
    ]
    held_out = [row["equal"]["selections"] for row in rows]
    assert held_out == sorted(held_out) and held_out[-1] == 1
    assert all(row["built"]["selections"] >= row["equal"]["selections"] for row in rows)
    assert rows[0]["equal"]["selections"] > rows[0]["even"]


def test_a_second_run_is_up_to_date_and_the_file_is_the_same(
    built: Any, packed: Path, tiny_ple: Path
) -> None:
    before = built[0].read_bytes()
    again = build_placement(packed, built[0], ple=tiny_ple, tokens=TOKENS, seqlen=SEQLEN)
    assert again["up_to_date"] and built[0].read_bytes() == before
    assert again["coverage"] == built[2]["coverage"]


def test_starting_over_makes_the_same_bytes(built: Any, packed: Path, tiny_ple: Path, tmp_path: Path) -> None:
    build_placement(packed, tmp_path / "p", ple=tiny_ple, tokens=TOKENS, seqlen=SEQLEN)
    assert (tmp_path / "p").read_bytes() == built[0].read_bytes()


def test_a_profile_of_other_text_is_not_replaced_in_passing(built: Any, packed: Path) -> None:
    before = built[0].read_bytes()
    with pytest.raises(InputError, match="another sequences"):
        plan_placement(packed, built[0], tokens=2 * TOKENS, seqlen=SEQLEN)
    assert not plan_placement(packed, built[0], tokens=2 * TOKENS, seqlen=SEQLEN, fresh=True)["up_to_date"]
    assert built[0].read_bytes() == before


def test_a_file_that_is_no_profile_is_never_replaced(packed: Path, tmp_path: Path) -> None:
    file = tmp_path / "notes"
    file.write_text("mine")
    with pytest.raises(InputError):
        build_placement(packed, file, tokens=TOKENS, fresh=True)
    assert file.read_text() == "mine"


@pytest.mark.parametrize(("tokens", "seqlen"), [(511, 64), (0, 64), (600, 400), (1024, 1024), (1024, 0)])
def test_too_few_tokens_are_refused_before_any_work(
    packed: Path, tmp_path: Path, tokens: int, seqlen: int
) -> None:
    with pytest.raises(InputError):
        build_placement(packed, tmp_path / "p", tokens=tokens, seqlen=seqlen)
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_writes_nothing(packed: Path, tmp_path: Path) -> None:
    plan = plan_placement(packed, tmp_path / "p", tokens=1000, seqlen=64)
    assert (plan["tokens"], plan["up_to_date"]) == (896, False)  # 14 sequences of 64: two equal halves
    assert list(tmp_path.iterdir()) == []


class TestCommand:
    def run(self, monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
        monkeypatch.setattr(sys, "argv", ["q38", "build-placement", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        code = ended.value.code
        return code if isinstance(code, int) else 0

    def test_prints_the_table_and_the_same_as_json(
        self,
        built: Any,
        packed: Path,
        tiny_ple: Path,
        monkeypatch: pytest.MonkeyPatch,
        capfd: pytest.CaptureFixture[str],
    ) -> None:
        options = (
            packed,
            "-o",
            built[0],
            "--ple",
            tiny_ple,
            "--tokens",
            TOKENS,
            "--seqlen",
            SEQLEN,
            "--resident",
            "2,4",
        )
        assert self.run(monkeypatch, *options) == 0
        assert "held out, by layer" in capfd.readouterr().out
        assert self.run(monkeypatch, *options, "--json") == 0
        document = json.loads(capfd.readouterr().out)
        assert [row["resident"] for row in document["coverage"]] == [2, 4]

    def test_a_short_trace_exits_2(
        self, packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
    ) -> None:
        assert self.run(monkeypatch, packed, "-o", tmp_path / "p", "--tokens", 500) == 2
        err = capfd.readouterr().err
        assert err.count("\n") == 1 and "512" in err
