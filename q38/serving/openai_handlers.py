"""The chat and completion endpoints of transformers' server, with OpenAI's semantics where it departs from them.

What differs from transformers 5.19: max_completion_tokens, stream_options and SGLang's extra fields work;
stop strings are cut from the text; the finish reason is right when the last allowed token ends the answer;
the stream ends with [DONE]; what cannot be honoured is refused instead of ignored.
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from typing import Any, Protocol

from fastapi.responses import JSONResponse, StreamingResponse
from openai.types import Completion, CompletionChoice, CompletionUsage
from openai.types.chat import ChatCompletionChunk
from transformers.cli.serving.chat_completion import ChatCompletionHandler
from transformers.cli.serving.completion import CompletionHandler
from transformers.cli.serving.utils import ReasoningText, ToolCall, build_response_parser

from q38.serving.generation import Generation
from q38.serving.openai_errors import error_document
from q38.serving.openai_requests import (
    BadRequest,
    ChatRequest,
    CompletionRequest,
    parse_chat,
    parse_completion,
)

_DONE = "data: [DONE]\n\n"


class Served(Protocol):
    """The one model a server has: q38.serving.served_model.ServedModel."""

    name: str
    context: int

    def get(self) -> tuple[Any, Any]:
        """(model, tokenizer)."""


class ChatHandler(ChatCompletionHandler):  # type: ignore[misc]
    """POST /v1/chat/completions."""

    model_manager: Served

    async def handle_request(self, body: dict[str, Any], request_id: str) -> StreamingResponse | JSONResponse:
        """Answer one request. Raises BadRequest."""
        request = parse_chat(body)
        check_model_name(request.model, self.model_manager.name)
        model, tokenizer = self.model_manager.get()
        input_ids = self._prompt(request, tokenizer)
        generation = Generation(
            self.generation_state.get_manager(self.model_manager.name).submit,
            model,
            tokenizer,
            input_ids,
            build_config(self, request, model, input_ids.shape[-1]),
            stops=request.stops,
            parser=build_response_parser(tokenizer, model, input_ids),
            seed=request.seed,
        )
        if request.stream:
            events = self._events(generation, request_id, usage=request.include_usage)
            return StreamingResponse(_cancelling(events, generation), media_type="text/event-stream")
        return JSONResponse(await self._whole(generation, request_id))

    def _prompt(self, request: ChatRequest, tokenizer: Any) -> Any:
        """The chat template applied: [1, prompt] int64."""
        messages = request.template_messages()
        try:
            return tokenizer.apply_chat_template(
                messages,
                add_generation_prompt=True,
                tools=None if request.tool_choice == "none" else request.tools,
                return_tensors="pt",
                return_dict=True,
                **self.chat_template_kwargs,
                **(request.chat_template_kwargs or {}),
            )["input_ids"]
        except Exception as error:  # noqa: BLE001 - templates raise what they like; all of it is about the messages
            message = " ".join(str(error).split())
            raise BadRequest(f"the chat template refuses the messages: {message}", param="messages") from None

    async def _events(self, generation: Generation, request_id: str, *, usage: bool) -> AsyncIterator[str]:
        name = self.model_manager.name
        yield self._build_chunk_sse(request_id, role="assistant", model=name)
        calls = 0
        async for item in generation.items():
            if isinstance(item, ToolCall):
                call = {"index": calls, **_tool_call(item, request_id, calls)}
                yield self._build_chunk_sse(request_id, model=name, tool_calls=[call])
                calls += 1
            elif isinstance(item, ReasoningText):
                yield self._build_chunk_sse(request_id, model=name, reasoning_content=item)
            else:
                yield self._build_chunk_sse(request_id, model=name, content=item)
        reason = "tool_calls" if calls else generation.finish_reason
        yield self._build_chunk_sse(request_id, model=name, finish_reason=reason)
        if usage:
            # OpenAI sends the usage by itself, after the chunk with the finish reason.
            chunk = ChatCompletionChunk(
                id=request_id,
                choices=[],
                created=int(time.time()),
                model=name,
                object="chat.completion.chunk",
                usage=usage_of(generation),
            )
            yield self.chunk_to_sse(chunk)

    async def _whole(self, generation: Generation, request_id: str) -> dict[str, Any]:
        items = [item async for item in generation.items()]
        calls = [item for item in items if isinstance(item, ToolCall)]
        reasoning = "".join(item for item in items if isinstance(item, ReasoningText))
        text = "".join(
            item for item in items if isinstance(item, str) and not isinstance(item, ReasoningText)
        )
        document: dict[str, Any] = self._build_completion(
            request_id,
            text,
            self.model_manager.name,
            finish_reason="tool_calls" if calls else generation.finish_reason,
            usage=usage_of(generation),
            tool_calls=[_tool_call(call, request_id, i) for i, call in enumerate(calls)] or None,
            reasoning_content=reasoning or None,
        )
        return document


class TextHandler(CompletionHandler):  # type: ignore[misc]
    """POST /v1/completions."""

    model_manager: Served

    async def handle_request(self, body: dict[str, Any], request_id: str) -> StreamingResponse | JSONResponse:
        """Answer one request. Raises BadRequest."""
        request = parse_completion(body)
        check_model_name(request.model, self.model_manager.name)
        model, tokenizer = self.model_manager.get()
        input_ids = tokenizer(request.prompt, return_tensors="pt")["input_ids"]
        generation = Generation(
            self.generation_state.get_manager(self.model_manager.name).submit,
            model,
            tokenizer,
            input_ids,
            build_config(self, request, model, input_ids.shape[-1]),
            stops=request.stops,
            seed=request.seed,
        )
        if request.stream:
            events = self._events(generation, request_id, usage=request.include_usage)
            return StreamingResponse(_cancelling(events, generation), media_type="text/event-stream")
        text = "".join([item async for item in generation.items()])
        choice = CompletionChoice(text=text, index=0, logprobs=None, finish_reason=generation.finish_reason)
        completion = Completion(
            id=request_id,
            choices=[choice],
            created=int(time.time()),
            model=self.model_manager.name,
            object="text_completion",
            usage=usage_of(generation),
        )
        return JSONResponse(completion.model_dump(exclude_none=True))

    async def _events(self, generation: Generation, request_id: str, *, usage: bool) -> AsyncIterator[str]:
        name = self.model_manager.name
        async for item in generation.items():
            yield self._build_chunk_sse(request_id, name, text=item)
        counts = usage_of(generation) if usage else None
        yield self._build_chunk_sse(request_id, name, finish_reason=generation.finish_reason, usage=counts)


def check_model_name(asked: str | None, served: str) -> None:
    """Refuse another model's name, as OpenAI does (404). No name means the served model."""
    if asked is not None and asked != served:
        raise BadRequest(
            f"model '{asked}' is not served here; this server has '{served}'", status=404, param="model"
        )


