"""Servers start, are ready only when they answer, and leave nothing behind. Real processes throughout.

Where a test needs a fault, the engine's command is a few lines of Python in place of the real server.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from q38.base.errors import InputError, Q38Error, ResourceError
from q38.serving import engines, launch, records
from q38.serving.child import Child, wait_for_exit
from q38.serving.client import Client
from q38.serving.engines import Engine, Launch
from q38.serving.launch import running_server

WATCHED = "from q38.serving.watchdog import die_with_parent; die_with_parent()\n"
# Listens, and answers every chat request with one token; `{extra}` runs first.
ANSWERS = """
import json, sys
from http.server import BaseHTTPRequestHandler, HTTPServer
{extra}
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.reply(b'{{"data": [{{"id": "fake"}}]}}')
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        chunk = {{"choices": [{{"delta": {{"content": "x"}}, "finish_reason": "length"}}]}}
        self.reply(b"data: " + json.dumps(chunk).encode() + b"\\n\\n")
    def reply(self, body):
        self.send_response(200); self.end_headers(); self.wfile.write(body)
HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""

Start = Callable[..., Any]


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch, tiny_source: Path, tmp_path: Path) -> Start:
    """running_server with this Python code as the engine."""

    def run(code: str, *, settle: str | None = None, **options: Any) -> Any:
        def launch(o: engines.ServeOptions) -> Launch:
            return Launch([sys.executable, "-c", code, str(o.port)], plan=["plan: a line"], settle=settle)

        monkeypatch.setitem(engines.ENGINES, "fake", Engine("fake", "for tests", lambda: [], launch))
        return running_server(tiny_source, engine="fake", log=tmp_path / "server.log", **options)

    return run


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """Every test here ends without a server of its own and without a PID file."""
    before = {r.pid for r in records.running()}
    yield
    assert {r.pid for r in records.running()} == before


def fails(start: Start, code: str, **options: Any) -> Q38Error:
    with pytest.raises(Q38Error) as failed, start(code, **options):
        pass
    return failed.value


def test_a_server_is_ready_once_it_has_answered_and_gone_after_the_block(start: Start) -> None:
    with start(ANSWERS.format(extra="")) as server:
        assert records.read_record(int(server.url.rsplit(":", 1)[1])).state == "ready"  # type: ignore[union-attr]
        with Client(server.url) as client:
            assert client.chat("hi", model="fake").text == "x"
    assert not psutil.pid_exists(server.pid)
    with Client(server.url) as client:
        assert not client.healthy()


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        ("pass", None),
        ("self.send_error(503); return", "HTTP 503"),
        ("time.sleep(60)", "nothing came for 1 s"),
    ],
    ids=["done", "refused", "no answer"],
)
def test_the_request_after_the_first_token_is_sent_and_its_failure_is_only_logged(
    start: Start, monkeypatch: pytest.MonkeyPatch, answer: str, told: str | None
) -> None:
    monkeypatch.setattr(launch, "_SETTLE_S", 1.0)
    read = 'self.rfile.read(int(self.headers["Content-Length"]))'
    code = ANSWERS.format(extra="import time").replace(
        read,
        f"{read}\n        print('asked', self.path, flush=True)\n        if self.path == '/settle': {answer}",
    )
    with start(code, settle="/settle") as server:
        lines = server.log.read_text().splitlines()
    asked = [line.split()[1] for line in lines if line.startswith("asked")]
    assert asked == ["/v1/chat/completions", "/settle"]
    failed = [line for line in lines if line.startswith("q38 serve goes on without /settle")]
    assert [told in line for line in failed] == ([True] if told else [])


def test_the_block_may_fail_and_the_server_still_ends(start: Start) -> None:
    with pytest.raises(RuntimeError, match="mine"), start(ANSWERS.format(extra="")) as server:
        raise RuntimeError("mine")
    assert not psutil.pid_exists(server.pid)


@pytest.mark.parametrize(("code", "kind"), [(1, Q38Error), (2, InputError), (3, ResourceError)])
def test_a_child_that_refuses_is_quoted_with_its_exit_code(start: Start, code: int, kind: type) -> None:
    error = fails(start, f"import sys; print('noise'); print('q38: tensor x is missing.'); sys.exit({code})")
    assert type(error) is kind
    assert "tensor x is missing" in str(error)
    assert "noise" not in str(error)
    assert "server.log" in str(error)
    assert error.exit_code == code


