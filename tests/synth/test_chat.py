"""Chat turns from docstrings."""

from __future__ import annotations

from q38.synth.chat import chat_texts

SOURCE = '''
class Stack:
    """A pile of things.

    More of it.
    """

    def push(self, x):
        """Put x
        on top."""

    def pop(self):
        return 1
'''


def test_each_documented_name_becomes_one_conversation() -> None:
    assert chat_texts([SOURCE]) == [
        "<|im_start|>user\nWhat is Stack?<|im_end|>\n<|im_start|>assistant\nA pile of things.<|im_end|>\n",
        "<|im_start|>user\nWhat is push?<|im_end|>\n<|im_start|>assistant\nPut x on top.<|im_end|>\n",
    ]


def test_a_source_that_does_not_parse_is_passed_over() -> None:
    assert len(chat_texts(["def broken(:", "\x00", SOURCE])) == 2
