from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from q38.base.errors import CheckFailed, InputError
from q38.base.progress import SILENT, Progress
from q38.cli.app import main
from q38.measure.oracle import check, plan_save, save
from q38.measure.oracle_engine import TransformersEngine
from q38.measure.oracle_prompts import Item, load_prompts, tokenize
from tests.measure.packed import copy_model, edit_json, edit_tensor

PROMPTS = [
    {"id": "text", "kind": "text", "language": "en", "prompt": "The tide mill ground barley for", "continuation": " three hundred years."},
    {"id": "chat", "kind": "chat", "language": "en", "messages": [{"role": "user", "content": "Who are you?"}], "continuation": "A model."},
]  # fmt: skip


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_prompts(tmp_path_factory.mktemp("prompts") / "two.json", PROMPTS)


def write_prompts(file: Path, entries: Sequence[dict[str, Any]]) -> Path:
    file.write_text(json.dumps({"schema": "q38.oracle-prompts/1", "name": "test", "prompts": entries}))
    return file


@pytest.fixture(scope="module")
def reference(packed: Path, tiny_ple: Path, prompts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("reference") / "ref.json"
    save(packed, file, ple=tiny_ple, prompts=prompts)
    return file


class FakeEngine:
    """Gives the scores it is told to give; a wrong input or weight changes them by `sensitivity`."""

    def __init__(self, value: float = -1.0, *, sensitivity: float = 1.0, drift: float = 0.0) -> None:
        self.value, self.sensitivity, self.drift = value, sensitivity, drift
        self.first: Sequence[Item] | None = None
        self.broken, self.calls = False, 0

    takes_states = False

    def describe(self) -> dict[str, Any]:
        return {"name": "fake", "dtype": "float32"}

    def record_states(self, item: Item) -> list[Any]:
        return []

    def layer_errors(self, item: Item, states: Sequence[Any]) -> list[float]:
        return []

    def score(self, items: Sequence[Item], *, progress: Progress = SILENT) -> list[list[float]]:
        del progress
        self.first = self.first or items
        wrong = self.broken or [i.prompt for i in items] != [i.prompt for i in self.first]
        value = self.value - wrong * self.sensitivity - self.calls * self.drift
        self.calls += 1
        return [[value] * len(item.continuation) for item in items]

    @contextmanager
    def damaged(self) -> Iterator[str | None]:
        self.broken = True
        yield "a weight"
        self.broken = False


def test_the_same_model_gives_the_same_scores(
    packed: Path, tiny_ple: Path, prompts: Path, reference: Path
) -> None:
    result = check(packed, reference, ple=tiny_ple, prompts=prompts)
    assert result["passed"] and result["weights_match"]
    assert result["max"] <= 1e-5
    assert [p["id"] for p in result["prompts"]] == ["text", "chat"]
    assert result["limits"] == {"mean": 0.01, "max": 0.5, "nll": None, "layer": None}
    assert result["layers"]["compared"] and max(result["layers"]["blocks"]) <= 1e-6


def test_the_reference_says_what_it_depends_on(reference: Path) -> None:
    raw = json.loads(reference.read_text())
    assert len(raw["model"]["source"]) == len(raw["model"]["weights"]) == len(raw["prompts"]["sha256"]) == 64
    assert raw["tokenizer"].keys() == {"vocabulary", "rules", "chat_template"}
    assert raw["engine"]["name"] == "transformers" and raw["engine"]["dtype"] == "float32"
    assert raw["noise"]["repeats"] == 2 and raw["noise"]["max"] < 1e-3
    assert {(row["fault"], row["noticed"]) for row in raw["self_check"]} == {
        ("input", True),
        ("weight", True),
    }
    assert all(value < 0 for row in raw["scores"] for value in row["logprobs"])


def test_scores_are_the_log_probabilities_of_the_forced_tokens(
    packed: Path, tiny_ple: Path, prompts: Path
) -> None:
    import torch

    from q38.hf.load import load_model, load_tokenizer

    item = tokenize(load_prompts(prompts).prompts, load_tokenizer(packed))[0]
    model = load_model(packed, ple=tiny_ple, dtype=torch.float32)
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([item.prompt + item.continuation]), use_cache=False).logits[0]
    start = len(item.prompt)
    wanted = [
        float(logits[start + i - 1].log_softmax(-1)[token]) for i, token in enumerate(item.continuation)
    ]
    (found,) = TransformersEngine(packed, ple=tiny_ple).score([item])
    assert found == pytest.approx(wanted, abs=1e-4)


