"""load_texts and pack_tokens: disjoint splits, exact sequences, nothing lost unsaid."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from q38.base.errors import InputError
from q38.model.text import load_texts, pack_tokens, token_stream

SPLITS = ("train", "calibration", "held_out")


class ByteTokenizer:
    """One token per byte, and 256 to end a document: enough to count on."""

    pad_token_id: int | None = 256
    eos_token_id: int | None = 257
    name_or_path = "bytes"

    def __call__(self, texts: list[str], **_: Any) -> SimpleNamespace:
        return SimpleNamespace(input_ids=[list(text.encode()) for text in texts])


def write_jsonl(path: Path, texts: list[str]) -> str:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return str(path)


def test_stdlib_splits_share_no_text() -> None:
    texts = {split: set(load_texts("stdlib", split).texts) - {""} for split in SPLITS}
    assert all(texts[split] for split in SPLITS)
    assert not texts["train"] & texts["held_out"]
    assert not texts["train"] & texts["calibration"]
    assert not texts["calibration"] & texts["held_out"]


def test_a_package_of_the_stdlib_lies_in_one_split() -> None:
    package = Path(json.__file__).parent
    found = {
        split
        for split in SPLITS
        for file in package.glob("*.py")
        if file.read_text(encoding="utf-8") in load_texts("stdlib", split).texts
    }
    assert len(found) == 1


def test_stdlib_is_the_same_in_another_process() -> None:
    code = "from q38.model.text import load_texts; print(load_texts('stdlib', 'held_out').sha256)"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert other.stdout.strip() == load_texts("stdlib", "held_out").sha256


def test_loading_text_imports_nothing_heavy() -> None:
    code = "import sys; from q38.model.text import load_texts; load_texts('stdlib', 'train'); print('torch' in sys.modules)"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert other.stdout.strip() == "False"


@given(st.lists(st.text(alphabet="abcé\n", max_size=5), min_size=2, max_size=40))
def test_jsonl_rows_are_held_out_or_not_and_none_is_lost(
    tmp_path_factory: pytest.TempPathFactory, rows: list[str]
) -> None:
    source = write_jsonl(tmp_path_factory.mktemp("rows") / "rows.jsonl", rows)
    if len(set(rows)) < 2:
        with pytest.raises(InputError, match="at least two"):
            load_texts(source, "calibration")
        return
    held_out, rest = load_texts(source, "held_out"), load_texts(source, "calibration")
    assert sorted(held_out.texts + rest.texts) == sorted(rows)
    assert not set(held_out.texts) & set(rest.texts)
    assert held_out.texts and rest.texts


def test_an_eighth_of_the_distinct_rows_is_held_out(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "rows.jsonl", [f"row {i}" for i in range(80)])
    assert len(load_texts(source, "held_out").texts) == 10
    assert load_texts(source, "held_out").origin == "rows.jsonl, held_out: 10 of 80 rows"


def test_the_hash_covers_the_order_of_the_texts(tmp_path: Path) -> None:
    rows = [f"row {i}" for i in range(9)]
    forward = load_texts(write_jsonl(tmp_path / "a.jsonl", rows), "train")
    backward = load_texts(write_jsonl(tmp_path / "b.jsonl", rows[::-1]), "train")
    assert forward.texts == backward.texts[::-1]
    assert forward.sha256 != backward.sha256


def test_the_hash_covers_where_one_text_ends(tmp_path: Path) -> None:
    one = load_texts(write_jsonl(tmp_path / "a.jsonl", ["held", "ab", "c"]), "train")
    two = load_texts(write_jsonl(tmp_path / "b.jsonl", ["held", "a", "bc"]), "train")
    assert one.sha256 != two.sha256


@pytest.mark.parametrize(
    "line", ["not json", '"a string"', '{"txt": "x"}', '{"text": 3}', "[1]", '{"text": "\\ud800"}', "null"]
)
def test_a_bad_row_is_refused_with_its_line_number(tmp_path: Path, line: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "good"}\n\n' + line + "\n", encoding="utf-8")
    with pytest.raises(InputError) as caught:
        load_texts(str(path), "train")
    assert caught.value.where == f"{path}:3"


def test_a_missing_file_and_a_directory_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such file"):
        load_texts(str(tmp_path / "absent.jsonl"), "train")
    with pytest.raises(InputError, match="cannot be read"):
        load_texts(str(tmp_path), "train")


def test_a_file_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"text": "\xff"}\n')
    with pytest.raises(InputError, match="cannot be read"):
        load_texts(str(path), "train")


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no text for the split held_out"):
        load_texts(write_jsonl(tmp_path / "rows.jsonl", []), "held_out")


def test_texts_are_joined_with_one_separator_after_each() -> None:
    assert token_stream(["ab", "", "c"], ByteTokenizer()).tolist() == [97, 98, 256, 256, 99, 256]


def test_the_separator_is_eos_where_there_is_no_pad_token() -> None:
    tokenizer = ByteTokenizer()
    tokenizer.pad_token_id = None
    assert token_stream(["a"], tokenizer).tolist() == [97, 257]


def test_a_tokenizer_with_neither_token_is_refused() -> None:
    tokenizer = ByteTokenizer()
    tokenizer.pad_token_id = tokenizer.eos_token_id = None
    with pytest.raises(InputError, match="neither pad nor eos"):
        token_stream(["a"], tokenizer)


@given(st.data())
def test_packing_gives_exactly_the_sequences_asked_for(data: st.DataObject) -> None:
    texts = data.draw(st.lists(st.text(alphabet="abc", max_size=30), min_size=1, max_size=10))
    length = data.draw(st.integers(1, 12))
    stream = token_stream(texts, ByteTokenizer())
    available = len(stream) // length
    count = data.draw(st.integers(1, max(available, 1)))
    if available < count:
        with pytest.raises(InputError, match=f"{len(stream)} tokens for {count} sequences"):
            pack_tokens(texts, ByteTokenizer(), length=length, count=count)
        return
    packed = pack_tokens(texts, ByteTokenizer(), length=length, count=count)
    assert packed.ids.shape == (count, length)
    assert packed.ids.dtype == torch.int64
    assert (packed.tokens_used, packed.tokens_available) == (count * length, len(stream))
    # Every sequence is a piece of the stream, and no token is in two of them.
    pieces = [stream[i * length : (i + 1) * length].tolist() for i in range(available)]
    found = [i for row in packed.ids.tolist() for i, piece in enumerate(pieces) if piece == row]
    assert len(found) >= count
    assert packed.ids.tolist() == [pieces[i * available // count] for i in range(count)]


def test_sequences_are_spread_over_the_whole_text() -> None:
    packed = pack_tokens(["a" * 99, "b" * 99], ByteTokenizer(), length=10, count=2)
    assert packed.ids[0].tolist() == [97] * 10
    assert packed.ids[1].tolist() == [98] * 10
