"""The tiny tokenizer: transformers and the tokenizers library read it alike, and the chat template."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from jinja2.exceptions import TemplateError

from q38.synth.tokenizer import SPECIAL_TOKENS, special_id, tokenizer_files


@pytest.fixture(scope="module")
def tokenizer(tiny_source: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny_source, local_files_only=True)


@pytest.fixture(scope="module")
def plain(tiny_source: Path) -> Any:
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(tiny_source / "tokenizer.json"))


@example("e\u0301")  # the normalizer joins them
@example("12345 don't  x\n\n y हिन्दी")
@given(st.text(alphabet=st.characters(blacklist_categories=["Cs"]), max_size=60))
def test_transformers_and_tokenizers_agree(tokenizer: Any, plain: Any, text: str) -> None:
    assert tokenizer(text).input_ids == plain.encode(text).ids


@given(st.text(alphabet="abc xyz_0129()\n\t:.,'é日😀", max_size=60))
def test_text_comes_back_from_its_tokens(tokenizer: Any, text: str) -> None:
    assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_special_tokens_lie_above_the_bpe_ranks_and_below_the_vocabulary(tokenizer: Any) -> None:
    for token in SPECIAL_TOKENS:
        assert tokenizer.convert_tokens_to_ids(token) == special_id(token)
        assert tokenizer(token).input_ids == [special_id(token)]
    assert len(tokenizer) == 2018 < 2048


def test_a_turn_ends_on_eos_and_a_document_on_the_pad_token(tokenizer: Any) -> None:
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|endoftext|>")


def test_python_text_takes_about_three_characters_a_token(tokenizer: Any) -> None:
    text = Path(__file__).read_text(encoding="utf-8")
    assert 2.0 < len(text) / len(tokenizer(text).input_ids) < 6.0


def test_the_template_renders_system_and_several_turns(tokenizer: Any) -> None:
    messages = [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello"},
        {"role": "user", "content": [{"type": "text", "text": "Bye"}, {"type": "image"}]},
    ]
    rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert rendered == (
        "<|im_start|>system\nBe short.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\nHello<|im_end|>\n"
        "<|im_start|>user\nBye<|vision_start|><|image_pad|><|vision_end|><|im_end|>\n<|im_start|>assistant\n"
    )


def test_without_a_generation_prompt_the_last_turn_is_closed(tokenizer: Any) -> None:
    rendered = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False)
    assert rendered == "<|im_start|>user\nHi<|im_end|>\n"


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": "a"}, {"role": "system", "content": "b"}],
        [{"role": "narrator", "content": "a"}],
    ],
)
def test_the_template_refuses_a_misplaced_or_unknown_role(
    tokenizer: Any, messages: list[dict[str, str]]
) -> None:
    with pytest.raises(TemplateError):
        tokenizer.apply_chat_template(messages, tokenize=False)


def test_a_text_that_is_too_small_for_the_vocabulary_is_noticed() -> None:
    with pytest.raises(ValueError, match="of 2000 BPE tokens"):
        tokenizer_files(["too little"])
