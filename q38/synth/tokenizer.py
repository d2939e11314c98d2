"""A byte-level BPE tokenizer with the release's special tokens and a chat template."""

from __future__ import annotations

import json
from typing import Any

BPE_TOKENS = 2000
# How Qwen3.5 tokenizers split text before BPE; transformers applies this pattern whatever tokenizer.json says.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# In the release's order, above the BPE ranks.
SPECIAL_TOKENS = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>",
    "<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>",
    "<|image_pad|>", "<|video_pad|>", "<tool_call>", "</tool_call>", "<think>", "</think>",
)  # fmt: skip

CHAT_TEMPLATE = """\
{%- macro text(content) -%}
    {%- if content is string -%}
        {{- content -}}
    {%- else -%}
        {%- for part in content or [] -%}
            {%- if part.type == 'text' -%}
                {{- part.text -}}
            {%- elif part.type in ('image', 'image_url') -%}
                {{- '<|vision_start|><|image_pad|><|vision_end|>' -}}
            {%- elif part.type in ('video', 'video_url') -%}
                {{- '<|vision_start|><|video_pad|><|vision_end|>' -}}
            {%- endif -%}
        {%- endfor -%}
    {%- endif -%}
{%- endmacro -%}
{%- for message in messages -%}
    {%- if message.role == 'system' and not loop.first -%}
        {{- raise_exception('The system message must come first.') -}}
    {%- elif message.role not in ('system', 'user', 'assistant', 'tool') -%}
        {{- raise_exception('Unknown role: ' ~ message.role) -}}
    {%- endif -%}
    {{- '<|im_start|>' ~ message.role ~ '\\n' ~ text(message.content) ~ '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""


def special_id(token: str) -> int:
    """Token id of a special token."""
    return BPE_TOKENS + SPECIAL_TOKENS.index(token)


def tokenizer_files(texts: list[str]) -> dict[str, str]:
    """Train on `texts`; returns file name -> content of the tokenizer's files.

    The same texts give the same files: BPE training breaks ties by token id.
    """
    from tokenizers import (
        AddedToken,
        Regex,
        Tokenizer,
        decoders,
        models,
        normalizers,
        pre_tokenizers,
        trainers,
    )

    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=BPE_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() != BPE_TOKENS:
        raise ValueError(f"the text yields {tokenizer.get_vocab_size()} of {BPE_TOKENS} BPE tokens")
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL_TOKENS])
    return {
        "tokenizer.json": json.dumps(json.loads(tokenizer.to_str()), ensure_ascii=False, indent=1) + "\n",
        "tokenizer_config.json": json.dumps(_tokenizer_config(), ensure_ascii=False, indent=1) + "\n",
        "chat_template.jinja": CHAT_TEMPLATE,
    }


def _tokenizer_config() -> dict[str, Any]:
    return {
        "add_bos_token": False,
        "add_prefix_space": False,
        "bos_token": None,
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|im_end|>",
        "model_max_length": 32768,
        "pad_token": "<|endoftext|>",
        "processor_class": "Qwen3VLProcessor",
        "tokenizer_class": "Qwen2Tokenizer",
        "unk_token": None,
    }
