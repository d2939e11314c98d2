"""Rows of a data set file on the Hugging Face hub. Nothing is downloaded unless a source of text names it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from q38.base.errors import InputError, ResourceError

ROWS = 2000  # a file may hold a whole encyclopedia: its first rows are enough to tune and to measure on
_SOURCE = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)@(?P<revision>[\w.-]+)/(?P<file>.+\.(?:jsonl|json|parquet))")
_FORM = "write hub:OWNER/NAME@REVISION/FILE.parquet (or .jsonl)"


def hub_rows(source: str, *, endpoint: str | None = None) -> list[Any]:
    """The first rows of one file; what they must hold is the caller's business.

    Args:
        source: OWNER/NAME@REVISION/FILE. REVISION is a commit, so that the same text comes every time.
        endpoint: address of another hub; default the one huggingface_hub is set to.

    Raises:
        InputError: another form, no such file, no network, or a file that cannot be parsed.
        ResourceError: pyarrow is not installed, and the file is parquet.
    """
    match = _SOURCE.fullmatch(source)
    if match is None:
        raise InputError("names no file of a revision", where=f"hub:{source}", remedy=_FORM)
    path = _download(match["repo"], match["revision"], match["file"], endpoint)
    rows = _parquet(path) if path.suffix == ".parquet" else _lines(path)
    try:
        return list(islice(rows, ROWS))
    except (ValueError, OSError) as error:
        raise InputError(
            f"cannot be parsed ({' '.join(str(error).split())[:200]})",
            where=f"hub:{source}",
            remedy="give another file",
        ) from None


def _download(repo: str, revision: str, file: str, endpoint: str | None) -> Path:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
    from huggingface_hub.utils.tqdm import disable_progress_bars

    disable_progress_bars()
    try:
        return Path(hf_hub_download(repo, file, repo_type="dataset", revision=revision, endpoint=endpoint))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise InputError(
            f"cannot be had ({' '.join(str(error).split())[:200]})",
            where=f"hub:{repo}@{revision}/{file}",
            remedy="check name, revision and network, or give a local JSONL file",
        ) from None


def _lines(path: Path) -> Iterator[Any]:
    with path.open(encoding="utf-8") as f:
        yield from (json.loads(line) for line in f if line.strip())


def _parquet(path: Path) -> Iterator[Any]:
    try:
        from pyarrow import parquet
    except ImportError:
        raise ResourceError(
            "pyarrow is not installed, and the file is parquet",
            where=path.name,
            remedy="pip install 'q38[quant]'",
        ) from None
    for batch in parquet.ParquetFile(path).iter_batches(batch_size=256):
        yield from batch.to_pylist()
