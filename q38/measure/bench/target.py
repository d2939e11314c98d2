"""A server under test: its model, what it tells about itself, and rounds of requests to it."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil

from q38.base.errors import InputError
from q38.measure.bench.sample import Round, Sample, as_sample
from q38.serving import machine, records
from q38.serving.client import Client, ServerError
from q38.serving.preflight import is_loopback

_REFUSED = (400, 422)
# What may be repeated from a server's own description: no paths, no keys.
_PUBLIC = (
    "version", "sglang_version", "attention_backend", "chunked_prefill_size", "context_length", "dtype", "kv_cache_dtype",
    "max_running_requests", "quantization", "disable_radix_cache", "disable_cuda_graph", "speculative_algorithm", "tp_size", "build_info",
)  # fmt: skip


@dataclass
class Target:
    """One server.

    entry: the model's entry in /v1/models.
    extras: request fields beyond OpenAI's that the server is known to take, or not yet known to refuse.
    """

    client: Client
    entry: dict[str, Any]
    extras: dict[str, Any]

    @classmethod
    def open(cls, client: Client, model: str | None) -> Target:
        """Pick the model by name, or the first.

        Raises:
            ResourceError: no server answers. InputError: it has no such model.
        """
        entries = client.models()
        entry = next((e for e in entries if model in (None, e["id"])), None)
        if entry is None:
            names = ", ".join(str(e["id"]) for e in entries)
            raise InputError(
                f"the server has no model '{model}'", where="--model", remedy=f"it has: {names or 'none'}"
            )
        usage = {"include_usage": True, "continuous_usage_stats": True}
        return cls(client, entry, {"ignore_eos": True, "stream_options": usage})

    @property
    def model(self) -> str:
        return str(self.entry["id"])

    @property
    def ignores_eos(self) -> bool:
        """Whether answers go on to their full length."""
        return "ignore_eos" in self.extras

    def require_context(self, tokens: int) -> None:
        """Refuse prompts and answers that the model has no room for. Raises InputError."""
        limit = self.entry.get("max_model_len")
        if isinstance(limit, int) and tokens > limit:
            raise InputError(
                f"{tokens} tokens of prompt and answer exceed the server's context of {limit}",
                where=f"--depths, {self.client.url}",
                remedy="lower the depths or --max-tokens",
            )

    def learn_fields(self, prompt: str) -> Sample:
        """The first request: find out which extra fields the server refuses, and leave those out from now on.

        Raises:
            ServerError: it refuses plain OpenAI fields too, or fails.
        """
        while True:
            try:
                return self.ask(prompt, 2)
            except ServerError as error:
                if error.status not in _REFUSED or not self.extras:
                    raise
                # The field that the message names; without one, the rarer one first.
                named = [name for name in self.extras if name in error.what]
                del self.extras[named[0] if named else next(reversed(self.extras))]

    def ask(self, prompt: str, max_tokens: int, *, round_began: float | None = None) -> Sample:
        """One request. Raises ServerError: it failed, or lacks what a speed is made of."""
        sent = time.perf_counter()
        reply = self.client.chat(
            prompt, model=self.model, max_tokens=max_tokens, temperature=0, **self.extras
        )
        return as_sample(
            reply, where=self.client.url, sent_s=0.0 if round_began is None else sent - round_began
        )

    def play(self, prompts: Sequence[str], max_tokens: int) -> Round:
        """Send all prompts at once, each on a connection of its own, and wait for every answer.

        Raises:
            ServerError: one of them failed.
        """
        if len(prompts) == 1:
            return Round((self.ask(prompts[0], max_tokens),))
        gate = threading.Barrier(len(prompts), action=lambda: began.append(time.perf_counter()))
        began: list[float] = []

        def send(prompt: str) -> Sample:
            gate.wait()
            return self.ask(prompt, max_tokens, round_began=began[0])

        with ThreadPoolExecutor(len(prompts)) as threads:
            return Round(tuple(threads.map(send, prompts)))

    def describe(self) -> dict[str, Any]:
        """What answers; more where it is one of this user's own servers."""
        url = self.client.url
        result: dict[str, Any] = {"url": url, "model": self.model, "owned_by": self.entry.get("owned_by")}
        result["max_model_len"] = self.entry.get("max_model_len")
        result |= {"runs_here": is_loopback(urlsplit(url).hostname or ""), "reports": self._reports()}
        own = next((r for r in records.running() if r.url == url), None)
        if own is not None:
            result["engine"] = own.engine
            result["files"] = {
                name: hashlib.sha256((Path(own.directory) / name).read_bytes()).hexdigest()
                for name in ("config.json", "MANIFEST.json")
                if (Path(own.directory) / name).is_file()
            }
        return result

    def _reports(self) -> dict[str, Any]:
        """Version and settings by SGLang's /get_server_info, vLLM's /version or llama.cpp's /props."""
        for path in ("/get_server_info", "/version", "/props"):
            text = self.client.text(path)
            if text is None:
                continue
            try:
                document = json.loads(text)
            except ValueError:
                continue
            if isinstance(document, dict):
                found = {k: document[k] for k in _PUBLIC if isinstance(document.get(k), (str, int, float))}
                if found:
                    return found
        return {}


def describe_machine(targets_here: bool) -> dict[str, Any]:
    """This machine, without paths. `runs_the_server` is false when the server is elsewhere."""
    document = machine.probe().to_dict()
    del document["disk"]
    return {"runs_the_server": targets_here, "load": round(psutil.getloadavg()[0], 2), **document}