def build_config(
    handler: ChatHandler | TextHandler,
    request: ChatRequest | CompletionRequest,
    model: Any,
    prompt_tokens: int,
) -> Any:
    """The GenerationConfig of one request, on top of the model's own defaults.

    Raises:
        BadRequest: prompt and answer do not fit the model's context, or a biased token does not exist.
    """
    room = handler.model_manager.context - prompt_tokens
    if room < 1 or (request.limit or 1) > room:
        raise BadRequest(
            f"the prompt has {prompt_tokens} tokens and {request.limit or 'at least 1'} are asked for; "
            f"the model's context is {handler.model_manager.context}",
            param="messages",
        )
    sampled = bool(request.temperature)
    body = {"temperature": request.temperature} if sampled else {}
    config = handler._build_generation_config({**body, "top_p": request.top_p}, model.generation_config)
    if request.temperature is not None:
        config.do_sample = sampled
    config.max_new_tokens = request.limit or min(config.max_new_tokens, room)
    config.min_new_tokens = config.max_new_tokens if request.ignore_eos else request.min_tokens
    for name in ("top_k", "min_p", "repetition_penalty"):
        value = getattr(request, name)
        if value is not None:
            setattr(config, name, value)
    if request.logit_bias:
        vocabulary = model.config.get_text_config().vocab_size
        if not all(0 <= token < vocabulary for token in request.logit_bias):
            raise BadRequest(f"field 'logit_bias': tokens are 0 to {vocabulary - 1}", param="logit_bias")
        config.sequence_bias = {(token,): bias for token, bias in request.logit_bias.items()}
    return config


def usage_of(generation: Generation) -> CompletionUsage:
    """Token counts of a finished answer."""
    prompt, completion = generation.prompt_tokens, generation.completion_tokens
    return CompletionUsage(
        prompt_tokens=prompt, completion_tokens=completion, total_tokens=prompt + completion
    )


async def _cancelling(events: AsyncIterator[str], generation: Generation) -> AsyncIterator[str]:
    """The events, then [DONE]; an error becomes an event; a client that leaves stops the generation."""
    try:
        async for event in events:
            yield event
    except Exception as error:  # noqa: BLE001 - the status line is sent: an event is the only place left
        yield f"data: {json.dumps(error_document(f'{type(error).__name__}: {error}', 500))}\n\n"
    finally:
        generation.cancel()
    yield _DONE


def _tool_call(call: ToolCall, request_id: str, i: int) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": f"{request_id}_tool_call_{i}", "type": "function", "function": function}
