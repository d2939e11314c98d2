"""Rows that another process reads while this one imports: the same rows, whatever becomes of that process."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from q38.base import settings
from q38.base.errors import InputError, ResourceError
from q38.checkpoint.index import Checkpoint
from q38.checkpoint.packing import symmetric_zeros
from q38.residency import attached
from q38.residency.attached import Attached, Unanswered
from q38.residency.shared import SharedMemory
from q38.sglang_ext import early_rows
from q38.sglang_ext.options import ExtensionOptions
from q38.sglang_ext.residency import ExpertRows
from tests.residency.packed import make_checkpoint, packed_config, write_checkpoint

CPU, ROWS = torch.device("cpu"), 16
MODULE = "q38.sglang_ext.early_rows"


@pytest.fixture
def options(tmp_path: Path) -> ExtensionOptions:
    """Nine rows on the host, seven pass through three slots."""
    make_checkpoint(tmp_path / "model")
    return ExtensionOptions(
        str(tmp_path / "model"), device_rows=7, spare=3, early_rows=True, control=str(tmp_path / "s")
    )


def readers() -> list[psutil.Process]:
    """The readers that this process has started and that run."""
    found = []
    for child in psutil.Process().children():
        with suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
            if child.status() != psutil.STATUS_ZOMBIE and MODULE in child.cmdline():
                found.append(child)
    return found


def until(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not done():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


Reading = Callable[..., AbstractContextManager[psutil.Process]]


@pytest.fixture
def reading(capfd: pytest.CaptureFixture[str]) -> Reading:
    """`with reading(options) as process`: a reader of these options. Without room ahead it cannot finish before the server comes."""

    @contextmanager
    def started(options: ExtensionOptions, *, ahead: int = 0) -> Iterator[psutil.Process]:
        with settings.exported({settings.SGLANG: options.to_json()}):
            early_rows.start(options, ahead=ahead)
        until(lambda: "reader started" in capfd.readouterr().err)
        (process,) = readers()
        try:
            yield process
        finally:
            if process.is_running():
                process.kill()
            until(lambda: not readers())

    return started


def descriptors() -> int:
    """Of shared memory for rows, in this process."""
    found = 0
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # the one that lists them is gone
            found += "q38-rows" in str(descriptor.readlink())
    return found


def opened(options: ExtensionOptions) -> ExpertRows:
    return ExpertRows(Checkpoint.open(options.model), options, CPU)


def contents(rows: ExpertRows) -> list[bytes]:
    """Every row, as a kernel finds it."""
    store = rows.cache.store
    addresses = torch.stack([rows.table(layer) for layer in range(rows.cache.layers)]).flatten()
    return [bytes(store.driver.tensor(int(a), store.row_bytes).numpy()) for a in addresses]


@pytest.fixture
def expected(options: ExtensionOptions) -> list[bytes]:
    """The rows as this process reads them by itself."""
    rows = opened(replace(options, early_rows=False))
    found = contents(rows)
    rows.cache.close()
    assert len(set(found)) == ROWS
    return found


def check(rows: ExpertRows, expected: list[bytes]) -> None:
    assert contents(rows) == expected
    assert rows.cache.store.pool.slots.free == 3
    rows.cache.shrink(0)
    rows.cache.close()


@pytest.mark.parametrize("ahead", [0, early_rows.AHEAD])
def test_the_rows_are_those_that_the_server_would_read(
    reading: Reading,
    options: ExtensionOptions,
    expected: list[bytes],
    monkeypatch: pytest.MonkeyPatch,
    ahead: int,
) -> None:
    monkeypatch.setattr("q38.sglang_ext.residency.load_rows", None)  # nothing is left to be read
    with reading(options, ahead=ahead):
        rows = opened(options)
        assert rows.loaded.rows == ROWS
        assert rows.cache.store.on_device.sum() == 7
        check(rows, expected)
        until(lambda: not readers())


@pytest.mark.parametrize(("device_rows", "fewest"), [(0, 0), (16, 4), (9, 2)])
def test_they_are_wherever_the_rows_go(
    reading: Reading, options: ExtensionOptions, expected: list[bytes], device_rows: int, fewest: int
) -> None:
    options = replace(options, device_rows=device_rows, fewest_device_rows=fewest)
    with reading(options):
        rows = opened(options)
    assert contents(rows) == expected
    assert rows.loaded.rows == ROWS
    rows.cache.close()


def test_without_a_reader_the_server_reads_and_says_so(
    options: ExtensionOptions, expected: list[bytes], caplog: pytest.LogCaptureFixture
) -> None:
    check(opened(options), expected)
    assert "reading all rows here" in caplog.text


def test_a_reader_that_was_killed_before_is_replaced(
    reading: Reading, options: ExtensionOptions, expected: list[bytes], caplog: pytest.LogCaptureFixture
) -> None:
    with reading(options) as process:
        process.kill()
        until(lambda: not readers())
        check(opened(options), expected)
    assert "reading all rows here" in caplog.text


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_reader_that_is_lost_on_the_way_is_replaced_and_dead(
    reading: Reading,
    options: ExtensionOptions,
    expected: list[bytes],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    number: signal.Signals,
) -> None:
    class Losing(Attached):
        def receive(self, store):  # type: ignore[no-untyped-def]
            os.kill(process.pid, number)
            return super().receive(store)

    monkeypatch.setattr("q38.sglang_ext.residency.Attached", lambda *a: Losing(*a, silence_s=2.0))
    with reading(options) as process:
        rows = opened(options)
        until(lambda: not readers())
        check(rows, expected)
    assert "the early reader was lost" in caplog.text


def test_a_reader_that_does_not_answer_is_not_waited_for(
    reading: Reading, options: ExtensionOptions, expected: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("q38.sglang_ext.residency.Attached", lambda *a: Attached(*a, silence_s=0.5))
    with reading(options) as process:
        process.suspend()
        rows = opened(options)
        assert not readers(), "it still holds the memory of a pool"
        check(rows, expected)


def test_a_reader_for_other_options_is_not_believed(
    reading: Reading, options: ExtensionOptions, expected: list[bytes], caplog: pytest.LogCaptureFixture
) -> None:
    with reading(replace(options, device_rows=6)):
        rows = opened(options)
        assert not readers(), "it still holds the memory of a pool"
        check(rows, expected)
    assert "other options" in caplog.text


def broken(options: ExtensionOptions) -> ExtensionOptions:
    """The same model with a zero point that is not symmetric, in a row of the device."""
    root = Path(options.model)
    checkpoint = Checkpoint.open(root)
    tensors = {name: checkpoint.read(name) for name in checkpoint.tensors}
    name = "model.language_model.layers.0.mlp.experts.1.up_proj.qzeros"
    tensors[name] = symmetric_zeros(2, 128, 2) ^ 1
    write_checkpoint(root.parent / "broken", packed_config(), tensors, [list(tensors)])
    return replace(options, model=str(root.parent / "broken"))


def test_what_the_reader_finds_wrong_is_refused_in_the_servers_own_words(
    reading: Reading, options: ExtensionOptions, caplog: pytest.LogCaptureFixture
) -> None:
    options = broken(options)
    with pytest.raises(InputError) as alone:
        opened(replace(options, early_rows=False))
    with reading(options), pytest.raises(InputError) as told:
        opened(options)
    assert "is not symmetric" in str(told.value)
    assert str(told.value) == str(alone.value)
    assert "the early reader" not in caplog.text, "it was not believed, and all was read again"


def test_a_checkpoint_that_cannot_be_planned_is_refused_alike(
    reading: Reading, options: ExtensionOptions
) -> None:
    config = packed_config()
    config["quantization_config"]["sym"] = False  # type: ignore[index]
    (Path(options.model) / "config.json").write_text(json.dumps(config))
    with reading(options), pytest.raises(InputError, match="zero points"):
        opened(options)


def test_a_connection_of_somebody_else_gets_nothing(reading: Reading, options: ExtensionOptions) -> None:
    with reading(options) as process, socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.settimeout(60)
        client.connect(early_rows.address(options))
        client.sendall(b"not JSON\n")
        assert client.recv(100) == b""
        client.close()
        until(lambda: not process.is_running() or process.status() == psutil.STATUS_ZOMBIE)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_the_reader_ends_with_the_process_that_started_it(
    options: ExtensionOptions, number: signal.Signals
) -> None:
    code = (
        "import sys, time\nfrom q38.sglang_ext import early_rows\nfrom q38.sglang_ext.options import given\n"
        "early_rows.start(given())\nprint('started', flush=True)\ntime.sleep(600)\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        env=settings.child_env({settings.SGLANG: options.to_json()}),
    )
    assert parent.stdout is not None and parent.stdout.readline() == b"started\n"
    (reader,) = psutil.Process(parent.pid).children()
    parent.send_signal(number)
    parent.wait(60)
    try:
        until(lambda: not reader.is_running() or reader.status() == psutil.STATUS_ZOMBIE)
    finally:
        if reader.is_running():
            reader.kill()


@pytest.mark.parametrize("change", [{"early_rows": False}, {"control": None}, {"device_rows": None}], ids=str)
def test_none_is_started_where_it_would_not_know_what_to_read(
    options: ExtensionOptions, change: dict[str, None]
) -> None:
    options = replace(options, **change)
    early_rows.start(options)
    assert not readers()
    rows = opened(options)
    assert len(set(contents(rows))) == ROWS
    rows.cache.close()


@pytest.mark.parametrize("mapped", [0, 1])
def test_memory_that_cannot_be_mapped_is_let_go(
    reading: Reading,
    options: ExtensionOptions,
    expected: list[bytes],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    mapped: int,
) -> None:
    """The pool alone, or what lies behind it: the server would hold tens of gigabytes twice."""
    made: list[SharedMemory] = []

    def refuse(fd: int, nbytes: int, offset: int = 0) -> SharedMemory:
        if len(made) == mapped:
            os.close(fd)  # as SharedMemory does
            raise ResourceError("cannot be mapped", where="shared memory")
        made.append(SharedMemory(fd, nbytes, offset))
        return made[-1]

    monkeypatch.setattr(attached, "SharedMemory", refuse)
    before = descriptors()
    with reading(options, ahead=early_rows.AHEAD):
        rows = opened(options)
        assert not readers()
        assert all(memory.memory.size == 0 for memory in made)
        assert descriptors() == before
        check(rows, expected)
    assert "cannot be mapped" in caplog.text


def test_a_second_server_of_the_same_name_reads_by_itself(
    reading: Reading, options: ExtensionOptions, expected: list[bytes], capfd: pytest.CaptureFixture[str]
) -> None:
    with reading(options):
        early_rows.start(options)
        assert "no early reader" in capfd.readouterr().err
        assert len(readers()) == 1
        check(opened(options), expected)


def test_the_memory_lies_where_huge_pages_can(reading: Reading, options: ExtensionOptions) -> None:
    with reading(options):
        rows = opened(options)
    pool = rows.cache.store.pool
    assert pool.address % (2 << 20) == 0
    assert np.shares_memory(pool.memory, pool.row(0))
    rows.cache.close()
    with pytest.raises(Unanswered):
        attached.Attached(early_rows.address(options), None)  # type: ignore[arg-type]