def test_a_damaged_weight_is_undone_after_the_self_check(packed: Path, tiny_ple: Path, prompts: Path) -> None:
    from q38.hf.load import load_tokenizer

    items = tokenize(load_prompts(prompts).prompts, load_tokenizer(packed))
    engine = TransformersEngine(packed, ple=tiny_ple)
    before = engine.score(items)
    with engine.damaged() as what:
        assert what and "sign flipped" in what
        assert engine.score(items) != before
    assert engine.score(items) == before


def test_a_flipped_tensor_fails_and_names_prompt_and_token(
    packed: Path, tiny_ple: Path, prompts: Path, reference: Path, tmp_path: Path
) -> None:
    model = copy_model(packed, tmp_path / "model")  # with its manifest: still of the same source
    edit_tensor(model, "model.language_model.layers.1.linear_attn.out_proj.scales", lambda t: -t)
    result = check(model, reference, ple=tiny_ple, prompts=prompts)
    assert not result["passed"] and not result["weights_match"]
    assert result["worst"]["prompt"] in ("text", "chat")
    assert abs(result["worst"]["now"] - result["worst"]["reference"]) == pytest.approx(result["max"])
    # On identical inputs the other blocks agree, so the comparison names the one that is broken.
    errors = result["layers"]["blocks"]
    assert result["layers"]["worst"]["block"] == 1
    assert errors[1] > 0.1 and max(error for i, error in enumerate(errors) if i != 1) < 1e-5


def test_another_dtype_is_no_other_model(
    packed: Path, tiny_ple: Path, prompts: Path, reference: Path
) -> None:
    result = check(packed, reference, ple=tiny_ple, prompts=prompts, kind="approx", dtype="bfloat16")
    assert result["passed"] and 0 < result["mean"] < 0.05 and abs(result["nll"]) < 0.005
    assert result["engine_changes"]["dtype"] == ["float32", "bfloat16"]


def test_another_dtype_is_more_than_another_kernel(
    packed: Path, tiny_ple: Path, prompts: Path, reference: Path
) -> None:
    result = check(packed, reference, ple=tiny_ple, prompts=prompts, kind="kernel", dtype="bfloat16")
    assert result["mean"] < 0.05 and not result["passed"]
    assert result["layers"]["passed"] is False and result["layers"]["worst"]["relative_error"] > 1e-3


def test_the_source_can_be_held_against_its_quantized_model(
    tiny_source: Path, packed: Path, tiny_ple: Path, prompts: Path, reference: Path
) -> None:
    result = check(tiny_source, reference, ple=tiny_ple, prompts=prompts, max_mean=1.0, max_abs=5.0)
    assert result["passed"] and not result["weights_match"] and result["mean"] > 0


def test_a_swapped_tokenizer_is_refused_with_both_values(
    packed: Path, tiny_ple: Path, prompts: Path, reference: Path, tmp_path: Path
) -> None:
    model = copy_model(packed, tmp_path / "model")
    edit_json(model / "tokenizer.json", lambda t: t["model"]["vocab"].update({"zzzz": 1999}))
    before = json.loads(reference.read_text())["tokenizer"]["vocabulary"]
    with pytest.raises(
        InputError, match=f"another tokenizer vocabulary \\({before[:16]}, now [0-9a-f]{{16}}\\)"
    ):
        check(model, reference, ple=tiny_ple, prompts=prompts)


def test_other_prompts_are_refused(packed: Path, tiny_ple: Path, reference: Path, tmp_path: Path) -> None:
    other = write_prompts(tmp_path / "other.json", PROMPTS[:1])
    with pytest.raises(InputError, match="another prompt set"):
        check(packed, reference, ple=tiny_ple, prompts=other)


