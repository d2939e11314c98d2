"""Text that models are tuned, traced and measured on, and its packing into token sequences.

A source of text is a name or a path, or several joined by commas, each with a language before it if its rows
do not say theirs:

    stdlib                         the .py files of the running Python's standard library
    multilingual                   English, German, Chinese, Japanese and Thai rows that ship with q38, and stdlib
    rows.jsonl                     one {"text": ..., "language": ..., "split": ...} per line; text alone is enough
    hub:OWNER/NAME@REVISION/FILE   a .jsonl or .parquet file of a data set on the Hugging Face hub
    de=rows.jsonl,code=stdlib      two of them
"""

from __future__ import annotations

import hashlib
import json
import os
import sysconfig
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from q38.base.errors import InputError
from q38.data import data_path

if TYPE_CHECKING:
    import torch

Split = Literal["train", "calibration", "held_out"]
STDLIB, MULTILINGUAL, HUB = "stdlib", "multilingual", "hub:"
MIXED = "mixed"  # sequences made of the ends of several languages
UNKNOWN = "unlabelled"
# Out of 16 parts of the standard library. A JSONL file is one user's calibration text: 2 in 16 rows are held out.
_STDLIB_PARTS: dict[Split, range] = {
    "held_out": range(0, 3),
    "calibration": range(3, 6),
    "train": range(6, 16),
}
_LEFT_OUT = {
    "test",
    "tests",
    "idle_test",
    "site-packages",
    "dist-packages",
    "__pycache__",
    "encodings",
    "pydoc_data",
}
_SHORTEST_FILE = 100  # characters; below are package markers, equal in many folders


@dataclass(frozen=True)
class Texts:
    """Texts of one split. `sha256` covers every text and its order; `origin` is for people.

    languages: one label per text; empty where all are alike.
    """

    texts: list[str]
    sha256: str
    origin: str
    languages: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Packed:
    """Token sequences of equal length.

    ids: int64 [sequences, length].
    tokens_used, tokens_available: how much of the text the sequences cover, separators included.
    languages: one label per sequence.
    used: which texts lie in the sequences, wholly or in part, ascending.
    """

    ids: torch.Tensor
    tokens_used: int
    tokens_available: int
    languages: list[str] = field(default_factory=list)
    used: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Row:
    """A text of a source. `split` is None where the source leaves it to us."""

    text: str
    language: str
    split: Split | None = None


def load_texts(source: str, split: Split) -> Texts:
    """Load one split. The splits of a source share no file (stdlib) or no text (rows).

    Args:
        source: see the module. The files of the standard library (sorted; tests, tables and package markers
            left out) are split by top-level module. Of rows, an eighth of each language is held out, by the
            hash of the text, and the rest serves both "train" and "calibration"; a row may name its split.

    Raises:
        InputError: no such file, a line that is no {"text": ...}, an empty split, or a hub file that cannot
            be had.
    """
    found: list[Row] = []
    origins = []
    for language, name in parse_source(source):
        rows, origin = _load(name, split)
        found += [Row(row.text, language or row.language) for row in rows]
        origins.append(origin)
    if not found:
        raise InputError(
            f"no text for the split {split}", where=source, remedy="give a JSONL file with at least two texts"
        )
    texts = [row.text for row in found]
    return Texts(texts, _digest(texts), "; ".join(origins), [row.language for row in found])


def parse_source(source: str) -> list[tuple[str | None, str]]:
    """(language or None, name or path) of each part of a source, `multilingual` resolved.

    Raises:
        InputError: an empty part.
    """
    parts: list[tuple[str | None, str]] = []
    for piece in source.split(","):
        language, equals, name = piece.strip().partition("=")
        if not equals:
            language, name = "", language
        if not name:
            raise InputError(
                f"'{source}' has an empty part",
                where="text",
                remedy="write SOURCE or LANGUAGE=SOURCE, joined by commas",
            )
        if name == MULTILINGUAL:
            parts += [
                (language or None, str(data_path("assets", "text", "multilingual.jsonl"))),
                (language or None, STDLIB),
            ]
        else:
            parts.append((language or None, name))
    return parts


