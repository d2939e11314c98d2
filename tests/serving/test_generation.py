"""Token ids to text, reasoning and tool calls, with the tiny model's tokenizer and without a model."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.cli.serving.utils import ReasoningText, ToolCall, get_response_template
from transformers.utils.chat_parsing import ResponseParser

from q38.hf.load import load_tokenizer
from q38.serving.generation import TokenStreamer, _Ended

PROMPT = torch.tensor([[1, 2, 3]])
QWEN = SimpleNamespace(config=SimpleNamespace(model_type="qwen3_5"))
CALL = "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"


@pytest.fixture(scope="module")
def tokenizer(tiny_source: Path) -> Any:
    return load_tokenizer(tiny_source)


class Run:
    """A streamer that was fed with the tokens of a text."""

    def __init__(
        self, tokenizer: Any, ids: list[int], *, stops: list[str] = (), parsed: bool = False
    ) -> None:  # type: ignore[assignment]
        self.items: list[Any] = []
        parser = None
        if parsed:
            template = get_response_template(tokenizer, QWEN)
            parser = ResponseParser(template, prefix="<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n")
        self.streamer = TokenStreamer(
            tokenizer, self.items.append, stops=stops, eos_ids=[tokenizer.eos_token_id], parser=parser
        )
        self.streamer.put(PROMPT)
        try:
            for token in ids:
                self.streamer.put(torch.tensor([token]))
        except _Ended:
            pass
        self.streamer.end()

    def text(self) -> str:
        return "".join(i for i in self.items if isinstance(i, str) and not isinstance(i, ReasoningText))

    def reasoning(self) -> str:
        return "".join(i for i in self.items if isinstance(i, ReasoningText))

    def calls(self) -> list[Any]:
        return [i for i in self.items if isinstance(i, ToolCall)]


def ids_of(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


@given(text=st.text(st.characters(codec="utf-8", exclude_categories=("Cs",)), max_size=40))
def test_the_pieces_are_the_whole_text(tokenizer: Any, text: str) -> None:
    ids = ids_of(tokenizer, text)
    run = Run(tokenizer, ids)
    assert run.text() == tokenizer.decode(ids, skip_special_tokens=True)
    assert run.streamer.completion_tokens == len(ids)


def test_a_character_cut_in_half_is_shown_as_the_decoder_shows_it(tokenizer: Any) -> None:
    ids = ids_of(tokenizer, "a\U0001f642")[:-1]
    run = Run(tokenizer, ids)
    assert run.text() == tokenizer.decode(ids)


@given(
    text=st.text("abc \u00e9\u4e2d", min_size=1, max_size=30),
    stop=st.text("abc \u4e2d", min_size=1, max_size=3),
)
def test_a_stop_string_across_tokens_is_found(tokenizer: Any, text: str, stop: str) -> None:
    run = Run(tokenizer, ids_of(tokenizer, text), stops=[stop])
    assert run.text() == text.split(stop)[0]
    assert run.streamer.finish_reason == ("stop" if stop in text else "length")


def test_the_end_token_is_counted_and_not_shown(tokenizer: Any) -> None:
    run = Run(tokenizer, [*ids_of(tokenizer, "yes"), tokenizer.eos_token_id])
    assert run.text() == "yes"
    assert run.streamer.completion_tokens == len(ids_of(tokenizer, "yes")) + 1
    assert run.streamer.finish_reason == "stop"


def test_reasoning_is_told_from_the_answer(tokenizer: Any) -> None:
    run = Run(tokenizer, ids_of(tokenizer, "<think>\nhm\n</think>\n\nyes<|im_end|>"), parsed=True)
    assert run.reasoning().strip() == "hm"
    assert run.text().strip() == "yes"


@pytest.mark.parametrize("end", ["", "\n", "<|im_end|>"], ids=["limit", "newline", "eos"])
def test_a_tool_call_is_parsed(tokenizer: Any, end: str) -> None:
    run = Run(tokenizer, ids_of(tokenizer, CALL + end), parsed=True)
    assert [(c.name, c.arguments) for c in run.calls()] == [("add", '{"a": "1"}')]
    assert run.text().strip() == ""


@pytest.mark.parametrize("cut", [20, 40, len(CALL) - 3])
def test_a_tool_call_that_is_cut_off_comes_as_text_and_not_as_a_call(tokenizer: Any, cut: int) -> None:
    run = Run(tokenizer, ids_of(tokenizer, "sure\n" + CALL[:cut]), parsed=True)
    assert run.calls() == []
    assert run.text().strip() == "sure\n" + CALL[:cut].rstrip()


def test_a_stop_string_applies_before_parsing(tokenizer: Any) -> None:
    run = Run(
        tokenizer, ids_of(tokenizer, "<think>\nhm\n</think>\n\nyes and no"), stops=[" and"], parsed=True
    )
    assert run.text().strip() == "yes"
    assert run.streamer.finish_reason == "stop"


def test_a_cancelled_answer_ends_at_the_next_token(tokenizer: Any) -> None:
    run = Run(tokenizer, [])
    run.streamer.cancelled.set()
    with pytest.raises(_Ended):
        run.streamer.put(torch.tensor([5]))
