"""Rows of a decode step, found by a C function that CUDA can call in the middle of a graph (fetch_rows.c).

A callback in Python would need the interpreter's lock, which the scheduler holds at just that moment. So the function is
compiled at the start, with the C compiler that SGLang's own kernels need too, and kept in the cache directory.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import shutil
import subprocess
import tempfile
from ctypes import c_int64, c_uint64, c_void_p
from pathlib import Path
from typing import TYPE_CHECKING, Any

from q38.base import settings
from q38.base.errors import InputError, ResourceError
from q38.kernels.compile_cache import cache_key, cached
from q38.ple.aio import AioQueue
from q38.ple.row_cache import RowCache
from q38.ple.table import read_info
from q38.residency.reader import aligned

if TYPE_CHECKING:
    import torch

    from q38.ple.reader import PleTable

_SOURCE = Path(__file__).with_name("fetch_rows.c")
_FLAGS = ("-O2", "-shared", "-fPIC", "-pthread")
_SLOTS, _DEPTH, _ROOM = 2**17, 256, 8192  # rows kept of decode steps; the others as in fetch_rows.c


class _Cache(ctypes.Structure):
    _fields_ = [("ids", c_void_p), ("rows", c_void_p), ("shift", c_uint64)]


class _Table(ctypes.Structure):
    _fields_ = [
        ("file", c_int64), ("rows", c_int64), ("width", c_int64), ("pages", c_void_p), ("context", c_uint64),
        ("decode", _Cache), ("prompt", _Cache),
        ("asked", c_int64), ("hits", c_int64), ("nanoseconds", c_int64), ("error", c_int64), ("row", c_int64),
    ]  # fmt: skip


class _Request(ctypes.Structure):
    _fields_ = [("table", c_void_p), ("ids", c_void_p), ("out", c_void_p), ("count", c_int64)]


class RowRequest:
    """Where a step leaves its ids and finds its rows; must live as long as a graph that holds its address.

    Args:
        ids: int64 [n] in host memory, contiguous. out: uint8 [n, row_bytes], the same.
    """

    def __init__(self, fetcher: RowFetcher, ids: torch.Tensor, out: torch.Tensor) -> None:
        assert ids.element_size() == 8 and out.nbytes == len(ids) * fetcher.table.row_bytes
        self._kept = fetcher, ids, out
        self._struct = _Request(fetcher.address, ids.data_ptr(), out.data_ptr(), len(ids))
        self.address = ctypes.addressof(self._struct)


class RowFetcher:
    """The rows of one table for one stream of steps.

    Args:
        prompt: rows that prompts brought; looked into, and locked against its writer from now on.
        direct: read past the page cache where the disk can.

    Attributes:
        function: address of `void (*)(void *request)`. It never fails: `check` says whether it did.

    Raises:
        InputError: rows of this table are not one piece of one file.
        ResourceError: there is no C compiler.
    """

    def __init__(self, table: PleTable, prompt: RowCache, *, direct: bool = True) -> None:
        file = table.file
        if file is None or table.scaled_by_row:
            raise InputError(
                _SCALED if file else "the rows are spread over several files",
                where=table.origin,
                remedy="serve with --no-overlap",
            )
        library = _library()
        self.table, self.function = table, _address_of(library.q38_fetch_rows)
        self._call = library.q38_fetch_rows
        self._decode, self._prompt = RowCache(_SLOTS, table.row_bytes), prompt
        prompt.lock = _Lock(library)
        try:
            self._queue = AioQueue(file, depth=_DEPTH) if direct else None
        except OSError:  # no native AIO, or a file system without direct reads
            self._queue = None
        self._file = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        os.posix_fadvise(self._file, 0, 0, os.POSIX_FADV_RANDOM)
        self._pages = aligned(_DEPTH * _ROOM) if self._queue else None
        self._struct = _Table(
            self._queue.descriptor if self._queue else self._file,
            table.num_rows,
            table.row_bytes,
            self._pages.ctypes.data if self._pages is not None else None,
            self._queue.context if self._queue else 0,
            _cache(self._decode),
            _cache(prompt),
        )
        self.address = ctypes.addressof(self._struct)

    @property
    def direct(self) -> bool:
        """Whether reads go past the page cache."""
        return self._queue is not None

    def __call__(self, request: RowRequest) -> None:
        """Fetch here and now; `check` says whether that worked."""
        self._call(c_void_p(request.address))

    def check(self) -> None:
        """Raise what a step met since the start.

        Raises:
            InputError: the rows of that step, and of all later ones, are wrong.
        """
        if code := self._struct.error:
            reason = "the file ends before it" if code == errno.ENODATA else os.strerror(code)
            raise InputError(
                f"row {self._struct.row} cannot be read: {reason}",
                where=self.table.file or self.table.origin,
                remedy="look at the disk, or make the table again",
            )

    def counts(self) -> dict[str, Any]:
        """rows, hits, wait_s since the start; see row_source.RowCounts."""
        found = self._struct
        return {"rows": found.asked, "hits": found.hits, "wait_s": found.nanoseconds / 1e9}

    def close(self) -> None:
        """Close the files; no step may follow."""
        if self._queue is not None:
            self._queue.close()
        os.close(self._file)


_SCALED = "the table has one scale per row"


def obstacle(directory: Path) -> str | None:
    """Why rows of the split table in `directory` cannot be fetched inside a step here; None where they can."""
    if read_info(directory).row_scales:
        return _SCALED
    return None if _compiler() else "there is no C compiler"


class _Lock:
    """The lock of the prompt rows, which C takes too."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    def __enter__(self) -> None:
        self._library.q38_lock_prompt_rows()

    def __exit__(self, *_error: object) -> None:
        self._library.q38_unlock_prompt_rows()


def _cache(cache: RowCache) -> _Cache:
    return _Cache(*cache.addresses)


def _address_of(function: Any) -> int:
    return ctypes.cast(function, c_void_p).value or 0


def _compiler() -> str | None:
    return next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)


@functools.cache
def _library() -> ctypes.CDLL:
    compiler = _compiler()
    if compiler is None:
        raise ResourceError(
            "there is no C compiler", where="n-gram rows", remedy="install gcc, or serve with --no-overlap"
        )
    source = _SOURCE.read_bytes()
    key = cache_key((source, " ".join((compiler, *_FLAGS)).encode()))
    code = cached(settings.load().cache_dir, key, functools.partial(_compile, compiler), suffix=".so")
    # Loaded from memory, so that what was checked is what runs.
    file = os.memfd_create("q38_fetch_rows")
    with os.fdopen(file, "wb") as out:
        out.write(code)
        out.flush()
        return ctypes.CDLL(f"/proc/self/fd/{file}")


def _compile(compiler: str) -> bytes:
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory) / "fetch_rows.so"
        done = subprocess.run(
            [compiler, *_FLAGS, "-o", out, _SOURCE], capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise ResourceError(
                f"{compiler} does not compile {_SOURCE.name}: {done.stderr.strip()[-300:]}",
                where="n-gram rows",
                remedy="repair the C compiler, or serve with --no-overlap",
            )
        return out.read_bytes()
