"""HTTP client for an OpenAI-compatible chat server: streams, times every token, says clearly what failed."""

from __future__ import annotations

import json
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import httpx

from q38.base import settings
from q38.base.errors import InputError, Q38Error, ResourceError

CONNECT_TIMEOUT_S = 10.0
_START_ONE = "start one with q38 serve MODEL, or correct --url"


class ServerError(Q38Error):
    """The server answered with an error, broke off, stalled or sent garbage (exit code 1).

    status: the HTTP status, None where the stream itself failed.
    """

    def __init__(
        self, what: str, *, where: str, remedy: str | None = None, status: int | None = None
    ) -> None:
        super().__init__(what, where=where, remedy=remedy)
        self.status = status


@dataclass(frozen=True)
class Delta:
    """One piece of a streamed answer. `at` in seconds since the request was sent.

    tokens: tokens generated up to this piece, None where the server does not count along.
    """

    at: float
    text: str = ""
    reasoning: str = ""
    tool_calls: tuple[Mapping[str, Any], ...] = ()
    tokens: int | None = None

    @property
    def visible(self) -> bool:
        return bool(self.text or self.reasoning or self.tool_calls)


@dataclass
class Reply:
    """A whole answer. Token counts are the server's own; None where it sends none.

    cached_tokens: prompt tokens that a prefix cache already had.
    deltas: the streamed pieces that carried something.
    end_s: seconds from sending the request to the piece with the finish reason.
    """

    finish_reason: str = ""
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    end_s: float = 0.0
    deltas: list[Delta] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(d.text for d in self.deltas)

    @property
    def reasoning(self) -> str:
        return "".join(d.reasoning for d in self.deltas)

    @property
    def first_token_s(self) -> float | None:
        """Seconds from sending the request to the first piece that carried something."""
        return self.deltas[0].at if self.deltas else None


class Client:
    """A connection to one server. Use as a context manager, or call close().

    Args:
        url: the server's root, with or without a trailing /v1.
        api_key: sent as a bearer token; default: Settings.api_key.
        stall_s: a read that brings nothing for this long is an error.
    """

    def __init__(self, url: str, *, api_key: str | None = None, stall_s: float = 600.0) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        if not self.url.startswith(("http://", "https://")):
            raise InputError(
                f"'{url}' is not an http address", where="--url", remedy="write http://HOST:PORT"
            )
        try:
            httpx.URL(self.url)
        except httpx.InvalidURL as error:
            raise InputError(str(error), where=self.url, remedy="write http://HOST:PORT") from None
        self.stall_s = stall_s
        self._http = httpx.Client(
            base_url=self.url,
            headers={"Authorization": f"Bearer {api_key or settings.load().api_key}"},
            timeout=httpx.Timeout(stall_s, connect=CONNECT_TIMEOUT_S),
            # A proxy from the environment would sit between the clock and the server.
            trust_env=False,
        )

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection."""
        self._http.close()

    def healthy(self, *, timeout_s: float = 2.0) -> bool:
        """Whether /health answers 200 within `timeout_s`."""
        try:
            return self._http.get("/health", timeout=timeout_s).status_code == httpx.codes.OK
        except httpx.HTTPError:
            return False

    def models(self) -> list[dict[str, Any]]:
        """The entries of /v1/models.

        Raises:
            ResourceError: no server answers.
            ServerError, InputError: it answers with an error.
        """
        with self._errors("/v1/models") as where:
            response = self._http.get("/v1/models")
            _check_status(response, where)
            entries = _json(response.text, where).get("data")
        if not isinstance(entries, list) or not all(isinstance(e, dict) and "id" in e for e in entries):
            raise ServerError("the answer is not a list of models", where=where)
        return entries

    def text(self, path: str, *, timeout_s: float = 5.0) -> str | None:
        """What GET `path` answers; None where the server has no such page or does not answer in time."""
        try:
            response = self._http.get(path, timeout=timeout_s)
        except httpx.HTTPError:
            return None
        return response.text if response.status_code == httpx.codes.OK else None

    def chat(
        self, messages: str | Sequence[Mapping[str, Any]], *, model: str | None = None, **options: Any
    ) -> Reply:
        """Send a chat request (a text is one user message) and stream its answer to the end.

        `options` go into the request's body: max_tokens, temperature, stop, ...

        Raises:
            ResourceError: no server answers.
            InputError: it wants another API key.
            ServerError: it refuses the request, breaks off, stalls or sends garbage.
        """
        reply = Reply()
        for delta in self.stream(messages, reply, model=model, **options):
            reply.deltas.append(delta)
        return reply

    def stream(
        self,
        messages: str | Sequence[Mapping[str, Any]],
        reply: Reply | None = None,
        *,
        model: str | None = None,
        **options: Any,
    ) -> Iterator[Delta]:
        """As `chat`, piece by piece; the counts and the finish reason go into `reply`."""
        reply = Reply() if reply is None else reply
        body = {
            "model": model or self.models()[0]["id"],
            "messages": [{"role": "user", "content": messages}]
            if isinstance(messages, str)
            else list(messages),
            "stream": True,
            "stream_options": {"include_usage": True},
            **options,
        }
        start = time.perf_counter()
        with (
            self._errors("/v1/chat/completions") as where,
            self._http.stream("POST", "/v1/chat/completions", json=body) as response,
        ):
            if response.status_code != httpx.codes.OK:
                response.read()
            _check_status(response, where)
            for data in _events(response.iter_lines()):
                at = time.perf_counter() - start
                delta = _read_chunk(_json(data, where), at, reply, where)
                if delta.visible:
                    yield delta
        if not reply.finish_reason:
            raise ServerError("the answer broke off without a finish reason", where=where)

    def get(self, path: str) -> dict[str, Any]:
        """The JSON object at `path`. Raises as `models`."""
        with self._errors(path) as where:
            response = self._http.get(path)
            _check_status(response, where)
            return _json(response.text, where)

    def post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Send a JSON request and read its whole answer. Raises as `chat`."""
        with self._errors(path) as where:
            response = self._http.post(path, json=body)
            _check_status(response, where)
            return _json(_utf8(response.content, where), where)

    def signal(self, path: str) -> None:
        """POST without a body; what comes back does not matter. Raises as `models`."""
        with self._errors(path) as where:
            _check_status(self._http.post(path), where)

    def events(
        self, path: str, body: Mapping[str, Any]
    ) -> Generator[tuple[float, dict[str, Any]], None, None]:
        """Send a JSON request and read its answer event by event, up to [DONE].

        Yields:
            (seconds since the request was sent, the event's JSON object).

        Raises:
            as `chat`; also ServerError for bytes that are not UTF-8, which `stream` would replace.
        """
        start = time.perf_counter()
        with self._errors(path) as where, self._http.stream("POST", path, json=body) as response:
            if response.status_code != httpx.codes.OK:
                response.read()
            _check_status(response, where)
            for data in _events(_lines(response.iter_bytes(), where)):
                yield time.perf_counter() - start, _json(data, where)

    @contextmanager
    def _errors(self, path: str) -> Iterator[str]:
        where = self.url + path
        try:
            yield where
        except httpx.ConnectError as error:
            raise ResourceError(f"no server answers ({error})", where=self.url, remedy=_START_ONE) from None
        except httpx.ConnectTimeout:
            raise ResourceError(
                f"no server answers within {CONNECT_TIMEOUT_S:.0f} s", where=self.url, remedy=_START_ONE
            ) from None
        except httpx.ReadTimeout:
            raise ServerError(f"nothing came for {self.stall_s:.0f} s", where=where) from None
        except httpx.HTTPError as error:
            raise ServerError(
                f"the connection broke ({error or type(error).__name__})", where=where
            ) from None


