"""Random damage to the files of a checkpoint, as hypothesis draws it."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

Draw = Callable[[st.SearchStrategy[Any]], Any]

JUNK = st.sampled_from(
    [None, True, False, 0, 1, -1, 2, 3, 64, 1.5, 1e300, 2**31, 2**70, -(2**70), "", "x", "../x", "\0", "a\nb", [], {}, [[]], [None],
     ["x"], {"": None}, {"bits": 4}, {"bits": "8"}, "(", ".*", [1, 2, 3], "9" * 30]
)  # fmt: skip


def mutate_json(file: Path, draw: Draw, below: tuple[str, ...] = ()) -> None:
    """One to three changes somewhere in a JSON file, or (where they can be found) below a path of keys."""
    document = json.loads(file.read_text())
    for _ in range(draw(st.integers(1, 3))):
        root = document
        for key in below:
            root = root.get(key) if isinstance(root, dict) else None
        change_value(root if isinstance(root, dict | list) and root else document, draw)
    text = json.dumps(document)
    file.unlink()
    file.write_text(text)


def change_value(document: Any, draw: Draw) -> None:
    """Delete, replace, rename or double one value, at any depth."""
    while True:
        if not isinstance(document, dict | list) or not document:
            return
        keys = list(document) if isinstance(document, dict) else list(range(len(document)))
        key = draw(st.sampled_from(keys))
        if isinstance(document[key], dict | list) and document[key] and draw(st.integers(0, 3)):
            document = document[key]
            continue
        break
    action = draw(st.sampled_from(["replace", "replace", "delete", "rename", "double"]))
    if action == "delete":
        del document[key]
    elif action == "replace":
        document[key] = copy.deepcopy(draw(JUNK))  # the strategy keeps its own
    elif isinstance(document, dict):
        name = draw(st.sampled_from(["", "x", f"{key}x", *map(str, keys[:4])]))
        document[name] = document.pop(key) if action == "rename" else document[key]
    else:
        document.append(document[key])


def mutate_bytes(file: Path, draw: Draw, *, limit: int | None = None) -> None:
    """Change bytes before `limit`, cut the file, or append to it."""
    content = bytearray(file.read_bytes())
    size = min(len(content), limit or len(content))
    action = draw(st.sampled_from(["change", "change", "change", "cut", "append", "insert"]))
    if action == "cut":
        del content[draw(st.integers(0, size)) :]
    elif action == "append":
        content += draw(st.binary(min_size=1, max_size=20))
    elif action == "insert":
        at = draw(st.integers(0, size))
        content[at:at] = draw(st.binary(min_size=1, max_size=9))
    else:
        for _ in range(draw(st.integers(1, 3))):
            if size:
                content[draw(st.integers(0, size - 1))] = draw(st.integers(0, 255))
    file.unlink()
    file.write_bytes(content)


def mutate_header(file: Path, draw: Draw) -> None:
    """Change the header of a shard as JSON, its length kept right, its data as they are."""
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    for _ in range(draw(st.integers(1, 2))):
        change_value(header, draw)
    raw = json.dumps(header).encode()
    file.unlink()
    file.write_bytes(len(raw).to_bytes(8, "little") + raw + content[8 + length :])


def swap(one: Path, other: Path) -> None:
    """Exchange two files, if they are two."""
    if one == other:
        return
    middle = one.with_name("middle")
    one.rename(middle)
    other.rename(one)
    middle.rename(other)