def test_another_chat_template_is_refused(
    packed: Path, tiny_ple: Path, prompts: Path, reference: Path, tmp_path: Path
) -> None:
    model = copy_model(packed, tmp_path / "model")
    (model / "chat_template.jinja").write_text("{{ messages[0].content }}")
    with pytest.raises(InputError, match="another chat template"):
        check(model, reference, ple=tiny_ple, prompts=prompts)


def test_another_source_model_is_refused(tiny_source_fp8: Path, prompts: Path, reference: Path) -> None:
    with pytest.raises(InputError, match="another source model"):
        check(tiny_source_fp8, reference, prompts=prompts)


def test_an_engine_that_ignores_its_input_fails_the_self_check(
    packed: Path, prompts: Path, tmp_path: Path
) -> None:
    with pytest.raises(CheckFailed, match="does not notice a wrong input"):
        save(packed, tmp_path / "ref.json", prompts=prompts, engine=FakeEngine(sensitivity=0.0))
    assert not (tmp_path / "ref.json").exists()


def test_noise_is_the_spread_of_the_repeats(packed: Path, prompts: Path, tmp_path: Path) -> None:
    document = save(packed, tmp_path / "ref.json", prompts=prompts, repeats=3, engine=FakeEngine(drift=1e-3))
    spread = {"mean": pytest.approx(1.5e-3), "max": pytest.approx(2e-3), "nll": pytest.approx(2e-3)}
    assert document["noise"] == {"repeats": 3, **spread}


@pytest.mark.parametrize(("shift", "kind", "passed"), [(0.009, "host", True), (0.02, "host", False), (0.02, "kernel", True), (0.06, "kernel", False), (0.004, "approx", True), (0.006, "approx", False)])  # fmt: skip
def test_the_class_of_the_change_sets_the_limit(
    packed: Path, prompts: Path, tmp_path: Path, shift: float, kind: Any, passed: bool
) -> None:
    save(packed, tmp_path / "ref.json", prompts=prompts, engine=FakeEngine())
    engine = FakeEngine(-1.0 - shift)
    result = check(
        packed, tmp_path / "ref.json", prompts=prompts, kind=kind, engine=engine, without_layers=True
    )
    assert result["passed"] is passed


def test_a_score_that_is_not_a_number_fails(packed: Path, prompts: Path, tmp_path: Path) -> None:
    save(packed, tmp_path / "ref.json", prompts=prompts, engine=FakeEngine())
    result = check(packed, tmp_path / "ref.json", prompts=prompts, engine=FakeEngine(math.nan))
    assert not result["passed"] and result["mean"] is None and result["not_finite"] == result["tokens"]
    json.dumps(result, allow_nan=False)


def test_a_reference_is_kept_and_not_scored_again(packed: Path, prompts: Path, tmp_path: Path) -> None:
    file = tmp_path / "ref.json"
    save(packed, file, prompts=prompts, engine=FakeEngine())
    before, engine = file.read_bytes(), FakeEngine(-2.0)
    save(packed, file, prompts=prompts, engine=engine)
    assert engine.calls == 0 and file.read_bytes() == before


def test_a_reference_of_other_weights_is_replaced_only_on_request(
    packed: Path, prompts: Path, tmp_path: Path
) -> None:
    file = tmp_path / "ref.json"
    save(packed, file, prompts=prompts, engine=FakeEngine())
    model = copy_model(packed, tmp_path / "model")
    edit_tensor(model, "lm_head.scales", lambda t: -t)
    with pytest.raises(InputError, match="reference of another weights"):
        save(model, file, prompts=prompts, engine=FakeEngine())
    save(model, file, prompts=prompts, engine=FakeEngine(-3.0), fresh=True)
    assert json.loads(file.read_text())["scores"][0]["logprobs"][0] == -3.0


def test_a_file_that_is_no_reference_is_never_overwritten(
    packed: Path, prompts: Path, tmp_path: Path
) -> None:
    file = tmp_path / "notes.json"
    file.write_text('{"mine": 1}')
    with pytest.raises(InputError, match="is no reference of q38 oracle save"):
        save(packed, file, prompts=prompts, engine=FakeEngine(), fresh=True)
    assert file.read_text() == '{"mine": 1}'