def test_a_traceback_is_quoted_by_its_last_line(start: Start) -> None:
    error = fails(start, "raise ValueError('no such backend: warp')")
    assert "ValueError: no such backend: warp" in str(error)
    assert "exit code 1" in str(error)


def test_a_child_that_the_kernel_kills_is_a_missing_resource(start: Start) -> None:
    error = fails(
        start, "import os; print('error: of an earlier request', flush=True); os.kill(os.getpid(), 9)"
    )
    assert "SIGKILL" in str(error)
    assert "earlier request" not in str(error)
    assert "memory" in str(error)
    assert error.exit_code == 3


def test_a_server_that_listens_and_answers_garbage_is_not_ready(start: Start) -> None:
    garbage = ANSWERS.format(extra="").replace('b"data: "', 'b"data: {"')
    error = fails(start, garbage)
    assert "does not answer" in str(error)
    assert "not JSON" in str(error)


def test_a_server_that_never_listens_is_given_up(start: Start) -> None:
    error = fails(start, "import time; time.sleep(600)", start_timeout_s=1)
    assert "waited 1 s to listen" in str(error)


def test_a_server_that_listens_and_hangs_is_given_up(start: Start) -> None:
    hangs = ANSWERS.format(extra="").replace("chunk = {", "import time; time.sleep(600); chunk = {")
    error = fails(start, hangs, start_timeout_s=5)
    assert "for the first token" in str(error)


def test_a_server_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(600)"
    child = Child([sys.executable, "-c", code], log=tmp_path / "log")
    wait_until(lambda: "deaf" in child.log_text())
    child.stop(grace_s=0.2)
    assert child.returncode() == -signal.SIGKILL


def test_its_own_children_end_with_it(start: Start, tmp_path: Path) -> None:
    extra = (
        "import subprocess\n"
        "grandchild = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"open({str(tmp_path / 'pid')!r}, 'w').write(str(grandchild.pid))\n"
    )
    with start(ANSWERS.format(extra=extra)):
        pid = int((tmp_path / "pid").read_text())
        assert psutil.pid_exists(pid)
    assert wait_for_exit(pid, 10)


def test_stop_ends_the_server_of_a_port(start: Start) -> None:
    with start(ANSWERS.format(extra="")) as server:
        port = int(server.url.rsplit(":", 1)[1])
        assert records.stop(port).pid == server.pid
        assert (
            not psutil.pid_exists(server.pid) or psutil.Process(server.pid).status() == psutil.STATUS_ZOMBIE
        )
        with pytest.raises(ResourceError, match="no q38 server runs on port"):
            records.stop(port)


def test_stop_asks_which_when_several_run(start: Start, tmp_path: Path) -> None:
    with start(ANSWERS.format(extra="")) as first, start(ANSWERS.format(extra="")) as second:
        with pytest.raises(InputError) as refused:
            records.stop()
        for server in (first, second):
            assert server.url.rsplit(":", 1)[1] in str(refused.value)


def test_a_pid_that_another_process_got_is_not_ours() -> None:
    me = psutil.Process()
    record = records.Record(1, me.pid, me.create_time() - 3600, "ready", "", "fake", "m", "/m", "/log")
    records.write_record(record)
    assert records.read_record(1) is None
    assert record not in records.running()
    records.remove_record(record)
    assert records.read_record(1, stale=True) is None


def test_the_api_key_is_on_no_command_line(start: Start) -> None:
    extra = "import os; print('key', os.environ.get('Q38_API_KEY'), flush=True)"
    with start(ANSWERS.format(extra=extra), api_key="sesame") as server:
        assert "sesame" not in " ".join(psutil.Process(server.pid).cmdline())
        assert "key sesame" in server.log.read_text()


def test_a_server_without_a_key_inherits_none(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "of-another-service")
    extra = "import os; print('keys', os.environ.get('Q38_API_KEY'), os.environ.get('OPENAI_API_KEY'), flush=True)"
    with start(ANSWERS.format(extra=extra)) as server:
        assert "keys None None" in server.log.read_text()


def test_the_log_keeps_what_earlier_servers_wrote(start: Start) -> None:
    for word in ("first", "second"):
        with start(ANSWERS.format(extra=f"print({word!r}, flush=True)")) as server:
            pass
    log = server.log.read_text()
    assert log.index("first") < log.rindex("second")