def text_hash(text: str) -> str:
    """16 hex digits that name a text, white space around it aside."""
    return hashlib.sha256(text.strip().encode()).hexdigest()[:16]


def pack_tokens(
    texts: Sequence[str],
    tokenizer: Any,
    *,
    length: int,
    count: int,
    where: str = "text",
    languages: Sequence[str] = (),
) -> Packed:
    """Tokenize, join the texts of each language with one end-of-document token between, and cut `count` sequences.

    Languages get equal shares; what one cannot fill goes to the others. What is left of each language after its
    last whole sequence is joined to sequences of its own (label "mixed"), so that a short text is not lost. The
    sequences of a language lie evenly spaced over its text; what lies between them is the difference
    between `tokens_available` and `tokens_used`.

    Args:
        tokenizer: a transformers tokenizer; its pad token, else its eos token, is the separator.
        languages: one label per text; empty: all alike.

    Raises:
        InputError: the text has fewer than count * length tokens.
    """
    import torch

    streams = _streams(texts, tokenizer, list(languages) or [UNKNOWN] * len(texts), length)
    windows = {language: len(stream.ids) // length for language, stream in streams.items()}
    available = sum(len(stream.ids) for stream in streams.values())
    if sum(windows.values()) < count:
        raise InputError(
            f"{available:,} tokens for {count} sequences of {length} ({count * length:,} tokens)",
            where=where,
            remedy="give more text, or ask for fewer or shorter sequences",
        )
    rows: list[torch.Tensor] = []
    labels: list[str] = []
    used: set[int] = set()
    for language, share in even_shares(windows, count).items():
        stream = streams[language]
        for i in range(share):
            start = i * windows[language] // share * length
            rows.append(stream.ids[start : start + length])
            used.update(stream.texts[start : start + length].tolist())
        labels += [language] * share
    return Packed(torch.stack(rows), count * length, available, labels, sorted(used))


def even_shares(available: dict[str, int], count: int) -> dict[str, int]:
    """Shares of `count` that are as equal as what is available allows; sum(available) must reach `count`."""
    shares, left = dict.fromkeys(available, 0), count
    smallest_first = sorted(available, key=lambda name: available[name])
    for position, name in enumerate(smallest_first):
        shares[name] = min(available[name], left // (len(available) - position))
        left -= shares[name]
    return shares


def token_stream(texts: Sequence[str], tokenizer: Any) -> torch.Tensor:
    """All texts as one int64 [tokens] vector, each followed by the end-of-document token."""
    import torch

    return torch.tensor([token for ids in _encode(texts, tokenizer) for token in ids], dtype=torch.int64)


@dataclass(frozen=True)
class _Stream:
    """Tokens of one language, int64 [n], and the text that each belongs to, int64 [n]."""

    ids: torch.Tensor
    texts: torch.Tensor


def _streams(texts: Sequence[str], tokenizer: Any, languages: list[str], length: int) -> dict[str, _Stream]:
    """One stream per language, in order of appearance, each a whole number of sequences, and "mixed" for the ends."""
    import torch

    members: dict[str, list[int]] = defaultdict(list)
    for i, language in enumerate(languages):
        members[language].append(i)
    streams, ends = {}, []
    for language, indexes in members.items():
        pieces = _encode([texts[i] for i in indexes], tokenizer)
        owner = torch.repeat_interleave(torch.tensor(indexes), torch.tensor([len(p) for p in pieces]))
        ids = torch.tensor([token for piece in pieces for token in piece], dtype=torch.int64)
        whole = len(ids) // length * length if len(members) > 1 else len(ids)
        streams[language] = _Stream(ids[:whole], owner[:whole])
        ends.append(_Stream(ids[whole:], owner[whole:]))
    if len(members) > 1:
        streams[MIXED] = _Stream(torch.cat([e.ids for e in ends]), torch.cat([e.texts for e in ends]))
    return streams


def _encode(texts: Sequence[str], tokenizer: Any) -> list[list[int]]:
    """Tokens of each text, the end-of-document token after them."""
    end = separator_id(tokenizer)
    encoded = tokenizer(list(texts), add_special_tokens=False, verbose=False).input_ids if texts else []
    return [[*ids, end] for ids in encoded]


def separator_id(tokenizer: Any) -> int:
    """The end-of-document token: in Qwen tokenizers the pad token (<|endoftext|>); eos ends a chat turn."""
    for token in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if token is not None:
            return int(token)
    raise InputError(
        "the tokenizer has neither pad nor eos token",
        where=getattr(tokenizer, "name_or_path", "tokenizer"),
        remedy="restore tokenizer_config.json of the release",
    )


def _load(name: str, split: Split) -> tuple[list[Row], str]:
    """Rows of one split, and what they are, for people."""
    if name == STDLIB:
        files = _stdlib(split)
        origin = f"Python {sysconfig.get_python_version()} standard library, {split}: {len(files)} files"
        return [Row(text, "python") for text in files], origin
    if name.startswith(HUB):
        from q38.model.text_hub import hub_rows

        rows = [_row(name, number, value) for number, value in enumerate(hub_rows(name.removeprefix(HUB)), 1)]
    else:
        rows = _jsonl(Path(name))
    kept = _split_rows(rows, held_out=split == "held_out")
    short = name if name.startswith(HUB) else Path(name).name
    return kept, f"{short}, {split}: {len(kept)} of {len(rows)} rows"


def _stdlib(split: Split) -> list[str]:
    root, parts = Path(sysconfig.get_path("stdlib")), _STDLIB_PARTS[split]
    texts = []
    for path in sorted(_python_files(root)):
        if _part(path.relative_to(root)) in parts:
            text = path.read_text(encoding="utf-8", errors="replace")
            if len(text) >= _SHORTEST_FILE:
                texts.append(text)
    return texts


def _python_files(root: Path) -> Iterator[Path]:
    for directory, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in _LEFT_OUT]  # site-packages can be huge
        yield from (Path(directory, name) for name in files if name.endswith(".py"))


def _part(relative: Path) -> int:
    # By top-level module, so that near-copies inside a package cannot lie on both sides.
    name = relative.parts[0].removesuffix(".py")
    return hashlib.sha256(name.encode()).digest()[0] % 16


def _jsonl(path: Path) -> list[Row]:
    rows = []
    try:
        with path.open(encoding="utf-8") as f:
            for number, line in enumerate(f, 1):
                if line.strip():
                    rows.append(_row(str(path), number, _parsed(line)))
    except FileNotFoundError:
        raise InputError(
            "no such file",
            where=path,
            remedy="give a JSONL file with {'text': ...} lines, 'stdlib' or 'multilingual'",
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot be read ({error})", where=path, remedy="give a UTF-8 JSONL file") from None
    return rows


def _parsed(line: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def _row(where: str, number: int, value: Any) -> Row:
    text = value.get("text") if isinstance(value, dict) else None
    if not isinstance(text, str) or _has_surrogate(text):
        raise InputError(
            "not a JSON object with a valid string 'text'",
            where=f"{where}:{number}",
            remedy="write one {'text': ...} per line",
        )
    language, split = value.get("language") or UNKNOWN, value.get("split")
    if not isinstance(language, str) or split not in (None, *_STDLIB_PARTS):
        raise InputError(
            f"language {language!r} is no string, or split {split!r} is none of {', '.join(_STDLIB_PARTS)}",
            where=f"{where}:{number}",
            remedy="correct the row, or leave both out",
        )
    return Row(text, language, split)


def _has_surrogate(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False


def _split_rows(rows: list[Row], *, held_out: bool) -> list[Row]:
    """The rows of one side. Of each language an eighth of what has no split of its own is held out."""
    # By rank of the hash: exactly an eighth, at least one of each side, equal texts on one side.
    by_language: dict[str, set[str]] = defaultdict(set)
    named = {_sha(row.text): row.split == "held_out" for row in rows if row.split is not None}
    for row in rows:
        if _sha(row.text) not in named:
            by_language[row.language].add(_sha(row.text))
    share = {digest for digest, held in named.items() if held}
    for digests in by_language.values():
        ranked = sorted(digests)
        share.update(ranked[: max(len(ranked) // 8, 1)])
    return [row for row in rows if (_sha(row.text) in share) == held_out]


def _sha(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _digest(texts: Iterable[str]) -> str:
    digest = hashlib.sha256()
    for text in texts:
        data = text.encode()
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()
