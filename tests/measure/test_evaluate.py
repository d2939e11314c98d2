"""The block-streamed evaluation: the numbers of whole models, within a stated memory, resumable."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from q38.base.errors import InputError, ResourceError
from q38.base.progress import SILENT
from q38.checkpoint.index import Checkpoint
from q38.data import data_path
from q38.hf.load import load_tokenizer
from q38.measure import evaluate, needs
from q38.measure.evaluate import calibrated_on, held_out_tokens, measure_quality
from q38.model.text import load_texts, text_hash
from tests.measure.packed import copy_model, edit_json, edit_tensor
from tests.measure.whole import measure_whole

TEXT = str(
    data_path("assets", "text", "multilingual.jsonl")
)  # without the standard library: quick to tokenize
SMALL: dict[str, Any] = {"text": TEXT, "tokens": 256, "seqlen": 64}


def check(part: dict[str, Any], name: str) -> dict[str, Any]:
    found: dict[str, Any] = next(c for c in part["checks"] if c["name"] == name)
    return found


@pytest.fixture(scope="module")
def quality(packed: Path, tiny_source: Path, tiny_ple: Path) -> dict[str, Any]:
    return measure_quality(packed, tiny_source, ple=tiny_ple, **SMALL).to_dict()


def test_it_agrees_with_two_whole_models(
    quality: dict[str, Any], packed: Path, tiny_source: Path, tiny_ple: Path
) -> None:
    """Within the noise floor: the packed model sums its experts in another order there."""
    ids = held_out_tokens(TEXT, load_tokenizer(packed), tokens=256, seqlen=64).ids
    whole, errors = measure_whole(packed, tiny_source, ids, ple=tiny_ple)
    noise = quality["floor"]["kl divergence"]["value"]
    assert check(quality, "kl divergence")["value"] == pytest.approx(whole.kl.mean(), abs=noise)
    assert check(quality, "nll, source")["value"] == pytest.approx(whole.nll_reference.mean(), abs=1e-9)
    assert check(quality, "nll")["value"] == pytest.approx(whole.nll.mean(), abs=5e-4)
    assert check(quality, "top-1 agreement")["value"] == pytest.approx(whole.top1.mean(), abs=0.05)
    for row, error in zip(quality["layers"], errors, strict=True):
        assert row["relative_error"] == pytest.approx(error, rel=1e-3)


def test_two_bits_cost_more_than_the_floor_and_less_than_everything(quality: dict[str, Any]) -> None:
    kl, floor = check(quality, "kl divergence"), quality["floor"]["kl divergence"]
    assert 10 * floor["value"] < kl["value"] < 0.1
    assert kl["checked"] == quality["positions"] == 4 * 63
    assert quality["sequences"] == 4
    assert len(quality["text"]["sha256"]) == 64


def test_block_errors_are_above_their_floor_and_grow_over_the_blocks_alone(
    quality: dict[str, Any], tiny_source: Path
) -> None:
    layers = quality["layers"]
    assert len(layers) == len(Checkpoint.open(tiny_source).config["text_config"]["layer_types"])
    assert all(0 < row["floor"] < row["relative_error"] < 1 for row in layers)
    assert all(0 < row["standard_error"] < row["relative_error"] for row in layers)
    assert layers[0]["own"] == pytest.approx(layers[0]["relative_error"])
    assert layers[-1]["own"] < layers[-1]["relative_error"]


def test_the_source_measured_against_itself_is_exact(tiny_source: Path) -> None:
    part = measure_quality(tiny_source, tiny_source, text=TEXT, tokens=128, seqlen=64).to_dict()
    assert check(part, "kl divergence")["value"] == 0
    assert check(part, "top-1 agreement")["value"] == 1
    assert all(row["relative_error"] == row["own"] == 0 for row in part["layers"])


def test_float32_lowers_the_noise_floor(
    packed: Path, tiny_source: Path, tiny_ple: Path, quality: dict[str, Any]
) -> None:
    part = measure_quality(packed, tiny_source, ple=tiny_ple, dtype="float32", **SMALL).to_dict()
    exact, rounded = (p["floor"]["kl divergence"]["value"] for p in (part, quality))
    assert abs(exact) < rounded / 1000
    assert check(part, "kl divergence")["value"] == pytest.approx(
        check(quality, "kl divergence")["value"], rel=0.1
    )


def test_a_wrong_matrix_is_seen_in_its_block_and_in_the_divergence(
    packed: Path, tiny_source: Path, tiny_ple: Path, tmp_path: Path, quality: dict[str, Any]
) -> None:
    model = copy_model(packed, tmp_path / "model")
    edit_tensor(model, "model.language_model.layers.1.linear_attn.out_proj.scales", lambda t: -t)
    part = measure_quality(model, tiny_source, ple=tiny_ple, max_kl=0.01, **SMALL).to_dict()
    assert check(part, "kl divergence")["value"] > 10 * check(quality, "kl divergence")["value"]
    assert not part["passed"]
    before, after = part["layers"], quality["layers"]
    assert before[0]["relative_error"] == pytest.approx(after[0]["relative_error"])
    assert before[1]["own"] > 2 * after[1]["own"]
    assert before[2]["own"] == pytest.approx(
        after[2]["own"], rel=1e-3
    )  # fed by the source, it does not see it
    assert before[2]["relative_error"] > 2 * after[2]["relative_error"]


def test_every_language_has_its_row(packed: Path, tiny_source: Path, tiny_ple: Path) -> None:
    part = measure_quality(
        packed, tiny_source, ple=tiny_ple, text="multilingual", tokens=16 * 64, seqlen=64
    ).to_dict()
    languages = {row["name"]: row for row in part["by"]["language"]}
    assert set(languages) >= {"en", "de", "zh", "ja", "th", "python"}
    assert sum(row["positions"] for row in languages.values()) == part["positions"]
    assert all(row["sequences"] * 63 == row["positions"] for row in languages.values())
    kinds = {row["name"] for row in part["by"]["token class"]}
    assert {"word", "punctuation", "white space"} <= kinds


class TestMemory:
    def test_what_does_not_fit_is_refused_with_the_shortfall(
        self, packed: Path, tiny_source: Path, tiny_ple: Path
    ) -> None:
        with pytest.raises(ResourceError, match=r"host: needs .* short") as caught:
            measure_quality(packed, tiny_source, ple=tiny_ple, memory=2**20, **SMALL)
        assert caught.value.exit_code == 3

    def test_it_is_stated_before_and_holds(
        self, quality: dict[str, Any], packed: Path, tiny_source: Path, tiny_ple: Path
    ) -> None:
        memory = quality["memory"]
        assert memory["peak"] <= memory["stated"]
        assert memory["streams"] == 3 * 256 * 4 * 256 * 2

    def test_streams_on_disk_are_not_counted_as_memory(self, tiny_source: Path) -> None:
        from q38.hf.blocks import BlockModel

        model = BlockModel(tiny_source)
        sizes = [needs.memory_need(model, model, 10_000, 64, 8, on_disk=on_disk) for on_disk in (False, True)]
        assert sizes[0].host - sizes[1].host == sizes[0].streams == 3 * 640_000 * 1024 * 2

    def test_the_remedy_for_long_streams_is_a_report_on_disk(self, tiny_source: Path) -> None:
        from q38.hf.blocks import BlockModel

        model = BlockModel(tiny_source)
        need = needs.memory_need(model, model, 1_000_000, 64, 8, on_disk=False)
        with pytest.raises(ResourceError, match="Give --report DIR"):
            needs.require_memory(need, torch.device("cpu"), 2**30)


class TestReport:
    @pytest.fixture(scope="class")
    def report(
        self, packed: Path, tiny_source: Path, tiny_ple: Path, tmp_path_factory: pytest.TempPathFactory
    ) -> Path:
        out = tmp_path_factory.mktemp("report") / "quality"
        measure_quality(packed, tiny_source, ple=tiny_ple, report=out, **SMALL)
        return out

    def test_it_holds_the_same_numbers_as_without_a_report(
        self, report: Path, quality: dict[str, Any]
    ) -> None:
        stored = json.loads((report / "quality.json").read_text())
        for document in (stored, quality):
            document.pop("seconds", None)
        assert {**stored, "memory": None} == {**quality, "memory": None}

    def test_it_is_markdown_json_and_plots_and_no_state_is_left(self, report: Path) -> None:
        names = {path.name for path in report.iterdir()}
        assert names == {
            "MANIFEST.json", "quality.json", "quality.md", "layers.svg", "language.svg", "token-class.svg",
        }  # fmt: skip
        text = (report / "quality.md").read_text()
        assert "| kl divergence |" in text and "| de | 63 |" in text and "![layers](layers.svg)" in text
        assert (report / "layers.svg").read_text().startswith("<?xml")

    def test_a_finished_report_is_read_and_judged_anew(
        self, report: Path, packed: Path, tiny_source: Path, tiny_ple: Path
    ) -> None:
        before = (report / "quality.json").stat().st_mtime_ns
        part = measure_quality(packed, tiny_source, ple=tiny_ple, report=report, max_kl=1e-9, **SMALL)
        assert not part.passed
        assert (report / "quality.json").stat().st_mtime_ns == before

    def test_another_evaluation_does_not_overwrite_it(
        self, report: Path, packed: Path, tiny_source: Path, tiny_ple: Path
    ) -> None:
        with pytest.raises(InputError, match="begun with another"):
            measure_quality(
                packed, tiny_source, ple=tiny_ple, report=report, text=TEXT, tokens=128, seqlen=64
            )

    def test_a_killed_run_goes_on_after_its_last_block_to_the_same_numbers(
        self, report: Path, packed: Path, tiny_source: Path, tiny_ple: Path, tmp_path: Path
    ) -> None:
        out = tmp_path / "quality"
        code = (
            "import sys, time; from pathlib import Path; from q38.measure import evaluate, streamed\n"
            "from q38.checkpoint.job import Job\n"
            "commit = Job.commit\n"
            "def slow(self, unit, **k):\n"
            "    commit(self, unit, **k)\n"
            "    if unit == 'block 1': time.sleep(600)\n"
            "Job.commit = slow\n"
            f"evaluate.measure_quality(Path({str(packed)!r}), Path({str(tiny_source)!r}), ple=Path({str(tiny_ple)!r}),"
            f" report=Path({str(out)!r}), **{SMALL!r})"
        )
        child = subprocess.Popen([sys.executable, "-c", code])
        journal = out / ".q38" / "journal.jsonl"
        deadline = time.monotonic() + 240
        while not (journal.exists() and '"block 1"' in journal.read_text()):
            assert child.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        os.kill(child.pid, signal.SIGKILL)
        child.wait()
        loaded: list[int] = []
        original = evaluate_block(loaded)
        with original:
            measure_quality(packed, tiny_source, ple=tiny_ple, report=out, **SMALL)
        assert sorted(set(loaded)) == [2, 3]
        stored, whole = (json.loads((p / "quality.json").read_text()) for p in (out, report))
        for document in (stored, whole):
            document.pop("seconds")
            document.pop("memory")
        assert stored == whole


def evaluate_block(loaded: list[int]) -> Any:
    """Records which blocks are loaded inside."""
    from contextlib import contextmanager

    from q38.hf.blocks import BlockModel

    original = BlockModel.block

    def watched(self: BlockModel, index: int) -> Any:
        loaded.append(index)
        return original(self, index)

    @contextmanager
    def patched() -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(BlockModel, "block", watched)
            yield

    return patched()


class TestHeldOut:
    def test_a_model_calibrated_on_the_text_is_refused(
        self, packed: Path, tiny_source: Path, tiny_ple: Path, tmp_path: Path
    ) -> None:
        model = copy_model(packed, tmp_path / "model")
        held_out = held_out_tokens(TEXT, load_tokenizer(model), tokens=256, seqlen=64)
        calibration = {"text_hashes": [held_out.hashes[1], "0" * 16]}
        edit_json(model / "MANIFEST.json", lambda m: m.update(result={"calibration": calibration}))
        assert calibrated_on(model) == calibration["text_hashes"]
        with pytest.raises(InputError, match=rf"1 of {len(held_out.hashes)} texts are among those"):
            measure_quality(model, tiny_source, ple=tiny_ple, **SMALL)

    def test_only_texts_that_are_measured_on_count(self, packed: Path) -> None:
        held_out = held_out_tokens(TEXT, load_tokenizer(packed), tokens=256, seqlen=64)
        every = [text_hash(text) for text in load_texts(TEXT, "held_out").texts]
        assert 0 < len(held_out.hashes) < len(every)
        assert set(held_out.hashes) < set(every)

    def test_another_model_of_another_shape_is_refused(
        self, packed: Path, tiny_source: Path, tiny_ple: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from q38.hf.blocks import BlockModel

        source, model = BlockModel(tiny_source), BlockModel(packed, ple=tiny_ple)
        object.__setattr__(model.shape, "hidden_size", 128)
        with pytest.raises(InputError, match="hidden_size differs"):
            evaluate._require_same_shape(source, model)


def test_no_weight_of_a_finished_block_is_kept(packed: Path, tiny_source: Path, tiny_ple: Path) -> None:
    """One block at a time: the source's is let go before the model's is loaded."""
    from q38.hf.blocks import BlockModel
    from q38.measure.streamed import streamed

    held: list[tuple[bool, bool]] = []
    source, model = BlockModel(tiny_source), BlockModel(packed, ple=tiny_ple)

    def loaded(m: BlockModel) -> bool:
        return any(not p.is_meta for layer in m._blocks for p in layer.parameters())

    original = BlockModel.arguments

    def watched(self: BlockModel, x: torch.Tensor) -> Any:
        held.append((loaded(source), loaded(model)))
        return original(self, x)

    ids = torch.randint(10, 1000, (2, 16), generator=torch.Generator().manual_seed(0))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BlockModel, "arguments", watched)
        with streamed(source, model, ids, batch_size=2, progress=SILENT) as outcome:
            assert np.isfinite(outcome.model.hidden.float().numpy()).all()
    assert set(held) == {(True, False), (False, True)}
