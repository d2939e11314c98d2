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
from q38.model.text import MIXED, even_shares, load_texts, pack_tokens, parse_source, text_hash, token_stream

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
    "line",
    [
        '{"text": "x", "language": 3}',
        '{"text": "x", "split": "test"}',
        "not json",
        '"a string"',
        '{"txt": "x"}',
        '{"text": 3}',
        "[1]",
        '{"text": "\\ud800"}',
        "null",
    ],
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


def test_the_shipped_text_covers_its_languages_on_both_sides_and_shares_no_text() -> None:
    sides = {split: load_texts("multilingual", split) for split in SPLITS}
    for texts in sides.values():
        assert {"en", "de", "zh", "ja", "th", "python"} == set(texts.languages)
        assert len(texts.texts) == len(texts.languages)
    assert not set(sides["calibration"].texts) & set(sides["held_out"].texts)


def test_a_row_may_name_its_language_and_its_split(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    rows = [
        {"text": f"row {i}", "language": "de", "split": "held_out" if i < 3 else "calibration"}
        for i in range(5)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    held_out = load_texts(str(path), "held_out")
    assert held_out.texts == ["row 0", "row 1", "row 2"]
    assert held_out.languages == ["de"] * 3
    assert load_texts(str(path), "train").texts == ["row 3", "row 4"]


def test_each_language_of_a_file_has_held_out_rows(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    rows = [{"text": f"{lang} {i}", "language": lang} for lang in ("en", "th") for i in range(8)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert load_texts(str(path), "held_out").languages == ["en", "th"]


def test_sources_are_joined_and_a_label_before_one_goes_to_its_rows(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", [f"row {i}" for i in range(8)])
    texts = load_texts(f"de={source},code=stdlib", "calibration")
    assert texts.languages[:7] == ["de"] * 7
    assert set(texts.languages[7:]) == {"code"}
    assert "a.jsonl" in texts.origin and "standard library" in texts.origin
    with pytest.raises(InputError, match="empty part"):
        parse_source("stdlib,,x")


def test_the_hash_of_a_text_does_not_see_the_space_around_it() -> None:
    assert text_hash("a\n") == text_hash(" a") != text_hash("a b")
    assert len(text_hash("")) == 16


@given(st.dictionaries(st.sampled_from("abcde"), st.integers(0, 20), min_size=1), st.data())
def test_shares_are_as_equal_as_what_is_there_allows(available: dict[str, int], data: st.DataObject) -> None:
    count = data.draw(st.integers(0, sum(available.values())))
    shares = even_shares(available, count)
    assert sum(shares.values()) == count
    assert all(0 <= shares[name] <= available[name] for name in available)
    for name in available:  # whoever has less than another has all there is of it
        assert shares[name] == available[name] or shares[name] >= max(shares.values()) - 1


def test_languages_get_equal_shares_and_no_end_of_a_text_is_lost() -> None:
    texts, languages = ["a" * 35, "b" * 13, "c" * 90], ["x", "y", "z"]
    packed = pack_tokens(texts, ByteTokenizer(), length=10, count=10, languages=languages)
    assert packed.languages == ["x"] * 3 + ["y"] + ["z"] * 5 + [MIXED]
    # 6 tokens of x, 4 of y and 1 of z are left after the whole sequences, ends of documents included.
    assert packed.ids[-1].tolist() == [97] * 5 + [256] + [98] * 3 + [256]
    assert packed.used == [0, 1, 2]
    assert (packed.tokens_used, packed.tokens_available) == (100, 141)


@given(st.data())
def test_the_texts_that_are_used_are_those_whose_tokens_lie_in_the_sequences(data: st.DataObject) -> None:
    texts = [
        chr(97 + i) * n for i, n in enumerate(data.draw(st.lists(st.integers(1, 30), min_size=2, max_size=8)))
    ]
    languages = data.draw(st.lists(st.sampled_from("xy"), min_size=len(texts), max_size=len(texts)))
    length = data.draw(st.integers(2, 8))
    count = data.draw(st.integers(1, max(sum(map(len, texts)) // length // 2, 1)))
    try:
        packed = pack_tokens(texts, ByteTokenizer(), length=length, count=count, languages=languages)
    except InputError:
        return
    seen = {i for i in range(len(texts)) if (packed.ids == 97 + i).any()}
    assert seen <= set(packed.used)
    for i in set(packed.used) - seen:  # only the token that ends it was taken
        assert (packed.ids == 256).any(), i
