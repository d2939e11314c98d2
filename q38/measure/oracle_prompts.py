"""The prompt set of the oracle: fixed prompts with fixed continuations, as text and as token ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from q38.base.errors import InputError
from q38.checkpoint.index import read_json
from q38.data import data_path
from q38.measure.identity import digest

SCHEMA = "q38.oracle-prompts/1"
SHORT = "short"


@dataclass(frozen=True)
class Prompt:
    """One prompt. Chats have `messages` and may have `tools`, the others `text`.

    kind is text, code, chat, tools or long.
    """

    id: str
    kind: str
    language: str
    continuation: str
    text: str | None = None
    messages: tuple[dict[str, Any], ...] = ()
    tools: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True)
class PromptSet:
    """`sha256` covers every prompt and continuation, not the layout of the file."""

    name: str
    sha256: str
    prompts: tuple[Prompt, ...]


@dataclass(frozen=True)
class Item:
    """A prompt as token ids. The continuation is scored, the prompt is only read."""

    id: str
    prompt: tuple[int, ...]
    continuation: tuple[int, ...]


def load_prompts(file: Path | None = None) -> PromptSet:
    """A prompt file, or the set that ships with q38.

    Args:
        file: `short` is the shipped set without its long prompts, which most of the time goes to.

    Raises:
        InputError: no such file, or an entry that is no prompt.
    """
    short = file == Path(SHORT)
    path = data_path("assets", "oracle", "prompts.json") if file is None or short else file
    raw = read_json(path)
    entries = raw.get("prompts")
    if raw.get("schema") != SCHEMA or not isinstance(entries, list) or not entries:
        raise InputError(
            f"is no {SCHEMA} file with prompts", where=path, remedy="start from assets/oracle/prompts.json"
        )
    if short:
        entries = [entry for entry in entries if entry["kind"] != "long"]
    prompts = tuple(_prompt(entry, path) for entry in entries)
    if len({p.id for p in prompts}) != len(prompts):
        raise InputError("two prompts have the same id", where=path, remedy="rename one of them")
    return PromptSet(SHORT if short else str(raw.get("name", path.stem)), digest(entries), prompts)


def tokenize(prompts: Sequence[Prompt], tokenizer: Any) -> list[Item]:
    """Prompts as token ids. Prompt and continuation are tokenized apart, so no token spans the border."""
    items = []
    for prompt in prompts:
        text = prompt.text
        if text is None:
            text = tokenizer.apply_chat_template(
                list(prompt.messages),
                tools=list(prompt.tools) or None,
                tokenize=False,
                add_generation_prompt=True,
            )
        ids = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
        scored = tokenizer(prompt.continuation, add_special_tokens=False, verbose=False).input_ids
        items.append(Item(prompt.id, tuple(ids), tuple(scored)))
    return items


def _prompt(entry: Any, path: Path) -> Prompt:
    fields = entry if isinstance(entry, dict) else {}
    text, messages = fields.get("prompt"), fields.get("messages")
    names = ("id", "kind", "language", "continuation")
    whole = all(isinstance(fields.get(name), str) and fields[name] for name in names)
    if not whole or isinstance(text, str) == isinstance(messages, list):
        raise InputError(
            f"entry {fields.get('id', entry)!r} is no prompt",
            where=path,
            remedy=f"give {', '.join(names)}, and either prompt or messages (and tools, if any)",
        )
    tools = tuple(fields.get("tools") or ())
    texts = {name: fields[name] for name in names}
    return Prompt(text=text, messages=tuple(messages or ()), tools=tools, **texts)
