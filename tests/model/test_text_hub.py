"""Rows from a data set on a hub: a local server that speaks its protocol."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest

from q38.base.errors import InputError
from q38.model import text_hub
from q38.model.text import load_texts
from q38.model.text_hub import hub_rows

COMMIT = "1" * 40
ROWS = [{"text": f"Zeile {i}", "id": i} for i in range(16)]


class Handler(BaseHTTPRequestHandler):
    files: ClassVar[dict[str, bytes]] = {}

    def log_message(self, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.answer(body=False)

    def do_GET(self) -> None:
        self.answer(body=True)

    def answer(self, *, body: bool) -> None:
        match = re.fullmatch(rf"/datasets/owner/texts/resolve/{COMMIT}/(.+)", self.path)
        content = self.files.get(match[1]) if match else None
        self.send_response(404 if content is None else 200)
        headers = {"Content-Length": str(len(content or b"")), "X-Repo-Commit": COMMIT, "ETag": '"e1"'}
        if content is None:
            headers["X-Error-Code"] = "EntryNotFound" if match else "RepoNotFound"
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if body:
            self.wfile.write(content or b"")


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    import pyarrow
    from pyarrow import parquet

    table = tmp_path / "rows.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(ROWS), table)
    Handler.files = {
        "de/rows.parquet": table.read_bytes(),
        "de/rows.jsonl": "".join(json.dumps(row) + "\n" for row in ROWS).encode(),
        "broken.parquet": b"PAR1 not",
    }
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(
        constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}"
    )
    yield url
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("file", ["de/rows.parquet", "de/rows.jsonl"])
def test_the_rows_of_a_named_revision_are_read(hub: str, file: str) -> None:
    assert hub_rows(f"owner/texts@{COMMIT}/{file}", endpoint=hub) == ROWS


def test_a_hub_file_is_a_source_of_text_with_its_own_held_out_part(
    hub: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = f"de=hub:owner/texts@{COMMIT}/de/rows.parquet"
    held_out, rest = load_texts(source, "held_out"), load_texts(source, "calibration")
    assert len(held_out.texts) == 2 and len(rest.texts) == 14
    assert set(rest.languages) == {"de"}
    assert COMMIT in rest.origin


def test_only_the_first_rows_of_a_large_file_are_taken(hub: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_hub, "ROWS", 5)
    assert hub_rows(f"owner/texts@{COMMIT}/de/rows.jsonl", endpoint=hub) == ROWS[:5]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("owner/texts", "names no file of a revision"),
        ("owner/texts@main", "names no file of a revision"),
        (f"owner/texts@{COMMIT}/absent.jsonl", "cannot be had"),
        (f"owner/other@{COMMIT}/rows.jsonl", "cannot be had"),
        (f"owner/texts@{COMMIT}/broken.parquet", "cannot be parsed"),
    ],
)
def test_what_cannot_be_read_is_one_line(hub: str, source: str, message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        hub_rows(source, endpoint=hub)
    assert "\n" not in str(caught.value)
