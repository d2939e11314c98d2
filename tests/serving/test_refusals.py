"""Refusals that a fault of the machine or of another program must provoke."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import threading
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from q38.base.errors import InputError, Q38Error, ResourceError
from q38.serving import preflight, records, sglang_extension
from q38.serving.client import Client, ServerError
from q38.serving.engines import ServeOptions
from q38.serving.preflight import check_model, claim_port
from q38.serving.records import Record
from tests.serving.fake_server import fake_server


def test_a_process_that_no_signal_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    me = psutil.Process()
    record = Record(7, me.pid, me.create_time(), "ready", "http://127.0.0.1:7", "sglang", "m", "", "")
    monkeypatch.setattr(records, "read_record", lambda port, **_: record)
    monkeypatch.setattr(records, "wait_for_exit", lambda pid, seconds: False)
    sent: list[Any] = []
    monkeypatch.setattr(os, "kill", lambda *call: sent.append(call))
    monkeypatch.setattr(records, "kill_group", sent.append)
    with pytest.raises(Q38Error, match=f"process {me.pid} does not end"):
        records.stop(7)
    assert sent == [(me.pid, 15), me.pid]


def test_an_sglang_that_does_not_load_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    def late(*_arguments: Any, **_options: Any) -> None:
        raise subprocess.TimeoutExpired("python", 300)

    monkeypatch.setattr(sglang_extension.patch_tree, "find_tree", lambda tree: Path())
    monkeypatch.setattr(sglang_extension.subprocess, "run", late)
    with pytest.raises(ResourceError, match="SGLang did not load in 300 s"):
        sglang_extension.verify()


def test_a_server_that_accepts_no_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    with Client("http://127.0.0.1:9") as client:

        def late(*_arguments: Any, **_options: Any) -> None:
            raise httpx.ConnectTimeout("late")

        monkeypatch.setattr(client._http, "get", late)
        with pytest.raises(ResourceError, match="no server answers within 10 s"):
            client.models()


@pytest.mark.parametrize(
    ("code", "told", "kind"),
    [
        (errno.EACCES, "port 80 needs root", InputError),
        (errno.EADDRNOTAVAIL, r"cannot listen on 10\.9\.8\.7", InputError),
        (errno.EADDRINUSE, "port 80 is in use", ResourceError),
    ],
)
def test_a_port_or_address_that_cannot_be_had(
    monkeypatch: pytest.MonkeyPatch, code: int, told: str, kind: type[Q38Error]
) -> None:
    def refuse(host: str, port: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(preflight, "open_socket", refuse)
    with pytest.raises(kind, match=told):
        claim_port("10.9.8.7", 80)


def test_a_connection_that_breaks_before_the_answer() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=lambda: listening.accept()[0].close())
        thread.start()
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        with Client(url) as client, pytest.raises(ServerError, match="the connection broke"):
            client.models()
        thread.join()


def test_an_address_that_is_none() -> None:
    with pytest.raises(InputError, match=r"Invalid port: 'port'.*http://HOST:PORT"):
        Client("http://127.0.0.1:port")


def test_a_stream_that_is_no_text() -> None:
    with fake_server() as fake, Client(fake.url) as client:
        fake.script = lambda body: [b"data: \xff\xfe\n\n".decode("latin-1")]
        fake.encoding = "latin-1"
        with pytest.raises(ServerError, match="bytes that are not UTF-8: ff fe"):
            list(client.events("/v1/chat/completions", {}))


def test_one_of_several_servers_must_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [Record(port, 1, 0.0, "ready", "", "sglang", "m", "", "") for port in (7, 8)]
    monkeypatch.setattr(records, "running", lambda: found)
    with pytest.raises(InputError, match=r"2 servers run \(ports 7, 8\)"):
        records.stop()


@pytest.mark.parametrize("port", [-1, 65536])
def test_a_number_that_is_no_port(port: int) -> None:
    with pytest.raises(InputError, match=f"{port} is not a port"):
        claim_port("127.0.0.1", port)


@pytest.mark.parametrize(
    ("lost", "told"),
    [
        ("tokenizer.json", "no such file"),
        ("tokenizer_config.json", "no such file"),
        ("chat_template.jinja", "has no chat template"),
    ],
)
def test_a_model_without_a_tokenizer_or_a_template(
    tiny_source: Path, tmp_path: Path, lost: str, told: str
) -> None:
    for file in tiny_source.iterdir():
        if file.name != lost:
            (tmp_path / file.name).symlink_to(file)
    with pytest.raises(InputError, match=told):
        check_model(ServeOptions(tmp_path))
