"""Profiles of recorded files and of a server's answers, over real HTTP in SGLang's format."""

from __future__ import annotations

import base64
import json
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from q38.base.errors import InputError, Q38Error, ResourceError
from q38.cli.app import main
from q38.measure.placement_sources import COUNTS, count_server, import_placement, model_sizes, record_server
from q38.residency.imported import Sizes
from q38.residency.profile import load, load_halves
from q38.residency.trace import Trace, read_trace, write_trace
from q38.serving.client import ServerError

TOKENS, SEQLEN = 520, 66  # 8 requests of 65 recorded steps
Answer = Callable[[dict[str, Any]], tuple[int, Any]]


@pytest.fixture
def sizes(packed: Path) -> Sizes:
    return model_sizes(packed)


def random_ids(sizes: Sizes, tokens: int, seed: int) -> Any:
    noise = np.random.default_rng(seed).random((tokens, sizes.layers, sizes.experts))
    return noise.argsort(-1)[..., : sizes.top_k].astype(np.int32)


@contextmanager
def completions(
    answer: Answer, pages: dict[str, tuple[int, Any]] | None = None
) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """A server with SGLang's completions endpoint: its address, and the requests it got."""
    requests: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *args: object) -> None: ...

        def do_GET(self) -> None:
            models = {"/v1/models": (200, {"data": [{"id": "served"}]})}
            self._send(*{**models, **(pages or {})}.get(self.path, (404, {"detail": "Not Found"})))

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            requests.append({**body, "path": self.path})
            self._send(*answer(body))

        def _send(self, status: int, document: Any) -> None:
            data = document.encode() if isinstance(document, str) else json.dumps(document).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", requests
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def routed(sizes: Sizes) -> Answer:
    """As SGLang answers: int32 [start .. sequence - 1, layers, top k] in base64."""

    def answer(body: dict[str, Any]) -> tuple[int, Any]:
        length = len(body["prompt"]) + body["max_tokens"]
        ids = random_ids(sizes, length - 1 - body["routed_experts_start_len"], sum(body["prompt"]))
        return 200, {
            "choices": [{"text": "x"}],
            "sglext": {"routed_experts": base64.b64encode(ids.tobytes()).decode()},
        }

    return answer


def test_a_server_is_recorded_choice_by_choice(packed: Path, sizes: Sizes, tmp_path: Path) -> None:
    out, trace = tmp_path / "p.safetensors", tmp_path / "t.safetensors"
    with completions(routed(sizes)) as (url, requests):
        report = record_server(packed, out, url, tokens=TOKENS, seqlen=SEQLEN, trace=trace)
        again = record_server(packed, out, url, tokens=TOKENS, seqlen=SEQLEN, trace=trace)
    assert again["up_to_date"] and not report["up_to_date"] and len(requests) == 8
    assert all(r["path"] == "/v1/completions" and r["return_routed_experts"] for r in requests)
    assert all(
        len(r["prompt"]) == r["max_tokens"] == r["routed_experts_start_len"] == SEQLEN for r in requests
    )
    expected = np.concatenate([random_ids(sizes, SEQLEN - 1, sum(r["prompt"])) for r in requests])
    assert np.array_equal(read_trace(trace).ids, expected)
    profile = load(out)
    assert profile.tokens == report["tokens"] == TOKENS
    assert (profile.count.sum(1) == TOKENS * sizes.top_k).all()
    assert profile.metadata["served"] == "served" and report["coverage"][0]["equal"] is not None


@pytest.mark.parametrize(
    ("answer", "kind", "message"),
    [
        ((200, {"choices": [{"text": "x"}]}), InputError, "--enable-return-routed-experts"),
        ((200, {"choices": [], "sglext": {"routed_experts": "%%%"}}), ServerError, "base64"),
        ((200, {"sglext": {"routed_experts": base64.b64encode(b"\1\0\0\0" * 3).decode()}}), InputError, "do not fit"),
        ((200, {"sglext": {"routed_experts": base64.b64encode(b"\377\177\0\0" * 64).decode()}}), InputError, "do not fit"),
        ((400, {"message": "no such field"}), ServerError, "400.*no such field"),
        ((200, "<html>"), ServerError, "no JSON"),
    ],
)  # fmt: skip
def test_an_answer_without_routing_is_refused_and_nothing_is_written(
    packed: Path, tmp_path: Path, answer: tuple[int, Any], kind: type[Q38Error], message: str
) -> None:
    with completions(lambda body: answer) as (url, _), pytest.raises(kind, match=message):
        record_server(packed, tmp_path / "p", url, tokens=TOKENS, seqlen=SEQLEN)
    assert list(tmp_path.iterdir()) == []


