"""The server under test: what it says about itself, and the requests that the checks send."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from q38.base.errors import InputError
from q38.measure.behaviour.answer import Answer, read_stream, read_whole
from q38.measure.behaviour.row import Unsupported
from q38.measure.prompts import CONTINUE, PromptText, TokenEstimate, load_prompt_text
from q38.serving.client import Client, ServerError

_CALIBRATION = 160  # tokens
_PLAIN = 0.9  # of a passage's characters
CHAT, COMPLETIONS, GENERATE = "/v1/chat/completions", "/v1/completions", "/generate"
# How servers say that they lack a route or a field.
_LACKING = frozenset({400, 404, 405, 415, 422, 501})
_INFO = ("/server_info", "/get_server_info")  # SGLang's names, newer first
# Of SGLang's own settings those that say how it computes; the rest holds paths and the API key.
_TELLING = (
    "version", "dtype", "quantization", "kv_cache_dtype", "attention_backend", "chunked_prefill_size", "context_length", "page_size",
    "disable_radix_cache", "max_running_requests", "reasoning_parser", "tool_call_parser", "speculative_algorithm", "grammar_backend",
)  # fmt: skip


@dataclass
class Target:
    """One served model.

    context: most tokens of prompt and answer together, None where the server does not say.
    chunk: prompt tokens of one prefill step, None likewise.
    settings: what SGLang says of itself, {} elsewhere; never the API key.
    answer_tokens: most tokens of an answer that a check reads.
    judged: whether capability rows get a verdict.
    """

    client: Client
    model: str
    context: int | None = None
    chunk: int | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    owned_by: str | None = None
    answer_tokens: int = 256
    judged: bool = True
    seed: int = 0
    text: PromptText = field(default_factory=load_prompt_text)
    estimate: TokenEstimate = field(default_factory=TokenEstimate)

    @property
    def native(self) -> bool:
        """Whether it is SGLang, which scores given tokens."""
        return bool(self.settings)

    def ask(
        self, messages: str | Sequence[Mapping[str, Any]], *, stream: bool = False, **options: Any
    ) -> Answer:
        """One chat request, greedy unless told otherwise. A text is one user message.

        Raises:
            ServerError, InputError, ResourceError: as `q38.serving.client.Client.chat`.
        """
        body = self.chat_body(messages, **options)
        where = self.client.url + CHAT
        if stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
            answer = read_stream(self.client.events(CHAT, body), where)
        else:
            answer = read_whole(self.client.post(CHAT, body), where)
        return answer

    def ask_text(self, prompt: str, **options: Any) -> Answer:
        """`ask` with a prompt of `prompt`, whose length the estimate of later ones learns from."""
        answer = self.ask(prompt, **options)
        if answer.prompt_tokens:
            self.estimate.learn(prompt, answer.prompt_tokens)
        return answer

    def chat_body(self, messages: str | Sequence[Mapping[str, Any]], **options: Any) -> dict[str, Any]:
        """The body of such a request."""
        turns = [{"role": "user", "content": messages}] if isinstance(messages, str) else list(messages)
        return {
            "model": self.model,
            "messages": turns,
            "temperature": 0,
            "max_tokens": self.answer_tokens,
            **options,
        }

    def complete(self, prompt: str, **options: Any) -> Answer:
        """One text completion."""
        body = {"model": self.model, "prompt": prompt, "temperature": 0, **options}
        return read_whole(self.client.post(COMPLETIONS, body), self.client.url + COMPLETIONS)

    def score(self, text: str) -> list[float]:
        """Natural-log probability of each token of `text` but the first, given those before it.

        Raises:
            Unsupported: not SGLang. ServerError: it fails, or sends something else.
        """
        if not self.native:
            raise Unsupported("the server offers no prompt log-probabilities (SGLang's /generate does)")
        document = self.client.post(
            GENERATE,
            {
                "text": text,
                "sampling_params": {"max_new_tokens": 1, "temperature": 0},
                "return_logprob": True,
                "logprob_start_len": 0,
            },
        )
        return input_logprobs(document, self.client.url + GENERATE)

    def prompt(self, tokens: int, *, task: str = CONTINUE) -> str:
        """A prompt of about `tokens` tokens of varied text, never the same, `task` last; `calibrate` before."""
        nonce = secrets.token_hex(8)
        return self.text.prompt(tokens, count=self.estimate, nonce=nonce, seed=self.seed, task=task)

    def calibrate(self) -> None:
        """Learn the tokenizer's rates from text that is mostly ASCII and from text that is not, once."""
        if self.estimate.samples:
            return
        plain = [p for p in self.text.passages if sum(c.isascii() for c in p) > _PLAIN * len(p)]
        other = [p for p in self.text.passages if p not in plain]
        tokens = _CALIBRATION if self.context is None else min(_CALIBRATION, self.context // 4)
        for passages in (plain, other):
            nonce = secrets.token_hex(8)
            prompt = self.text.prompt(
                tokens, count=self.estimate, nonce=nonce, seed=self.seed, passages=passages
            )
            self.ask_text(prompt, max_tokens=1)

    def require_alive(self) -> None:
        """One short request. Raises what is wrong where it is not answered."""
        self.ask("Say hello.", max_tokens=1)

    def describe(self) -> dict[str, Any]:
        """For the report."""
        return {
            "url": self.client.url,
            "model": self.model,
            "owned_by": self.owned_by,
            "context": self.context,
            "chunk": self.chunk,
            "settings": self.settings,
        }


def connect(
    client: Client, *, model: str | None = None, context: int | None = None, **options: Any
) -> Target:
    """Look at a running server.

    Args:
        model: its name there; default: the first it lists. context: overrides what the server says.

    Raises:
        InputError: it has no such model. ResourceError: no server answers.
    """
    entries = client.models()
    entry = next((e for e in entries if model in (None, e["id"])), None)
    if entry is None:
        names = ", ".join(str(e["id"]) for e in entries)
        raise InputError(
            f"the server has no model '{model}'", where="--served-model", remedy=f"it has: {names or 'none'}"
        )
    settings = server_settings(client)
    limit, chunk = entry.get("max_model_len"), settings.get("chunked_prefill_size")
    return Target(
        client,
        entry["id"],
        context=context or (limit if isinstance(limit, int) else None),
        chunk=chunk if isinstance(chunk, int) and chunk > 0 else None,
        settings=settings,
        owned_by=entry.get("owned_by"),
        **options,
    )


def server_settings(client: Client) -> dict[str, Any]:
    """Settings that SGLang tells of itself; {} for another server."""
    for path in _INFO:
        try:
            document = client.get(path)
        except ServerError:
            continue
        found = {name: document[name] for name in _TELLING if document.get(name) is not None}
        if "version" in found:
            return found
    return {}


def input_logprobs(document: Mapping[str, Any], where: str) -> list[float]:
    """The scores of the prompt's tokens in an answer of /generate; a missing value becomes NaN.

    Raises:
        ServerError: there are none.
    """
    try:
        entries = document["meta_info"]["input_token_logprobs"][1:]  # the first token has none
        return [float("nan") if entry[0] is None else float(entry[0]) for entry in entries]
    except (KeyError, TypeError, IndexError, ValueError):
        raise ServerError("the answer holds no input_token_logprobs", where=where) from None


@contextmanager
def optional(what: str) -> Iterator[None]:
    """A refusal inside (4xx) means that the server does not offer `what`. Raises Unsupported."""
    try:
        yield
    except ServerError as error:
        if error.status not in _LACKING:
            raise
        raise Unsupported(f"{what} is not supported: {error.what}") from None
