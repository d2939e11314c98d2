from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from q38.base.errors import InputError
from q38.measure.oracle_prompts import load_prompts, tokenize


def test_the_shipped_set_covers_languages_code_chat_and_a_long_text() -> None:
    prompts = load_prompts().prompts
    assert {"en", "de", "zh", "ja", "th", "python", "c"} <= {p.language for p in prompts}
    assert {p.kind for p in prompts} == {"text", "code", "chat", "tools", "long"}
    assert any(m["role"] == "system" for p in prompts for m in p.messages)
    assert any(len(p.messages) >= 4 for p in prompts)
    assert any(p.tools and any(m["role"] == "tool" for m in p.messages) for p in prompts)


def test_the_long_prompt_is_longer_than_the_sparse_attention_budget(tiny_source: Path) -> None:
    from q38.hf.load import load_tokenizer

    long = [p for p in load_prompts().prompts if p.kind == "long"]
    assert all(len(item.prompt) > 2048 for item in tokenize(long, load_tokenizer(tiny_source)))


def test_short_is_the_shipped_set_without_its_long_prompts() -> None:
    whole, short = load_prompts(), load_prompts(Path("short"))
    assert short.prompts == tuple(p for p in whole.prompts if p.kind != "long") != whole.prompts
    assert short.name == "short" and short.sha256 != whole.sha256


def test_ids_are_those_of_prompt_and_continuation_apart(tiny_source: Path) -> None:
    from q38.hf.load import load_tokenizer

    tokenizer = load_tokenizer(tiny_source)
    for prompt, item in zip(load_prompts().prompts, tokenize(load_prompts().prompts, tokenizer), strict=True):
        assert tokenizer.decode(item.continuation) == prompt.continuation
        if prompt.text is not None:
            assert tokenizer.decode(item.prompt) == prompt.text
        else:
            assert tokenizer.decode(item.prompt).endswith("<|im_start|>assistant\n")


def test_the_hash_follows_the_prompts_and_not_the_layout_of_the_file(tmp_path: Path) -> None:
    entry = {"id": "a", "kind": "text", "language": "en", "prompt": "x", "continuation": "y"}

    def sha256(entries: list[dict[str, str]], indent: int | None) -> str:
        file = tmp_path / "p.json"
        file.write_text(json.dumps({"schema": "q38.oracle-prompts/1", "prompts": entries}, indent=indent))
        return load_prompts(file).sha256

    assert sha256([entry], None) == sha256([dict(reversed(entry.items()))], 2)
    assert sha256([entry], None) != sha256([{**entry, "continuation": "z"}], None)


@pytest.mark.parametrize(
    "prompts",
    [
        [],
        [{"id": "a"}],
        ["text"],
        [{"id": "a", "kind": "text", "language": "en", "continuation": "y"}],
        [{"id": "a", "kind": "text", "language": "en", "prompt": "x", "messages": [], "continuation": "y"}],
        [{"id": "a", "kind": "text", "language": "en", "prompt": "x", "continuation": ""}],
        [{"id": "a", "kind": "text", "language": "en", "prompt": "x", "continuation": "y"}] * 2,
    ],
)
def test_a_broken_prompt_file_is_refused(tmp_path: Path, prompts: Any) -> None:
    file = tmp_path / "p.json"
    file.write_text(json.dumps({"schema": "q38.oracle-prompts/1", "prompts": prompts}))
    with pytest.raises(InputError):
        load_prompts(file)
