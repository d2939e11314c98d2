"""What the transformers engine accepts of the OpenAI API: checked before the model sees it.

A field that would change the answer and that this engine cannot honour is refused unless it has its
neutral value. Fields that change nothing in the answer are accepted and dropped.
Reference: https://platform.openai.com/docs/api-reference/chat/create
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

Ignored = Any


class BadRequest(Exception):
    """A request that is refused with a 4xx status. `param` is the field at fault."""

    def __init__(self, message: str, *, status: int = 400, param: str | None = None) -> None:
        super().__init__(message)
        self.message, self.status, self.param = message, status, param


class TextPart(BaseModel):
    """A piece of a message's content."""

    type: Literal["text"]
    text: str


class Message(BaseModel):
    """One turn. Other fields (tool_calls, tool_call_id, name) go to the chat template as they are."""

    model_config = ConfigDict(extra="allow")
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None


class StreamOptions(BaseModel):
    """Only include_usage is defined by the API."""

    model_config = ConfigDict(extra="ignore")
    include_usage: bool = False


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


class Sampling(BaseModel):
    """Fields that the chat and the text completion API share. None = the model's default."""

    model_config = ConfigDict(extra="forbid")
    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = Field(None, ge=1)
    stop: Annotated[list[Annotated[str, Field(min_length=1)]] | None, BeforeValidator(_as_list)] = None
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    seed: int | None = None
    logit_bias: dict[int, float] | None = None
    # Not OpenAI's; the names that SGLang and vLLM use.
    top_k: int | None = Field(None, ge=0)
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, gt=0)
    min_tokens: int | None = Field(None, ge=0)
    ignore_eos: bool | None = None
    # Honoured only at their neutral value.
    n: Literal[1] | None = None
    presence_penalty: Annotated[float, Field(ge=0, le=0)] | None = None
    frequency_penalty: Annotated[float, Field(ge=0, le=0)] | None = None
    # Bookkeeping that changes no answer.
    user: Ignored = None
    metadata: Ignored = None
    store: Ignored = None
    service_tier: Ignored = None
    safety_identifier: Ignored = None
    prompt_cache_key: Ignored = None

    @model_validator(mode="after")
    def _tokens_in_order(self) -> Self:
        if self.min_tokens and self.limit and self.min_tokens > self.limit:
            raise ValueError(f"min_tokens {self.min_tokens} is above the limit of {self.limit}")
        return self

    @property
    def limit(self) -> int | None:
        """Most tokens to generate."""
        return self.max_tokens

    @property
    def stops(self) -> list[str]:
        return self.stop or []

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


class ChatRequest(Sampling):
    """Body of POST /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["none", "auto"] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    logprobs: Literal[False] | None = None
    top_logprobs: Literal[0] | None = None
    response_format: dict[Literal["type"], Literal["text"]] | None = None
    modalities: list[Literal["text"]] | None = None
    audio: None = None
    functions: None = None
    function_call: None = None
    web_search_options: None = None
    parallel_tool_calls: Ignored = None
    reasoning_effort: Ignored = None
    verbosity: Ignored = None
    prediction: Ignored = None

    @property
    def limit(self) -> int | None:
        """Most tokens to generate; the newer name wins."""
        return self.max_completion_tokens or self.max_tokens

    def template_messages(self) -> list[dict[str, Any]]:
        """The messages as chat templates take them: text for content, objects for tool arguments.

        Raises:
            BadRequest: the arguments of an earlier tool call are not JSON.
        """
        return [_for_template(i, message) for i, message in enumerate(self.messages)]


class CompletionRequest(Sampling):
    """Body of POST /v1/completions."""

    prompt: str = Field(min_length=1)
    best_of: Literal[1] | None = None
    echo: Literal[False] | None = None
    logprobs: None = None
    suffix: None = None


_Request = TypeVar("_Request", bound=Sampling)


def parse_chat(body: dict[str, Any]) -> ChatRequest:
    """Check a chat request. Raises BadRequest with one readable sentence."""
    messages = body.get("messages")
    for i, message in enumerate(messages if isinstance(messages, list) else []):
        _refuse_media(i, message)
    return _parse(ChatRequest, body)


def parse_completion(body: dict[str, Any]) -> CompletionRequest:
    """Check a text completion request. Raises BadRequest with one readable sentence."""
    return _parse(CompletionRequest, body)


def _parse(kind: type[_Request], body: dict[str, Any]) -> _Request:
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        first = error.errors()[0]
        names = [str(part) for part in first["loc"]]
        param = ".".join(name for name in names if name.isidentifier() or name.isdigit())
        if first["type"] == "extra_forbidden":
            message = f"unknown field '{param}'"
        elif first["type"] == "missing":
            message = f"field '{param}' is missing"
        elif not param:
            message = first["msg"].removeprefix("Value error, ")
        else:
            message = f"field '{param}': {first['msg'][0].lower()}{first['msg'][1:]}"
            if names[0] in _NEUTRAL_ONLY:
                message += "; the transformers engine does not support it otherwise"
        raise BadRequest(message, param=param) from None


_NEUTRAL_ONLY = {
    "n", "presence_penalty", "frequency_penalty", "logprobs", "top_logprobs", "response_format", "modalities", "audio", "functions",
    "function_call", "web_search_options", "best_of", "echo", "suffix", "tool_choice",
}  # fmt: skip


def _for_template(i: int, message: Message) -> dict[str, Any]:
    # Clients send earlier answers back as they got them, fields without a value included.
    turn = {k: v for k, v in message.model_dump(exclude_unset=True).items() if v is not None}
    if isinstance(message.content, list):
        turn["content"] = " ".join(part.text for part in message.content)
    turn.setdefault("content", "")
    # OpenAI's newer word for the same role.
    turn["role"] = "system" if message.role == "developer" else message.role
    try:
        for call in turn.get("tool_calls", []):
            arguments = call["function"]["arguments"]
            if isinstance(arguments, str):
                call["function"]["arguments"] = json.loads(arguments)
    except (ValueError, KeyError, TypeError):
        raise BadRequest(
            f"messages.{i}.tool_calls: every call needs a function with JSON arguments", param="messages"
        ) from None
    return turn


def _refuse_media(i: int, message: Any) -> None:
    content = message.get("content") if isinstance(message, dict) else None
    for part in content if isinstance(content, list) else []:
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(kind, str) and kind != "text":
            raise BadRequest(
                f"messages.{i} holds a part of type '{kind}'; the transformers engine takes text only",
                param=f"messages.{i}.content",
            )
