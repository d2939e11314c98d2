"""One answer, generated on the model's thread and read as a stream of text, reasoning and tool calls.

transformers' own stop_strings leave the stop string in the text and need a table over the whole vocabulary
for each new string; its finish reason is "length" whenever the last allowed token ends the answer. Both
are done here, on the decoded text, for streamed and whole answers alike.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from typing import Any

import torch
from tokenizers.decoders import DecodeStream
from transformers.cli.serving.utils import ToolCall, response_events_to_chunks

from q38.serving.stop_strings import StopStrings

Item = Any  # str, or transformers' ReasoningText (a str) or ToolCall
_CALL_END = "</tool_call>"


class _Ended(Exception):
    """Raised inside model.generate to end it early."""


class TokenStreamer:
    """The streamer that model.generate feeds (`put` per step, `end` at the end).

    Args:
        tokenizer: a fast transformers tokenizer.
        emit: called with each item, on the model's thread.
        stops: strings that end the answer and are cut from it.
        eos_ids: tokens that end it.
        parser: transformers' ResponseParser, which separates reasoning and tool calls; None = plain text.
    """

    def __init__(
        self,
        tokenizer: Any,
        emit: Callable[[Item], None],
        *,
        stops: Sequence[str],
        eos_ids: Collection[int],
        parser: Any,
    ) -> None:
        self._backend = tokenizer.backend_tokenizer
        self._emit = emit
        self._stops = StopStrings(stops)
        self._eos_ids = frozenset(eos_ids)
        self._parser = parser
        # The parser looks for special tokens; without one they must not show.
        self._skip_special = parser is None
        self._decode = DecodeStream([], skip_special_tokens=self._skip_special)
        self._ids: list[int] = []
        self._decoded = ""
        self._unparsed = ""
        self._prompt_seen = False
        self._finished = False
        self.cancelled = threading.Event()
        if parser is not None:
            self._emit_events(parser.initial_events)

    @property
    def completion_tokens(self) -> int:
        """Tokens generated, the ending one included."""
        return len(self._ids)

    @property
    def finish_reason(self) -> str:
        """ "stop" if the model or a stop string ended the answer, else "length"."""
        ended = self._stops.hit is not None or (bool(self._ids) and self._ids[-1] in self._eos_ids)
        return "stop" if ended else "length"

    def put(self, value: torch.Tensor) -> None:
        """Take the prompt (first call, [1, prompt] int64), then each new token ([1] int64)."""
        if self.cancelled.is_set():
            raise _Ended
        if not self._prompt_seen:
            self._prompt_seen = True
            return
        for token in value.tolist():
            self._ids.append(token)
            # None while a character's bytes are incomplete.
            self._take(self._decode.step(self._backend, token) or "")
            if self._stops.hit is not None:
                raise _Ended

    def end(self) -> None:
        """Emit what was held back. Called by model.generate, and again after an early end."""
        if self._finished:
            return
        self._finished = True
        whole = self._backend.decode(self._ids, skip_special_tokens=self._skip_special)
        if self._stops.hit is None and whole.startswith(self._decoded):
            self._take(whole[len(self._decoded) :])
        self._parse(self._stops.flush())
        if self._parser is not None:
            try:
                _, events = self._parser.finalize()
            except (ValueError, RuntimeError):
                self._give_up_parsing()
            else:
                self._emit_last(events)

    def _take(self, text: str) -> None:
        self._decoded += text
        self._parse(self._stops.feed(text))

    def _parse(self, text: str) -> None:
        if not text:
            return
        if self._parser is None:
            self._emit(text)
            return
        self._unparsed += text
        try:
            self._emit_events(self._parser.feed(text))
        except (ValueError, RuntimeError):
            self._give_up_parsing()

    def _emit_events(self, events: list[dict[str, Any]]) -> None:
        for item in response_events_to_chunks(events):
            self._unparsed = ""
            self._emit(item)

    def _emit_last(self, events: list[dict[str, Any]]) -> None:
        items = response_events_to_chunks(events)
        if any(isinstance(item, ToolCall) for item in items) and _CALL_END not in self._unparsed:
            # The parser completes a call that was cut off; no client should act on half of its arguments.
            self._give_up_parsing()
            return
        for item in items:
            self._emit(item)

    def _give_up_parsing(self) -> None:
        # A malformed or cut-off tool call: the client gets its text rather than nothing.
        self._parser = None
        if self._unparsed:
            self._emit(self._unparsed)
            self._unparsed = ""


class Generation:
    """A running answer. Iterate `items`; the counts and the finish reason hold after that.

    Args:
        submit: runs a function on the model's thread (GenerateManager.submit).
        input_ids: [1, prompt] int64.
        config: the GenerationConfig of this request.
    """

    def __init__(
        self,
        submit: Callable[[Callable[[], None]], object],
        model: Any,
        tokenizer: Any,
        input_ids: torch.Tensor,
        config: Any,
        *,
        stops: Sequence[str],
        parser: Any = None,
        seed: int | None = None,
    ) -> None:
        self.prompt_tokens = input_ids.shape[-1]
        loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[Item] = asyncio.Queue()

        def emit(item: Item) -> None:
            loop.call_soon_threadsafe(self._queue.put_nowait, item)

        eos = config.eos_token_id if config.eos_token_id is not None else model.generation_config.eos_token_id
        eos_ids = [] if eos is None else [eos] if isinstance(eos, int) else list(eos)
        streamer = TokenStreamer(tokenizer, emit, stops=stops, eos_ids=eos_ids, parser=parser)
        self._streamer = streamer

        def run() -> None:
            try:
                if seed is not None:
                    torch.manual_seed(seed)
                if not streamer.cancelled.is_set():
                    model.generate(
                        input_ids=input_ids,
                        attention_mask=torch.ones_like(input_ids),
                        generation_config=config,
                        streamer=streamer,
                    )
            except _Ended:
                streamer.end()
            except Exception as error:  # noqa: BLE001 - whatever fails on the model's thread is the request's answer
                emit(error)
            emit(None)

        submit(run)

    @property
    def completion_tokens(self) -> int:
        return self._streamer.completion_tokens

    @property
    def finish_reason(self) -> str:
        return self._streamer.finish_reason

    def cancel(self) -> None:
        """Stop generating; the client is gone."""
        self._streamer.cancelled.set()

    async def items(self) -> AsyncIterator[Item]:
        """Text, reasoning and tool calls as they come. Raises what model.generate raised."""
        while (item := await self._queue.get()) is not None:
            if isinstance(item, Exception):
                raise item
            yield item
