"""Rows read before their server is there: shared memory, the reader's side of the conversation."""

from __future__ import annotations

import itertools
import json
import mmap
import os
import socket
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from q38.base.errors import InputError, ResourceError
from q38.base.units import GIB
from q38.checkpoint.index import Checkpoint
from q38.residency import pool as pool_module
from q38.residency import shared as shared_module
from q38.residency.cache import open_cache, plan_pool
from q38.residency.early import EarlyReader, Work, lines, pool_key, send, tail_offset
from q38.residency.layout import ExpertLayout
from q38.residency.pool import HostLimits, HostPool, pool_bytes
from q38.residency.shards import plan_reads
from q38.residency.shared import HUGE, SharedMemory, Touching
from tests.residency.fake_driver import FakeDriver
from tests.residency.packed import expected_row, make_checkpoint

LAYERS, EXPERTS = 4, 4
PLENTY = HostLimits(2**40, None)
Model = tuple[Checkpoint, ExpertLayout, dict[str, torch.Tensor]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return make_checkpoint(tmp_path_factory.mktemp("model"), shards=3)


def mask(bits: int) -> np.ndarray:
    """bool [layers, experts] from the bits of a number."""
    return np.array([bits >> i & 1 for i in range(LAYERS * EXPERTS)], bool).reshape(LAYERS, EXPERTS)


def work(model: Model, resident: np.ndarray, *, fewest: int | None = None, spare: int = 2) -> Work:
    checkpoint, layout, _ = model
    pool = plan_pool(layout.row_bytes, resident, fewest=fewest, spare=spare)
    return Work(layout, plan_reads(checkpoint, layout, unit=3 * layout.row_bytes), pool)


def reader(plan: Any, *, check: Any = lambda nbytes: None, ahead: int = 0) -> tuple[EarlyReader, list[str]]:
    said: list[str] = []
    return EarlyReader(plan, check=check, say=said.append, ahead=ahead, threads=2), said


def asked(early: EarlyReader, request: dict[str, Any]) -> tuple[socket.socket, threading.Thread]:
    ours, theirs = socket.socketpair()
    ours.settimeout(60)

    def serve() -> None:
        with theirs, suppress(OSError):
            early.serve(theirs)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    send(ours, request)
    return ours, thread


@settings(max_examples=25, deadline=None)
@given(
    bits=st.integers(0, 2**16 - 1), spare=st.integers(0, 3), gap=st.integers(0, 3), ahead=st.integers(1, 4)
)
def test_every_row_passes_once_whatever_the_split_and_the_slots(
    model: Model, bits: int, spare: int, gap: int, ahead: int
) -> None:
    resident = mask(bits)
    job = work(model, resident, fewest=max(int(resident.sum()) - gap, 0), spare=spare)
    size = job.pool.row_bytes
    early, _ = reader(lambda: job, ahead=ahead * size + 1)
    ours, thread = asked(early, {"pool": pool_key(job.pool)})
    with ours:
        text, fds, _, _ = socket.recv_fds(ours, 4096, 1)
        messages = lines(ours, text)
        hello = next(messages)
        assert hello == {"pid": os.getpid(), "ahead": min(ahead, int(resident.sum()))}
        memory = SharedMemory(fds[0], job.pool.nbytes)
        tail = SharedMemory(os.dup(fds[0]), max(hello["ahead"], 1) * size, tail_offset(job.pool))
        rows: dict[int, bytes] = {}
        for message in messages:
            if "done" in message:
                break
            freed = []
            for row, slot in zip(message["rows"], message["slots"], strict=True):
                assert row not in rows
                assert (slot >= 0) == resident.flat[row]
                place = slot if slot >= 0 else -1 - job.pool.places[row]
                behind = place - job.pool.slots
                at = (memory.memory[place * size :] if behind < 0 else tail.memory[behind * size :])[:size]
                rows[row] = bytes(at)
                if slot >= 0:
                    at[:] = 0xDD  # it is ours until it is given back
                    freed.append(slot)
            send(ours, {"free": freed})
        assert message["done"]["rows"] == LAYERS * EXPERTS
    thread.join(60)
    _, layout, tensors = model
    for row, found in rows.items():
        assert found == bytes(expected_row(tensors, layout, *divmod(row, EXPERTS)).numpy()), row
    assert len(rows) == LAYERS * EXPERTS
    memory.close()
    tail.close()


def test_it_says_what_it_has_done(model: Model) -> None:
    job = work(model, mask(0b1010))
    early, said = reader(lambda: job)
    ours, thread = asked(early, {"pool": pool_key(job.pool)})
    with ours:
        for message in itertools.islice(lines(ours), 1, None):
            if "done" in message:
                break
            send(ours, {"free": [s for s in message["slots"] if s >= 0]})
    thread.join(60)
    assert sorted(line.split(" (")[0] for line in said) == [
        "device rows read",
        "host rows read",
        "pool touched",
    ]


def failing(error: BaseException) -> Any:
    def plan() -> Work:
        raise error

    return plan


def answers(early: EarlyReader, request: dict[str, Any]) -> dict[str, Any]:
    ours, thread = asked(early, request)
    with ours:
        (answer,) = lines(ours)  # and it hangs up
    thread.join(60)
    return answer


def test_a_refusal_is_handed_on_and_any_other_failure_told() -> None:
    refused, _ = reader(failing(InputError("bad", where="here", remedy="mend it")))
    assert answers(refused, {}) == {"refused": {"what": "bad", "where": "here", "remedy": "mend it"}}
    failed, _ = reader(failing(OSError("gone\nwith the wind")))
    assert answers(failed, {}) == {"failed": "gone with the wind"}
    nameless, _ = reader(failing(KeyboardInterrupt()))
    assert answers(nameless, {}) == {"failed": "KeyboardInterrupt"}


def test_memory_is_asked_for_before_it_is_taken(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    job, asked_for = work(model, mask(7)), []

    def check(nbytes: int) -> None:
        asked_for.append(nbytes)
        raise ResourceError("3 bytes short", where="host memory")

    monkeypatch.setattr(SharedMemory, "create", None)
    early, _ = reader(lambda: job, check=check)
    assert "3 bytes short" in answers(early, {"pool": pool_key(job.pool)})["failed"]
    assert asked_for == [job.pool.nbytes]


def test_memory_that_the_kernel_does_not_have_is_a_failure(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(memory: np.ndarray) -> None:
        raise ResourceError("none left", where="host memory")

    monkeypatch.setattr(shared_module, "populate", refuse)
    job = work(model, mask(7))
    early, _ = reader(lambda: job)
    ours, thread = asked(early, {"pool": pool_key(job.pool)})
    with ours:
        *_, last = lines(ours)
    thread.join(60)
    assert "none left" in last["failed"]


def test_a_server_that_hangs_up_is_not_waited_for(model: Model) -> None:
    job = work(model, mask(0xFFFF), spare=1)
    early, _ = reader(lambda: job)
    ours, thread = asked(early, {"pool": pool_key(job.pool)})
    first = ours.recv(4096)
    assert json.loads(first.split(b"\n")[0])["ahead"] == 0
    ours.close()
    thread.join(60)
    assert not thread.is_alive()


@given(bits=st.integers(0, 2**16 - 1), fewest=st.none() | st.integers(0, 16), spare=st.integers(0, 4))
def test_the_plan_of_a_pool_is_what_opening_it_does(bits: int, fewest: int | None, spare: int) -> None:
    resident = mask(bits)
    plan = plan_pool(64, resident, fewest=fewest, spare=spare, scratch=24)
    cache = open_cache(
        FakeDriver(), 64, resident, np.ones((LAYERS, EXPERTS)), stream=0, fewest=fewest, spare=spare,
        scratch=24, chunk=64, limits=PLENTY, threads=1,
    )  # fmt: skip
    assert cache.store.place.tolist() == plan.places.tolist()
    assert cache.store.pool.rows == plan.slots
    assert cache.store.pool.pinned == plan.nbytes
    cache.close()


@given(bits=st.integers(0, 2**16 - 1), unit=st.integers(1, 10**6))
def test_part_of_a_plan_reads_the_rows_that_are_wanted_in_file_order(
    model: Model, bits: int, unit: int
) -> None:
    plan = plan_reads(*model[:2])
    part, wanted = plan.only(mask(bits).reshape(-1), unit=unit), np.flatnonzero(mask(bits))
    assert sorted(itertools.chain(*part.groups)) == wanted.tolist()
    whole = list(itertools.chain(*plan.groups))
    assert list(itertools.chain(*part.groups)) == [row for row in whole if row in wanted]
    assert part.nbytes == sum(i.nbytes for row in wanted for i in plan.rows[row].values())
    assert all(part.groups)


def test_shared_memory_is_one_for_all_that_map_it_and_starts_where_huge_pages_do() -> None:
    first = SharedMemory.create(3 * mmap.PAGESIZE)
    second = SharedMemory(os.dup(first.fd), first.nbytes)
    first.memory[5] = 9
    assert second.memory[5] == 9
    assert first.memory.ctypes.data % HUGE == 0 == second.memory.ctypes.data % HUGE
    first.close()
    assert second.memory[5] == 9
    second.back(2)
    second.close()


def test_touching_backs_every_page_and_keeps_what_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_module, "_STRIPE", 4 * mmap.PAGESIZE)
    memory = SharedMemory.create(10 * mmap.PAGESIZE)
    Touching(memory, threads=2).wait(memory.nbytes)
    assert os.fstat(memory.fd).st_blocks * 512 >= memory.nbytes
    memory.memory[:] = 7
    memory.back(2)
    assert (memory.memory == 7).all()
    memory.close()


def test_backing_never_writes_where_another_process_may(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "_POPULATE_WRITE", 999)  # as a kernel before 5.14
    memory = SharedMemory.create(4 * mmap.PAGESIZE)
    memory.memory.flags.writeable = False
    memory.back(2)
    memory.close()


def test_a_shared_pool_counts_as_taken_and_its_size_must_be_right() -> None:
    size = pool_bytes(64, 10, 0)
    driver, enough = FakeDriver(), HostLimits(GIB, None)
    with pytest.raises(ResourceError, match="short"):
        HostPool(driver, 64, 10, limits=enough, keep=GIB)
    pool = HostPool(driver, 64, 10, limits=enough, keep=GIB, shared=SharedMemory.create(size))
    assert driver.registered == {pool.address: size}
    pool.close()
    with pytest.raises(ResourceError, match="short"):
        HostPool(driver, 64, 10, limits=HostLimits(GIB - 1, None), shared=SharedMemory.create(size))
    with pytest.raises(ValueError, match="shared memory for a pool"):
        HostPool(driver, 64, 10, limits=enough, keep=0, shared=SharedMemory.create(2 * size))
    assert not driver.leaks()


def descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def test_shared_memory_goes_with_its_pool() -> None:
    before = descriptors()
    pool = HostPool(FakeDriver(), 64, 10, limits=PLENTY, shared=SharedMemory.create(pool_bytes(64, 10, 0)))
    pool.row(3)[:] = 1
    pool.close()
    assert descriptors() == before
