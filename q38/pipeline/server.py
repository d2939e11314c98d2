"""A server of a run: started by its step, stopped after the last one that talks to it."""

from __future__ import annotations

import json
import shlex
import subprocess
import time
from dataclasses import dataclass
from typing import Any

from q38.pipeline import child
from q38.pipeline.steps import Step
from q38.recipe.schema import Serve


@dataclass
class Server:
    """A running `q38 serve`. `document` is what it printed once it had generated a token."""

    process: subprocess.Popen[str]
    memory: child.MemorySampler
    url: str
    document: dict[str, Any]
    seconds: float

    def stop(self) -> int:
        """Stop it. Returns its peak memory in bytes."""
        child.stop(self.process)
        return self.memory.stop()


def start(step: Step) -> Server:
    """Start the `q38 serve` of this step and wait until it is ready.

    Raises:
        StepFailed: it ended instead.
    """
    begun = time.monotonic()
    process = child.start(step.args)
    memory = child.MemorySampler(process.pid)
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
    except BaseException:
        child.stop(process)
        memory.stop()
        raise
    seconds = time.monotonic() - begun
    document = child.parse_document(line)
    if document is None or "error" in document:
        code = child.stop(process)
        raise child.StepFailed(step.name, child.Outcome(code, document, seconds, memory.stop()))
    return Server(process, memory, document["url"], document, seconds)


def ask(url: str, serve: Serve) -> dict[str, Any]:
    """Ask the recipe's question through the chat API. Returns question, answer, seconds, tokens and the same as a curl command."""
    from q38.serving.client import Client

    begun = time.monotonic()
    with Client(url) as client:
        reply = client.chat(serve.question, max_tokens=serve.max_tokens, temperature=0.0)
    return {
        "question": serve.question,
        "answer": reply.text or reply.reasoning,
        "finish_reason": reply.finish_reason,
        "completion_tokens": reply.completion_tokens,
        "seconds": round(time.monotonic() - begun, 3),
        "curl": _curl(url, serve),
    }


def _curl(url: str, serve: Serve) -> str:
    message = {"role": "user", "content": serve.question}
    body = {"messages": [message], "max_tokens": serve.max_tokens, "temperature": 0}
    words = ["curl", f"{url}/v1/chat/completions", "-H", "Content-Type: application/json"]
    return shlex.join([*words, "-d", json.dumps(body, ensure_ascii=False)])
