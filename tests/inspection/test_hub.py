"""The hub is a local server that speaks its protocol: model info, HEAD and ranged GET of files."""

import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from q38.base.errors import InputError
from q38.inspection.hub import is_hub_id
from q38.inspection.report import inspect

COMMIT = "0" * 40


class Hub(ThreadingHTTPServer):
    """Serves one directory as the repository `owner/model`; counts the bytes of shards it sends."""

    def __init__(self, root: Path) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.root, self.shard_bytes = root, 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.answer(body=False)

    def do_GET(self) -> None:
        self.answer(body=True)

    def answer(self, *, body: bool) -> None:
        path = self.path.partition("?")[0]
        if path == "/api/models/owner/model" or path.startswith("/api/models/owner/model/revision"):
            files = [
                {"rfilename": f.name, "size": f.stat().st_size} for f in sorted(self.server.root.iterdir())
            ]
            self.send(200, json.dumps({"id": "owner/model", "sha": COMMIT, "siblings": files}).encode(), body)
        elif match := re.fullmatch(r"/owner/model/resolve/[^/]+/([^/]+)", path):
            self.send_file(self.server.root / match[1], body)
        else:
            self.send(404, b"{}", body, {"X-Error-Code": "RepoNotFound"})

    def send_file(self, file: Path, body: bool) -> None:
        if not file.exists():
            self.send(404, b"", body, {"X-Error-Code": "EntryNotFound"})
            return
        content, status, headers = file.read_bytes(), 200, {}
        if wanted := re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", "")):
            content, status = content[int(wanted[1]) : int(wanted[2]) + 1], 206
        if body and file.suffix == ".safetensors":
            self.server.shard_bytes += len(content)
        self.send(status, content, body, {"ETag": f'"{file.name}-{file.stat().st_size}"', **headers})

    def send(self, status: int, content: bytes, body: bool, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("X-Repo-Commit", COMMIT)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()
        if body:
            self.wfile.write(content)


@pytest.fixture
def hub(tiny_source, tmp_path, monkeypatch) -> Iterator[Hub]:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    with Hub(tiny_source) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_a_repository_is_inspected_like_the_directory_it_holds(hub, tiny_source):
    there, here = inspect("owner/model", endpoint=hub.url), inspect(tiny_source)
    assert there.layout == here.layout
    assert [g.to_dict() for g in there.groups] == [g.to_dict() for g in here.groups]
    assert there.parts == here.parts
    assert there.findings.kept == []


def test_no_weights_are_downloaded(hub, tiny_source):
    inspect("owner/model", endpoint=hub.url)
    shards = list(tiny_source.glob("*.safetensors"))
    assert hub.shard_bytes <= 100_001 * len(shards)  # the client asks for the first 100 kB of each
    assert hub.shard_bytes < sum(f.stat().st_size for f in shards) / 10


def test_values_are_not_read_from_the_hub(hub):
    findings = inspect("owner/model", deep=True, endpoint=hub.url).findings
    assert [f.code for f in findings.kept] == ["values-unread"]


def test_an_unknown_repository_is_refused(hub):
    with pytest.raises(InputError, match="no such repository"):
        inspect("owner/other", endpoint=hub.url)


def test_a_hub_that_does_not_answer_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(InputError, match="the hub cannot be read"):
        inspect("owner/model", endpoint="http://127.0.0.1:9")


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("Qwen/Model-1.5", True),
        ("model", False),
        ("/a/b", False),
        ("./a/b", False),
        ("a/b/c", False),
        ("a/..", False),
    ],
)
def test_what_counts_as_a_hub_id(source, expected):
    assert is_hub_id(source) is expected


def test_a_mistyped_path_below_a_directory_is_not_looked_up_on_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "work").mkdir()
    assert not is_hub_id("work/modle")
