"""Chat turns made from docstrings, so that a trained tiny model knows how a turn begins and ends."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence


def chat_texts(sources: Sequence[str]) -> list[str]:
    """One conversation per documented function or class: "What is NAME?" and its first paragraph.

    Rendered as the chat template renders it. Sources that this Python cannot parse are passed over.
    """
    return [
        f"<|im_start|>user\nWhat is {name}?<|im_end|>\n<|im_start|>assistant\n{answer}<|im_end|>\n"
        for source in sources
        for name, answer in _documented(source)
    ]


def _documented(source: str) -> Iterator[tuple[str, str]]:
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            paragraph = (ast.get_docstring(node) or "").partition("\n\n")[0]
            if answer := " ".join(paragraph.split()):
                yield node.name, answer
