"""Several servers behind one address: the real router, in front of scripted servers and of two real engines."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from importlib import util
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from q38.base.errors import InputError, ResourceError
from q38.serving import fleet, records
from q38.serving.child import wait_for_exit
from q38.serving.client import Client
from q38.serving.fleet import FleetOptions, plan_fleet
from q38.serving.launch import Server, running_server
from q38.serving.requirements import Need
from q38.serving.sglang_settings import SglangSettings
from tests.serving.fake_server import FakeServer, answer, fake_server

needs_router = pytest.mark.skipif(
    util.find_spec("sglang_router") is None, reason="no sglang-router: run scripts/test.sh, which installs it"
)


def scripted(name: str, model: str = "fake") -> Iterator[FakeServer]:
    with fake_server() as server:
        server.models = json.dumps({"data": [{"id": model, "owned_by": "tests", "max_model_len": 4096}]})
        told = json.dumps({"served_model_name": model, "model_path": model})
        server.pages = {"/model_info": lambda: told, "/server_info": lambda: told}
        server.script = lambda body: answer([name], body)
        yield server


@pytest.fixture
def first() -> Iterator[FakeServer]:
    yield from scripted("first")


@pytest.fixture
def second() -> Iterator[FakeServer]:
    yield from scripted("second")


Start = Callable[..., tuple["subprocess.Popen[str]", dict[str, Any]]]


@pytest.fixture
def start() -> Iterator[Start]:
    """`q38 serve fleet` as a shell starts it: the process, and what it printed when it was ready."""
    made: list[subprocess.Popen[str]] = []

    def run(*options: str, **variables: str) -> tuple[subprocess.Popen[str], dict[str, Any]]:
        command = [sys.executable, "-m", "q38", "serve", "fleet", "--port", "0", "--json", *options]
        pipe = subprocess.PIPE
        process = subprocess.Popen(
            command, stdout=pipe, stderr=pipe, text=True, env={**os.environ, **variables}
        )
        made.append(process)
        assert process.stdout is not None and process.stderr is not None
        line = process.stdout.readline()
        assert "url" in json.loads(line or "{}"), line + process.stderr.read()
        return process, json.loads(line)

    yield run
    for process in made:
        process.terminate()
        process.communicate(timeout=60)


def chat(url: str, text: str = "Hello", *, key: str = "none", model: str = "fake", tokens: int = 4) -> str:
    with Client(url, api_key=key) as client:
        return client.chat(text, model=model, max_tokens=tokens).text


@needs_router
def test_requests_go_to_every_server_and_stop_ends_the_router_alone(
    first: FakeServer, second: FakeServer, start: Start
) -> None:
    process, ready = start("--server", first.url, "--server", second.url, "--policy", "round_robin")
    assert {chat(ready["url"]) for _ in range(4)} == {"first", "second"}
    port = int(ready["url"].rsplit(":", 1)[1])
    record = records.read_record(port)
    assert record is not None and (record.engine, record.state, record.model) == (
        fleet.ROUTER,
        "ready",
        "fake",
    )
    assert os.getpgid(ready["pid"]) == ready["pid"] != os.getpgid(process.pid)
    records.stop(port)
    assert process.wait(30) == 0
    assert not psutil.pid_exists(ready["pid"]) and records.read_record(port, stale=True) is None
    assert chat(first.url) == "first"


@needs_router
def test_a_killed_command_leaves_no_router(first: FakeServer, start: Start) -> None:
    process, ready = start("--server", first.url)
    process.kill()
    assert wait_for_exit(ready["pid"], 15)


@needs_router
def test_a_killed_router_is_reported(first: FakeServer, start: Start) -> None:
    process, ready = start("--server", first.url)
    os.kill(ready["pid"], signal.SIGKILL)
    _, told = process.communicate(timeout=30)
    assert process.returncode == 3 and "SIGKILL" in told


@needs_router
def test_the_key_is_asked_for_and_stands_on_no_command_line(first: FakeServer, start: Start) -> None:
    _, ready = start("--server", first.url, Q38_API_KEY="sesame")
    body = {"model": "fake", "messages": [{"role": "user", "content": "x"}]}
    assert httpx.post(f"{ready['url']}/v1/chat/completions", json=body).status_code == 401
    assert chat(ready["url"], key="sesame") == "first"
    assert "Bearer sesame" in first.keys
    assert not any("sesame" in word for word in psutil.Process(ready["pid"]).cmdline())


@needs_router
def test_the_servers_of_this_machine_are_found(
    first: FakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("Q38_STATE_DIR", str(tmp_path))  # other tests have servers running
    me = psutil.Process()
    for port, state, engine, url in (
        (41, "ready", "sglang", first.url), (42, "starting", "sglang", "http://127.0.0.1:9"), (43, "ready", fleet.ROUTER, "http://127.0.0.1:9")
    ):  # fmt: skip
        records.write_record(
            records.Record(port, me.pid, me.create_time(), state, url, engine, "fake", "", "")
        )
    options, launch = plan_fleet(FleetOptions(port=0))
    assert launch.figures["servers"] == [first.url] and options.served_name == "fake"


def refusal(**options: Any) -> str:
    with pytest.raises((InputError, ResourceError)) as refused:
        plan_fleet(FleetOptions(port=0, **options))
    return f"{refused.value.exit_code} {refused.value}"


def test_what_cannot_work_is_refused(first: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "2 --policy: unknown policy 'best'. Known: cache_aware" in refusal(policy="best")
    assert "no API key is set" in refusal(host="0.0.0.0")
    absent = [Need("sglang-router", "==0.3.2", "fleet", None)]
    with monkeypatch.context() as patched:
        patched.setattr(fleet, "lacking", lambda extra: absent)
        told = refusal()
    assert (
        told.startswith("3 ")
        and "sglang-router is not installed" in told
        and 'pip install "q38[fleet]"' in told
    )
    monkeypatch.setattr(fleet, "lacking", lambda extra: [])
    monkeypatch.setattr(fleet, "running", lambda: [])
    assert refusal().startswith("3 ") and "q38 serve MODEL" in refusal()
    assert "no server answers" in refusal(servers=("http://127.0.0.1:9",))
    for other in scripted("other", model="another"):
        assert "serves another, and" in refusal(servers=(first.url, other.url))


@needs_router
@pytest.mark.slow
def test_two_engines_behind_the_router_answer_as_they_do_alone(
    tiny_packed: Path, tiny_ple: Path, start: Start
) -> None:
    if util.find_spec("sglang") is None or util.find_spec("zmq") is None:
        pytest.skip("no sglang: run scripts/test.sh, which installs SGLang")
    settings = SglangSettings(device="cpu", context=512)

    def serve(stack: ExitStack) -> Server:
        return stack.enter_context(
            running_server(
                tiny_packed, ple=tiny_ple, name="tiny", engine="sglang", api_key="sesame", sglang=settings
            )
        )

    with ExitStack() as one, ExitStack() as two, ThreadPoolExecutor(2) as pool:
        servers = list(pool.map(serve, (one, two)))
        options = [word for server in servers for word in ("--server", server.url)]
        _, ready = start(*options, "--policy", "round_robin", Q38_API_KEY="sesame")

        def ask(url: str) -> str:
            return chat(url, "Count to ten.", key="sesame", model="tiny", tokens=6)

        def served(server: Server) -> int:
            text = httpx.get(f"{server.url}/q38/routing", headers={"Authorization": "Bearer sesame"}).json()
            return int(text["result"]["tokens"])

        alone, before = ask(servers[0].url), [served(server) for server in servers]
        with ThreadPoolExecutor(4) as clients:
            answers = list(clients.map(ask, [ready["url"]] * 4))
        assert set(answers) == {alone}
        assert all(served(server) > count for server, count in zip(servers, before, strict=True))
