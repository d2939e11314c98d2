"""Text that models are tuned, traced and measured on, and its packing into token sequences."""

from __future__ import annotations

import hashlib
import json
import os
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from q38.base.errors import InputError

if TYPE_CHECKING:
    import torch

Split = Literal["train", "calibration", "held_out"]
STDLIB = "stdlib"
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
    """Texts of one split. `sha256` covers every text and its order; `origin` is for people."""

    texts: list[str]
    sha256: str
    origin: str


@dataclass(frozen=True)
class Packed:
    """Token sequences of equal length.

    ids: int64 [sequences, length].
    tokens_used, tokens_available: how much of the text the sequences cover, separators included.
    """

    ids: torch.Tensor
    tokens_used: int
    tokens_available: int


def load_texts(source: str, split: Split) -> Texts:
    """Load one split. The splits of a source share no file (stdlib) or no text (JSONL).

    Args:
        source: "stdlib", the .py files of the running Python's standard library (sorted; tests, tables
            and package markers left out), split by top-level module; or the path of a JSONL file with one {"text": ...} per
            line, of which an eighth is held out by the hash of the text and the rest serves both
            "train" and "calibration".

    Raises:
        InputError: no such file, a line that is no {"text": ...}, or an empty split.
    """
    if source == STDLIB:
        rows = _stdlib(split)
        origin = f"Python {sysconfig.get_python_version()} standard library, {split}: {len(rows)} files"
    else:
        path = Path(source)
        every = _jsonl(path)
        rows = _split_rows(every, held_out=split == "held_out")
        origin = f"{path.name}, {split}: {len(rows)} of {len(every)} rows"
    if not rows:
        raise InputError(
            f"no text for the split {split}", where=source, remedy="give a JSONL file with at least two texts"
        )
    return Texts(rows, _digest(rows), origin)


def pack_tokens(
    texts: Sequence[str], tokenizer: Any, *, length: int, count: int, where: str = "text"
) -> Packed:
    """Tokenize, join the texts with one end-of-document token between, and cut `count` sequences.

    The sequences lie evenly spaced over the whole text, so that each part of it has a share; what lies
    between them is the difference between `tokens_available` and `tokens_used`.

    Args:
        tokenizer: a transformers tokenizer; its pad token, else its eos token, is the separator.

    Raises:
        InputError: the text has fewer than count * length tokens.
    """
    import torch

    stream = token_stream(texts, tokenizer)
    windows = len(stream) // length
    if windows < count:
        raise InputError(
            f"{len(stream):,} tokens for {count} sequences of {length} ({count * length:,} tokens)",
            where=where,
            remedy="give more text, or ask for fewer or shorter sequences",
        )
    starts = [i * windows // count * length for i in range(count)]
    ids = torch.stack([stream[s : s + length] for s in starts])  # [count, length]
    return Packed(ids, count * length, len(stream))


def token_stream(texts: Sequence[str], tokenizer: Any) -> torch.Tensor:
    """All texts as one int64 [tokens] vector, each followed by the end-of-document token."""
    import torch

    end = separator_id(tokenizer)
    ids: list[int] = []
    for encoded in tokenizer(list(texts), add_special_tokens=False, verbose=False).input_ids:
        ids += encoded
        ids.append(end)
    return torch.tensor(ids, dtype=torch.int64)


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


def _jsonl(path: Path) -> list[str]:
    rows = []
    try:
        with path.open(encoding="utf-8") as f:
            for number, line in enumerate(f, 1):
                if line.strip():
                    rows.append(_row(path, number, line))
    except FileNotFoundError:
        raise InputError(
            "no such file", where=path, remedy="give a JSONL file with {'text': ...} lines, or 'stdlib'"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot be read ({error})", where=path, remedy="give a UTF-8 JSONL file") from None
    return rows


def _row(path: Path, number: int, line: str) -> str:
    try:
        text = json.loads(line)["text"]
    except (ValueError, TypeError, KeyError, RecursionError):
        text = None
    if not isinstance(text, str) or _has_surrogate(text):
        raise InputError(
            "not a JSON object with a valid string 'text'",
            where=f"{path}:{number}",
            remedy="write one {'text': ...} per line",
        )
    return text


def _has_surrogate(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False


def _split_rows(rows: list[str], *, held_out: bool) -> list[str]:
    # By rank of the hash: exactly an eighth, at least one of each side, equal texts on one side.
    ranked = sorted({hashlib.sha256(text.encode()).hexdigest() for text in rows})
    share = {ranked[i] for i in range(max(len(ranked) // 8, 1))} if ranked else set()
    return [text for text in rows if (hashlib.sha256(text.encode()).hexdigest() in share) == held_out]


def _digest(texts: Iterable[str]) -> str:
    digest = hashlib.sha256()
    for text in texts:
        data = text.encode()
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()