def test_a_server_that_is_not_there_is_a_missing_resource(packed: Path, tmp_path: Path) -> None:
    with pytest.raises(ResourceError):
        record_server(packed, tmp_path / "p", "http://127.0.0.1:9", tokens=TOKENS, seqlen=SEQLEN)


def counted(sizes: Sizes, tokens: int) -> Any:
    """[L, E]: what a server has counted over so many tokens."""
    ids = random_ids(sizes, tokens, 5)
    return np.stack(
        [np.bincount(ids[:, layer].ravel(), minlength=sizes.experts) for layer in range(sizes.layers)]
    )


def test_a_server_that_counts_by_itself_is_recorded_in_two_halves(
    packed: Path, sizes: Sizes, tmp_path: Path
) -> None:
    """It is asked as often as another one, and need not return the experts of a token."""
    seen: list[Any] = []

    def answer(body: dict[str, Any]) -> tuple[int, Any]:
        seen.append(random_ids(sizes, len(body["prompt"]) + body["max_tokens"] - 1, len(seen)))
        ids = np.concatenate(seen)
        total = [
            np.bincount(ids[:, n].ravel(), minlength=sizes.experts).tolist() for n in range(sizes.layers)
        ]
        pages[COUNTS] = 200, {"result": {"selections": total}}
        return 200, {"choices": [{"text": "x"}]}

    out = tmp_path / "p.safetensors"
    pages = {COUNTS: (200, {"result": {"selections": np.zeros((sizes.layers, sizes.experts), int).tolist()}})}
    with completions(answer, pages) as (url, requests):
        assert (
            record_server(packed, out, url, tokens=TOKENS + 1, seqlen=SEQLEN, dry_run=True)["tokens"]
            == 10 * 65
        )
        report = record_server(packed, out, url, tokens=TOKENS + 1, seqlen=SEQLEN)
        assert record_server(packed, out, url, tokens=TOKENS + 1, seqlen=SEQLEN)["up_to_date"]
    assert len(requests) == 10 and not any("return_routed_experts" in body for body in requests)
    assert report["tokens"] == 10 * (2 * SEQLEN - 1) and report["coverage"][0]["equal"] is not None
    halves = load_halves(out)
    assert halves is not None
    for half, part in zip(halves, (seen[:5], seen[5:]), strict=True):
        ids = np.concatenate(part)
        for layer in range(sizes.layers):
            assert np.array_equal(
                half.count[layer], np.bincount(ids[:, layer].ravel(), minlength=sizes.experts)
            )
    assert np.array_equal(load(out).count, halves[0].count + halves[1].count)


def test_the_counts_of_a_running_server_make_a_profile(packed: Path, sizes: Sizes, tmp_path: Path) -> None:
    out, count = tmp_path / "p.safetensors", counted(sizes, 600)
    document = {"result": {"selections": count.tolist(), "tokens": 600}, "status": {}}
    with completions(routed(sizes), {COUNTS: (200, document)}) as (url, requests):
        assert count_server(packed, out, url, dry_run=True)["tokens"] == 600 and not out.exists()
        report = count_server(packed, out, url)
        assert count_server(packed, out, url)["up_to_date"]
    assert requests == [] and report["tokens"] == 600
    profile = load(out)
    assert np.array_equal(profile.count, count) and np.array_equal(profile.mass * sizes.top_k, count)
    more = {"result": {"selections": (count * 2).tolist()}}
    with completions(routed(sizes), {COUNTS: (200, more)}) as (url, _):
        with pytest.raises(InputError, match="another counted"):
            count_server(packed, out, url)
        assert count_server(packed, out, url, fresh=True)["tokens"] == 1200


@pytest.mark.parametrize(
    ("answer", "kind", "message"),
    [
        ((404, {}), InputError, "does not count its experts"),
        ((200, {"result": None}), ServerError, "no counts"),
        ((200, {"result": {"selections": "x"}}), ServerError, "no counts"),
        ((200, {"result": {"selections": [[1, 2]]}}), InputError, r"counts of \(1, 2\)"),
        ((503, {"error": "x"}), ServerError, "503"),
    ],
)
def test_counts_that_are_none_are_refused(
    packed: Path, sizes: Sizes, tmp_path: Path, answer: tuple[int, Any], kind: type[Q38Error], message: str
) -> None:
    with completions(routed(sizes), {COUNTS: answer}) as (url, _), pytest.raises(kind, match=message):
        count_server(packed, tmp_path / "p", url)
    assert list(tmp_path.iterdir()) == []


