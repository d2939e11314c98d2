"""Files and directories that a user names: outputs that q38 may replace, inputs that are of another kind."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from q38.base.errors import InputError


def holds(file: Path, what: str, is_own: Callable[[Path], bool]) -> bool:
    """Whether an output file already holds `what`; False where there is none, or an empty one.

    Args:
        is_own: whether the file is of that kind; an error while it reads means no.

    Raises:
        InputError: it holds something else, which writing it would destroy.
    """
    if not file.exists() or (file.is_file() and file.stat().st_size == 0):
        return False
    try:
        own = file.is_file() and is_own(file)
    except (InputError, OSError, ValueError):
        own = False
    if not own:
        raise InputError(
            f"is there and is no {what}, it would be overwritten", where=file, remedy="choose another file"
        )
    return True


def require_directory(path: Path, *, remedy: str) -> None:
    """Refuse a path that is no directory.

    Args:
        remedy: for a path that is not there.

    Raises:
        InputError: as said; for a file the remedy names its directory.
    """
    if path.is_file():
        raise InputError("is a file", where=path, remedy=f"give its directory, {path.parent}")
    if not path.is_dir():
        raise InputError("no such directory", where=path, remedy=remedy)


@contextmanager
def advising(remedy: str) -> Iterator[None]:
    """Give refusals inside this remedy: a reader of any file knows only that of a download.

    Raises:
        InputError: that of the body, with this remedy.
    """
    try:
        yield
    except InputError as error:
        raise InputError(error.what, where=error.where, remedy=remedy) from None


def has_schema(schema: str) -> Callable[[Path], bool]:
    """For `holds`: a JSON object whose "schema" is `schema`, in whatever version."""
    kind = schema.split("/")[0]

    def is_own(file: Path) -> bool:
        value = json.loads(file.read_text(encoding="utf-8"))
        return isinstance(value, dict) and str(value.get("schema")).split("/")[0] == kind

    return is_own


def begins_with(mark: str, within: int = 4096) -> Callable[[Path], bool]:
    """For `holds`: `mark` stands in the first `within` bytes."""

    def is_own(file: Path) -> bool:
        with file.open("rb") as f:
            return mark.encode() in f.read(within)

    return is_own
