"""Paths of inputs and outputs: names from a file stay inside, no output is an input, a failed read says where."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

from q38.base.errors import InputError


def is_inside(name: str) -> bool:
    """Whether a name from a file can only lie below the directory it is joined to."""
    path = PurePosixPath(name)
    return bool(name) and not path.is_absolute() and ".." not in path.parts and path.as_posix() == name


def require_inside(names: Iterable[str], file: Path) -> None:
    """Refuse a list of files that names one outside its directory: anyone can write such a list.

    Args:
        file: the list.

    Raises:
        InputError: with the first such name.
    """
    for name in names:
        if not is_inside(name):
            raise InputError(
                f"names the file '{name}' outside the directory", where=file, remedy="do not use it"
            )


def refuse_inputs(out: Path, inputs: Iterable[Path | None], *, below: bool = False) -> None:
    """Refuse an output directory that is an input, holds one or lies in one.

    Args:
        inputs: files and directories; the files that links in them point to count as well. None is passed over.
        below: `out` may lie in an input.

    Raises:
        InputError: with the input.
    """
    target = out.resolve()
    for given in inputs:
        for place in () if given is None else _places(given):
            if place.is_relative_to(target) or (not below and target.is_relative_to(place)):
                raise InputError(
                    f"would share a directory with an input ({place})",
                    where=out,
                    remedy="choose a directory beside it",
                )


def _places(given: Path) -> Iterator[Path]:
    yield given.resolve()
    if given.is_dir():  # a download of the hub is a directory of links
        yield from (path.resolve() for path in given.iterdir() if path.is_symlink() and path.is_file())


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn the operating system's refusals to read `path` into ours.

    Raises:
        InputError: the file is gone, may not be read, or the disk fails.
    """
    try:
        yield
    except OSError as error:
        raise InputError(
            f"cannot be read ({error.strerror or error})",
            where=path,
            remedy="restore it or correct its permissions, and run the same command again",
        ) from None


def read_chunks(path: Path, size: int = 2**22) -> Iterator[bytes]:
    """The bytes of a file, at most `size` at a time.

    Raises:
        InputError: the file is gone, may not be read, or the disk fails.
    """
    with reading(path):
        file = path.open("rb")
    with file:
        while True:
            with reading(path):
                chunk = file.read(size)
            if not chunk:
                return
            yield chunk