def _events(lines: Iterator[str]) -> Iterator[str]:
    """The data of server-sent events (https://html.spec.whatwg.org/multipage/server-sent-events.html), up to
    [DONE]; each of these servers sends one line of data an event."""
    for line in lines:
        if not line or line.startswith(":"):
            continue
        name, _, value = line.partition(":")
        if name != "data":
            continue
        if value.strip() == "[DONE]":
            return
        yield value


def _lines(blocks: Iterator[bytes], where: str) -> Iterator[str]:
    held = b""
    for block in blocks:
        *lines, held = (held + block).split(b"\n")
        for line in lines:
            yield _utf8(line, where).rstrip("\r")
    if held:
        yield _utf8(held, where)


def _utf8(data: bytes, where: str) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        wrong = data[error.start : error.start + 4]
        raise ServerError(f"bytes that are not UTF-8: {wrong.hex(' ')}", where=where) from None


def _read_chunk(chunk: dict[str, Any], at: float, reply: Reply, where: str) -> Delta:
    if "error" in chunk:
        raise ServerError(f"the server reports: {_error_message(chunk)}", where=where)
    try:
        usage = chunk.get("usage")
        if usage:
            reply.prompt_tokens, reply.completion_tokens = usage["prompt_tokens"], usage["completion_tokens"]
            reply.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        if not chunk["choices"]:
            return Delta(at)
        choice = chunk["choices"][0]
        if choice.get("finish_reason"):
            reply.finish_reason, reply.end_s = choice["finish_reason"], at
        delta = choice.get("delta") or {}
        # Two names in use for the same field: SGLang and transformers, then vLLM.
        reasoning = delta.get("reasoning_content") or delta.get("reasoning") or ""
        tokens = usage["completion_tokens"] if usage else None
        return Delta(at, delta.get("content") or "", reasoning, tuple(delta.get("tool_calls") or ()), tokens)
    except (KeyError, TypeError, AttributeError, IndexError):
        raise ServerError(f"not a chat completion chunk: {_clip(json.dumps(chunk))}", where=where) from None


def _check_status(response: httpx.Response, where: str) -> None:
    status = response.status_code
    if status == httpx.codes.OK:
        return
    try:
        message = _error_message(response.json())
    except ValueError:
        message = _clip(response.text) or response.reason_phrase
    if status in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
        raise InputError(
            f"HTTP {status}: {message}", where=where, remedy="set Q38_API_KEY to the server's key"
        )
    raise ServerError(f"HTTP {status}: {message}", where=where, status=status)


def _error_message(document: Any) -> str:
    """The message in any of the shapes in use: OpenAI's, FastAPI's, SGLang's."""
    if isinstance(document, dict):
        error = document.get("error", document)
        if isinstance(error, dict):
            error = error.get("message") or error.get("detail") or document
        return _clip(error if isinstance(error, str) else json.dumps(error))
    return _clip(json.dumps(document))


def _json(text: str, where: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        raise ServerError(f"not JSON: {_clip(text)}", where=where) from None
    if not isinstance(value, dict):
        raise ServerError(f"not a JSON object: {_clip(text)}", where=where)
    return value


def _clip(text: str, most: int = 200) -> str:
    text = " ".join(text.split())
    return text if len(text) <= most else text[:most] + "..."