def test_a_server_that_has_served_too_little_makes_no_profile(
    packed: Path, sizes: Sizes, tmp_path: Path
) -> None:
    document = {"result": {"selections": counted(sizes, 100).tolist()}}
    with (
        completions(routed(sizes), {COUNTS: (200, document)}) as (url, _),
        pytest.raises(InputError, match="100 tokens"),
    ):
        count_server(packed, tmp_path / "p", url)


def test_files_make_the_profile_of_their_tokens(packed: Path, sizes: Sizes, tmp_path: Path) -> None:
    trace = Trace(random_ids(sizes, 600, 1).astype(np.int64), None, sizes.experts)
    write_trace(tmp_path / "t.safetensors", trace)
    report = import_placement(
        packed, tmp_path / "p", [tmp_path / "t.safetensors"], sizes=[sizes.experts // 2]
    )
    assert np.array_equal(load(tmp_path / "p").count, trace.counts())
    (row,) = report["coverage"]
    misses = (1 - row["equal"]["selections"]) * sizes.layers * sizes.top_k  # rows per token
    text = json.loads((packed / "config.json").read_text())["text_config"]
    weights = 3 * text["hidden_size"] * text["moe_intermediate_size"]
    assert row["host_bytes"] == pytest.approx(misses * (weights / 4 + weights / 32 * 2), rel=0.3)


def test_an_old_profile_reports_what_it_covers_itself(packed: Path, sizes: Sizes, tmp_path: Path) -> None:
    counts = torch.zeros(sizes.layers, sizes.experts, dtype=torch.int64)
    counts[:, : sizes.top_k] = 600
    torch.save({"count": counts, "mass": counts.float()}, tmp_path / "old.pt")
    report = import_placement(packed, tmp_path / "p", [tmp_path / "old.pt"], sizes=[sizes.top_k])
    (row,) = report["coverage"]
    assert row["built"]["selections"] == 1 and row["equal"] is None and row["host_bytes"] == 0
    assert report["unseen"] == sizes.layers * (sizes.experts - sizes.top_k)


class TestCommand:
    def run(self, monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
        monkeypatch.setattr(sys, "argv", ["q38", "build-placement", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        code = ended.value.code
        return code if isinstance(code, int) else 0

    def test_files_and_servers_from_the_command_line(
        self, packed: Path, sizes: Sizes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
    ) -> None:
        for i in (1, 2):
            ids = random_ids(sizes, 600, i).astype(np.int64)
            write_trace(tmp_path / f"{i}.safetensors", Trace(ids, None, sizes.experts))
        files = (
            "--from",
            tmp_path / "1.safetensors",
            "--from",
            tmp_path / "2.safetensors",
            "--weights",
            "3,1",
        )
        assert self.run(monkeypatch, packed, "-o", tmp_path / "p", *files, "--dry-run") == 0
        assert not (tmp_path / "p").exists() and "1,200 tokens" in capfd.readouterr().out
        assert self.run(monkeypatch, packed, "-o", tmp_path / "p", *files) == 0
        assert "host/token" in capfd.readouterr().out
        with completions(routed(sizes)) as (url, _):
            options = ("--server", url, "--tokens", TOKENS, "--seqlen", SEQLEN)
            assert self.run(monkeypatch, packed, "-o", tmp_path / "q", *options, "--dry-run") == 0
            assert not (tmp_path / "q").exists()
            assert self.run(monkeypatch, packed, "-o", tmp_path / "q", *options) == 0
        assert load(tmp_path / "q").tokens == TOKENS

    def test_what_a_server_counted_from_the_command_line(
        self, packed: Path, sizes: Sizes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        document = {"result": {"selections": counted(sizes, 600).tolist()}}
        with completions(routed(sizes), {COUNTS: (200, document)}) as (url, requests):
            assert self.run(monkeypatch, packed, "-o", tmp_path / "p", "--server", url, "--counted") == 0
        assert load(tmp_path / "p").tokens == 600 and requests == []

    @pytest.mark.parametrize(
        "options",
        [
            ("--from", "a", "--server", "http://b"),
            ("--weights", "1"),
            ("--from", "a", "--trace", "t"),
            ("--counted",),
            ("--server", "http://b", "--counted", "--trace", "t"),
        ],
    )
    def test_sources_exclude_each_other(
        self, packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...]
    ) -> None:
        assert self.run(monkeypatch, packed, "-o", tmp_path / "p", *options) == 2