@pytest.mark.parametrize("change", [
    lambda r: r["scores"][0]["logprobs"].pop(),
    lambda r: r["scores"].pop(),
    lambda r: r.pop("noise"),
    lambda r: r["scores"][0].update(tokens=[1] * len(r["scores"][0]["tokens"])),
])  # fmt: skip
def test_a_damaged_reference_is_refused(packed: Path, prompts: Path, tmp_path: Path, change: Any) -> None:
    file = tmp_path / "ref.json"
    save(packed, file, prompts=prompts, engine=FakeEngine())
    edit_json(file, change)
    with pytest.raises(InputError):
        check(packed, file, prompts=prompts, engine=FakeEngine())


def test_a_directory_that_cannot_be_written_is_refused_before_scoring(
    packed: Path, prompts: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    engine = FakeEngine()
    with pytest.raises(InputError, match="cannot be written"):
        save(packed, tmp_path / "file" / "ref.json", prompts=prompts, engine=engine)
    assert engine.calls == 0


def test_a_dry_run_writes_nothing(packed: Path, prompts: Path, tmp_path: Path) -> None:
    plan = plan_save(packed, tmp_path / "ref.json", prompts=prompts)
    assert plan["prompts"] == 2 and plan["tokens"] > 10 and not plan["up_to_date"]
    assert list(tmp_path.iterdir()) == []


def test_an_engine_whose_noise_hides_a_fault_is_refused(packed: Path, prompts: Path, tmp_path: Path) -> None:
    engine = FakeEngine(sensitivity=0.5, drift=0.2)
    with pytest.raises(CheckFailed, match="too noisy"):
        save(packed, tmp_path / "ref.json", prompts=prompts, engine=engine)


def test_the_kernel_class_needs_blocks_to_compare(packed: Path, prompts: Path, tmp_path: Path) -> None:
    file = tmp_path / "ref.json"
    save(packed, file, prompts=prompts, engine=FakeEngine())
    with pytest.raises(InputError, match="compares each block on identical inputs"):
        check(packed, file, prompts=prompts, kind="kernel", engine=FakeEngine())


def test_a_reference_of_another_engine_is_not_replaced_in_passing(
    packed: Path, tiny_ple: Path, prompts: Path, reference: Path
) -> None:
    with pytest.raises(InputError, match="reference of another engine"):
        save(packed, reference, ple=tiny_ple, prompts=prompts, engine=FakeEngine())


class TestCommand:
    def run(self, monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
        monkeypatch.setattr(sys, "argv", ["q38", "oracle", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        code = ended.value.code
        return code if isinstance(code, int) else 0

    def test_save_and_check_exit_0_and_a_miss_exits_1(
        self,
        packed: Path,
        tiny_ple: Path,
        prompts: Path,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        capfd: pytest.CaptureFixture[str],
    ) -> None:
        file, options = tmp_path / "ref.json", ("--ple", tiny_ple, "--prompts", prompts)
        assert self.run(monkeypatch, "save", packed, "-o", file, *options) == 0
        assert self.run(monkeypatch, "check", packed, file, *options) == 0
        edit_json(file, lambda r: r["scores"][1]["logprobs"].__setitem__(0, -0.001))
        capfd.readouterr()
        assert self.run(monkeypatch, "check", packed, file, *options) == 1
        assert "worst: prompt chat, token 0" in capfd.readouterr().out

    def test_a_mismatch_exits_2_in_one_line(
        self,
        broken: Callable[..., Path],
        tiny_ple: Path,
        prompts: Path,
        reference: Path,
        monkeypatch: pytest.MonkeyPatch,
        capfd: pytest.CaptureFixture[str],
    ) -> None:
        code = self.run(monkeypatch, "check", broken(), reference, "--ple", tiny_ple, "--prompts", prompts)
        err = capfd.readouterr().err
        assert code == 2  # a copy without its manifest no longer tells its source
        assert "another source model" in err and err.count("\n") == 1