# The real command with the real engine.


def heed_ctrl_c() -> None:
    """A shell starts its background jobs, pytest among them, with SIGINT ignored; a child would inherit that."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


class Foreground:
    """`q38 serve` as a shell starts it."""

    def __init__(self, model: Path, ple: Path, state: Path, *options: str) -> None:
        self.port = free_port()
        command = [
            sys.executable,
            "-m",
            "q38",
            "serve",
            str(model),
            "--ple",
            str(ple),
            "--port",
            str(self.port),
        ]
        self.process = subprocess.Popen(
            [*command, "--engine", "transformers", *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "Q38_STATE_DIR": str(state)},
            preexec_fn=heed_ctrl_c,
        )

    def server_pid(self) -> int:
        """The server's process, once it is started."""
        wait_until(lambda: records.read_record(self.port) is not None or self.process.poll() is not None)
        record = records.read_record(self.port)
        assert record is not None, self.process.communicate()
        return record.pid


@pytest.fixture
def foreground(tiny_source: Path, tiny_ple: Path, state_dir: Path) -> Iterator[Callable[..., Foreground]]:
    made: list[Foreground] = []

    def run(*options: str) -> Foreground:
        made.append(Foreground(tiny_source, tiny_ple, state_dir, *options))
        return made[-1]

    yield run
    for command in made:
        command.process.kill()
        command.process.communicate()


def test_serve_is_ready_after_a_token_and_ctrl_c_stops_it(foreground: Callable[..., Foreground]) -> None:
    serve = foreground("--json", "--api-key", "sesame")
    pid = serve.server_pid()
    assert serve.process.stdout is not None
    document = json.loads(serve.process.stdout.readline())
    assert document["url"] == f"http://127.0.0.1:{serve.port}"
    assert (document["engine"], document["pid"]) == ("transformers", pid)
    assert "POST /v1/chat/completions" in Path(document["log"]).read_text()
    with pytest.raises(InputError, match="API key"), Client(document["url"], api_key="wrong") as client:
        client.models()
    serve.process.send_signal(signal.SIGINT)
    assert serve.process.wait(60) == 130
    assert not psutil.pid_exists(pid)
    assert records.read_record(serve.port, stale=True) is None
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(("127.0.0.1", serve.port))


def test_sigterm_while_it_loads_stops_both(foreground: Callable[..., Foreground]) -> None:
    serve = foreground()
    pid = serve.server_pid()
    serve.process.send_signal(signal.SIGTERM)
    assert serve.process.wait(60) == 0
    assert not psutil.pid_exists(pid)
    assert records.read_record(serve.port, stale=True) is None


def test_a_killed_serve_leaves_no_server(foreground: Callable[..., Foreground]) -> None:
    serve = foreground()
    pid = serve.server_pid()
    serve.process.kill()
    assert wait_for_exit(pid, 60)


def test_a_model_that_cannot_load_ends_serve_with_the_reason(
    tiny_source: Path, tiny_ple: Path, state_dir: Path, tmp_path: Path
) -> None:
    from q38.checkpoint.index import INDEX, SINGLE, Checkpoint
    from q38.checkpoint.writer import write_safetensors

    model = tmp_path / "model"
    model.mkdir()
    for file in tiny_source.iterdir():
        if file.suffix not in (".safetensors",) and file.name != INDEX:
            (model / file.name).write_bytes(file.read_bytes())
    checkpoint = Checkpoint.open(tiny_source)
    lost = next(
        name for name in checkpoint.tensors if name.endswith("o_proj.weight") and not name.startswith("mtp.")
    )
    write_safetensors(model / SINGLE, {n: checkpoint.read(n) for n in checkpoint.tensors if n != lost})
    serve = Foreground(model, tiny_ple, state_dir)
    _, err = serve.process.communicate(timeout=120)
    assert serve.process.returncode == 2
    assert lost in err
    assert "Traceback" not in err


def test_the_watchdog_of_a_shell_command_spares_the_shell(tmp_path: Path) -> None:
    code = WATCHED + "import time; time.sleep(600)"
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE)
    assert process.stdin is not None
    process.stdin.close()
    # It shares our process group, and only itself must go.
    assert process.wait(60) == -signal.SIGKILL


def wait_until(done: Callable[[], bool], timeout_s: float = 60) -> None:
    deadline = time.monotonic() + timeout_s
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])
