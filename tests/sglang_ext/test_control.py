"""Rows change between steps, on request: the gate, the socket, and what it refuses."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from q38.base.errors import ResourceError
from q38.checkpoint.index import Checkpoint
from q38.residency import profile
from q38.sglang_ext import control
from q38.sglang_ext.control import ControlServer, ask, handle
from q38.sglang_ext.gate import Gate
from q38.sglang_ext.options import ExtensionOptions
from q38.sglang_ext.residency import ExpertRows


@pytest.fixture
def rows(tiny_packed: Path) -> Iterator[ExpertRows]:
    options = ExtensionOptions(str(tiny_packed), device_rows=32, fewest_device_rows=16, spare=4)
    opened = ExpertRows(Checkpoint.open(tiny_packed), options, torch.device("cpu"))
    yield opened
    opened.cache.close()


@pytest.fixture
def socket(rows: ExpertRows, tmp_path: Path) -> Iterator[Path]:
    server = ControlServer(rows, tmp_path / "control.sock")
    yield tmp_path / "control.sock"
    server.close()


def test_the_socket_is_for_this_user_only(socket: Path) -> None:
    assert socket.stat().st_mode & 0o777 == 0o600


def test_rows_grow_and_shrink_on_request(socket: Path) -> None:
    assert ask(socket, {"action": "status"})["status"]["rows_on_device"] == 32
    assert ask(socket, {"action": "shrink", "rows": 10})["status"]["rows_on_device"] == 22
    assert ask(socket, {"action": "grow", "rows": 5})["status"]["rows_on_device"] == 27
    freed = ask(socket, {"action": "free", "bytes": 1})
    assert freed["result"] >= 0


def test_another_profile_changes_which_rows_not_how_many(
    socket: Path, rows: ExpertRows, tmp_path: Path
) -> None:
    count = np.arange(64).reshape(4, 16)
    file = tmp_path / "p.safetensors"
    profile.save(profile.Profile(count, count / 1.0, 2016, {}), file)
    answer = ask(socket, {"action": "place", "profile": str(file)})
    assert answer["status"]["rows_on_device"] == 32
    assert np.flatnonzero(rows.cache.resident).tolist() == list(range(32, 64))


def test_the_routing_so_far_is_told(socket: Path, rows: ExpertRows) -> None:
    rows.traffic.add("decode", 1, torch.tensor([[3, 5], [3, 0]], dtype=torch.int32))
    told = ask(socket, {"action": "routing"})["result"]
    assert np.argwhere(told["selections"]).tolist() == [[1, 0], [1, 3], [1, 5]]
    assert told["selections"][1][3] == 2


@pytest.mark.parametrize(
    ("request_", "said", "code"),
    [
        ({"action": "explode"}, "known: status, routing, grow", 2),
        ({}, "unknown action", 2),
        ({"action": "grow"}, "needs rows", 2),
        ({"action": "grow", "rows": -1}, "needs rows", 2),
        ({"action": "grow", "rows": True}, "needs rows", 2),
        ({"action": "grow", "rows": "8"}, "needs rows", 2),
        ({"action": "grow", "rows": 1000}, "on the host", 3),
        ({"action": "shrink", "rows": 30}, "short", 3),
        ({"action": []}, "unknown action", 2),
        ({"action": {}}, "unknown action", 2),
        ({"action": "place", "profile": "/no/such/file"}, "no such file", 2),
        ({"action": "place", "profile": "/"}, "no such file", 2),
        ({"action": "place", "profile": "/dev/stdin"}, "no such file", 2),
        ({"action": "place", "profile": "a\0b"}, "no such file", 2),
    ],
)
def test_a_refusal_is_an_answer_and_changes_nothing(
    rows: ExpertRows, request_: dict[str, Any], said: str, code: int
) -> None:
    before = rows.status()
    answer = handle(rows, json.dumps(request_).encode())
    assert said in f"{answer['error']['what']} {answer['error']['remedy']}"
    assert answer["error"]["exit_code"] == code
    assert rows.status() == before


@pytest.mark.parametrize("line", [b"", b"\n", b"[]\n", b"{\n", b"\xff\xfe\n"])
def test_garbage_is_answered(rows: ExpertRows, line: bytes) -> None:
    assert handle(rows, line)["error"]["exit_code"] == 2


def test_whatever_fails_is_answered_and_the_next_request_too(
    socket: Path, rows: ExpertRows, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as broken:
        broken.setattr(rows.traffic, "collect", lambda: 1 / 0)
        answer = ask(socket, {"action": "routing"})["error"]
        assert (answer["exit_code"], "ZeroDivisionError" in answer["what"]) == (1, True)
    assert ask(socket, {"action": "status"})["status"]["rows_on_device"] == 32


def test_a_client_that_sends_nothing_keeps_nobody_waiting(
    socket: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import socket as sockets

    monkeypatch.setattr(control, "_PATIENCE_S", 0.05)
    with sockets.socket(sockets.AF_UNIX) as silent:
        silent.connect(str(socket))
        assert ask(socket, {"action": "status"}, timeout_s=10)["status"]["rows_on_device"] == 32


def test_nobody_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(ResourceError, match="does not answer"):
        ask(tmp_path / "none.sock", {"action": "status"})


def test_a_client_that_leaves_does_not_end_the_server(socket: Path) -> None:
    import socket as sockets

    with sockets.socket(sockets.AF_UNIX) as s:
        s.connect(str(socket))
    assert ask(socket, {"action": "status"})["status"]["rows_on_device"] == 32


def test_a_move_waits_for_the_step_and_goes_before_the_next() -> None:
    gate, order = Gate(), []

    def move() -> None:
        with gate.move():
            order.append("move")

    with gate.step():
        thread = threading.Thread(target=move)
        thread.start()
        time.sleep(0.05)
        order.append("step")
    with gate.step():  # would be first if the waiting move could be starved
        order.append("next")
    thread.join()
    assert order == ["step", "move", "next"]


def test_steps_and_moves_never_overlap() -> None:
    gate, inside, seen = Gate(), [], []

    def work(kind: str) -> None:
        for _ in range(200):
            with gate.step() if kind == "step" else gate.move():
                inside.append(kind)
                time.sleep(1e-5)  # another thread's turn
                seen.append(tuple(inside))
                inside.remove(kind)

    threads = [threading.Thread(target=work, args=(kind,)) for kind in ("step", "move", "move")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert len(seen) == 600
    assert all(len(entry) == 1 for entry in seen)


def test_a_failed_step_or_move_opens_the_gate_again() -> None:
    gate = Gate()
    for enter in (gate.step, gate.move):
        with pytest.raises(RuntimeError), enter():
            raise RuntimeError
    with gate.step(), pytest.raises(RuntimeError):
        raise RuntimeError
    with gate.move():
        pass
