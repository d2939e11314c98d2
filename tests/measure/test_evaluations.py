"""lm-eval as a child process. The real one runs where it is installed; a stand-in provokes its faults."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from q38.base.errors import CheckFailed, InputError, ResourceError
from q38.measure import evaluations
from q38.measure.evaluations import command, evaluate, read_results, require_tool

if TYPE_CHECKING:
    from q38.serving.launch import Server

RESULTS: dict[str, Any] = {
    "results": {
        "gsm8k": {
            "alias": "gsm8k",
            "exact_match,strict-match": 0.25,
            "exact_match_stderr,strict-match": 0.05,
            "exact_match,flexible-extract": 0.5,
            "exact_match_stderr,flexible-extract": "N/A",
        }
    },
    "n-samples": {"gsm8k": {"original": 1319, "effective": 20}},
    "versions": {"gsm8k": 3.0},
    "lm_eval_version": "0.4.13",
}
TASK = """\
task: letters
dataset_path: json
dataset_kwargs: {data_files: {test: %s}}
test_split: test
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{answer}}"
generation_kwargs: {until: ["\\n"], max_gen_toks: 4}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
"""


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Put a command lm_eval on PATH that runs this Python code; returns where it writes what it was given."""

    def make(code: str) -> Path:
        program, seen = tmp_path / "bin" / "lm_eval", tmp_path / "seen.json"
        program.parent.mkdir()
        program.write_text(
            f"#!{sys.executable}\nimport json, os, pathlib, sys\n"
            f"json.dump([sys.argv, os.environ['OPENAI_API_KEY']], open({str(seen)!r}, 'w'))\n"
            f"out = pathlib.Path(sys.argv[sys.argv.index('--output_path') + 1]) / 'tiny'\n{code}\n"
        )
        program.chmod(0o755)
        monkeypatch.setenv("PATH", str(program.parent))
        monkeypatch.setattr(evaluations.importlib.util, "find_spec", lambda name: None)
        return seen

    return make


def test_rows_have_value_error_and_count() -> None:
    part = read_results(RESULTS)
    strict, flexible = part.checks
    assert (strict.name, strict.value, strict.standard_error) == (
        "gsm8k exact_match (strict-match)",
        0.25,
        0.05,
    )
    assert (strict.checked, strict.unit, strict.passed) == (20, "questions", None)
    assert (flexible.value, flexible.standard_error) == (0.5, None)
    assert part.data["evaluation"]["version"] == "0.4.13"


@pytest.mark.parametrize("document", [{}, {"results": {}}, {"results": {"gsm8k": {"alias": "gsm8k"}}}])
def test_a_document_without_figures_is_refused(document: dict[str, Any]) -> None:
    with pytest.raises(CheckFailed):
        read_results(document)


def test_without_the_tool_the_refusal_names_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(evaluations.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ResourceError, match="pip install") as refused:
        require_tool()
    assert refused.value.exit_code == 3


def test_the_key_travels_by_environment(stand_in: Callable[[str], Path]) -> None:
    code = f"out.mkdir(); (out / 'results_2026.json').write_text({json.dumps(RESULTS)!r})"
    seen = stand_in(code)
    part = evaluate("http://127.0.0.1:1", "tiny", ["gsm8k", "ifeval"], limit=20, api_key="sesame")
    arguments, key = json.loads(seen.read_text())
    assert key == "sesame" and "sesame" not in " ".join(arguments)
    assert "gsm8k,ifeval" in arguments and arguments[arguments.index("--limit") + 1] == "20"
    assert part.checks[0].value == 0.25


@pytest.mark.parametrize(
    ("code", "words"), [("sys.exit(4)", "ended with exit code 4"), ("pass", "left no results")]
)
def test_a_tool_that_fails_is_a_failed_check(stand_in: Callable[[str], Path], code: str, words: str) -> None:
    stand_in(code)
    with pytest.raises(CheckFailed, match=words):
        evaluate("http://127.0.0.1:1", "tiny", ["gsm8k"])


def test_senseless_options_are_refused() -> None:
    with pytest.raises(InputError, match="positive number"):
        evaluate("http://127.0.0.1:1", "tiny", ["gsm8k"], limit=0)
    with pytest.raises(InputError, match="comma"):
        evaluate("http://127.0.0.1:1", "a,b", ["gsm8k"])


def test_no_likelihoods_are_asked_of_a_chat_api() -> None:
    arguments = command("http://h:1", "tiny", ["gsm8k"], Path("out"), limit=None)
    assert arguments[:2] == ["--model", "local-chat-completions"]
    assert "--apply_chat_template" in arguments and "--limit" not in arguments


@pytest.mark.skipif(find_spec("lm_eval") is None, reason='no lm-eval: pip install "q38[eval]"')
def test_the_real_tool_scores_a_served_model(tiny_server: Server, tmp_path: Path) -> None:
    data = tmp_path / "letters.jsonl"
    data.write_text('{"question": "Say a.", "answer": "a"}\n{"question": "Say b.", "answer": "b"}\n')
    task = tmp_path / "letters.yaml"
    task.write_text(TASK % data)
    part = evaluate(tiny_server.url, tiny_server.model, [str(task)])
    (row,) = part.checks
    assert row.name == "letters exact_match" and row.checked == 2 and row.value is not None
