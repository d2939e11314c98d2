"""Standard evaluations of a served model, by lm-eval as a child process that talks to the server's chat API.

Source: https://github.com/EleutherAI/lm-evaluation-harness. Its tasks, prompts and scores are its own; q38
starts it, reads its JSON, and puts the figures into the report. It is found in this environment or as a
command on PATH, so that it may have an environment of its own.
"""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from q38.base import settings
from q38.base.errors import CheckFailed, InputError, ResourceError
from q38.base.progress import SILENT, Progress
from q38.checkpoint.index import read_json
from q38.measure.checks import Check, Part, finite

TOOL, MODULE = "lm-eval", "lm_eval"
REMEDY = 'install it: pip install -c constraints/cpu.txt "q38[eval]", or pipx install "lm-eval[api]" apart from q38'
_GRACE_S = 10.0
_PATIENCE_S = 3600  # of one answer: a long reasoning at a few tokens a second


def require_tool() -> list[str]:
    """The command that starts lm-eval.

    Raises:
        ResourceError: it is not installed.
    """
    if importlib.util.find_spec(MODULE) is not None:
        return [sys.executable, "-m", MODULE]
    found = shutil.which(MODULE) or shutil.which(TOOL)
    if found is None:
        raise ResourceError(f"{TOOL} is not installed", where="--eval", remedy=REMEDY)
    return [found]


def evaluate(
    url: str,
    model: str,
    tasks: Sequence[str],
    *,
    limit: int | None = None,
    api_key: str | None = None,
    progress: Progress = SILENT,
) -> Part:
    """Run the tasks and give one row per metric of each.

    Args:
        url: the server's root. model: its name there.
        tasks: names of lm-eval's tasks, or YAML files of tasks; of those that generate text, since a chat
            API gives no likelihoods.
        limit: questions of each task.

    Raises:
        ResourceError: lm-eval is not installed. InputError: a senseless limit.
        CheckFailed: it ended with an error, or left no results.
    """
    if limit is not None and limit < 1:
        raise InputError("a limit is a positive number of questions", where="--eval-limit")
    if "," in model:
        raise InputError(f"{TOOL} takes no model name with a comma", where=model, remedy="serve it as --name")
    with tempfile.TemporaryDirectory(prefix="q38-eval-") as directory:
        out = Path(directory)
        arguments = command(url, model, tasks, out, limit=limit)
        with progress.task(TOOL, None, "tasks") as task:
            task.note(", ".join(tasks))
            code = _run([*require_tool(), *arguments], api_key)
            task.advance(len(tasks))
        found = sorted(out.rglob("results_*.json"))
        if code != 0 or not found:
            what = f"{TOOL} ended with exit code {code}" if code else f"{TOOL} left no results"
            raise CheckFailed(what, where="--eval", remedy="read its lines above")
        return read_results(read_json(found[-1]))


def command(url: str, model: str, tasks: Sequence[str], out: Path, *, limit: int | None) -> list[str]:
    """lm-eval's arguments. The API key is none of them: it travels by environment."""
    arguments = ["--model", "local-chat-completions", "--tasks", ",".join(tasks)]
    arguments += [
        "--model_args",
        f"base_url={url}/v1/chat/completions,model={model},num_concurrent=1,timeout={_PATIENCE_S}",
    ]
    arguments += ["--apply_chat_template", "--output_path", str(out)]
    return arguments + (["--limit", str(limit)] if limit is not None else [])


def read_results(document: dict[str, Any]) -> Part:
    """One row per task and metric: value, standard error, questions. No limit: q38 has no opinion on scores.

    Raises:
        CheckFailed: the document is not lm-eval's.
    """
    results = document.get("results")
    if not isinstance(results, dict) or not results:
        raise CheckFailed(f"{TOOL}'s document has no results", where="--eval", remedy=REMEDY)
    counts, checks = document.get("n-samples") or {}, []
    for task, metrics in results.items():
        count = (counts.get(task) or {}).get("effective") or 0
        for key, value in metrics.items():
            name, comma, kind = str(key).partition(",")
            if not comma or name.endswith("_stderr") or not isinstance(value, (int, float)):
                continue
            error = metrics.get(f"{name}_stderr,{kind}")
            label = f"{task} {name}" + (f" ({kind})" if kind != "none" else "")
            checks.append(
                Check(
                    label,
                    None,
                    checked=int(count),
                    unit="questions",
                    value=float(value),
                    standard_error=finite(float(error)) if isinstance(error, (int, float)) else None,
                )
            )
    if not checks:
        raise CheckFailed(f"{TOOL}'s results have no figures", where="--eval", remedy=REMEDY)
    about = {
        "tool": TOOL,
        "version": document.get("lm_eval_version"),
        "tasks": document.get("versions") or {},
    }
    return Part("evaluations", checks, {"evaluation": about})


def _run(arguments: Sequence[str], api_key: str | None) -> int:
    """Its progress goes to stderr; its table, which is ours already, nowhere."""
    key = api_key or settings.load().api_key
    child = subprocess.Popen(
        arguments,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        env=settings.child_env({"OPENAI_API_KEY": key, "TOKENIZERS_PARALLELISM": "false"}),
    )
    try:
        return child.wait()
    finally:
        if child.poll() is None:
            child.terminate()
            try:
                child.wait(_GRACE_S)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
