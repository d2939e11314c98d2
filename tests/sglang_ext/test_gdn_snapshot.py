"""Where the prefix cache's snapshot of a Gated DeltaNet state comes from. The kernel itself: tests/gpu/test_gdn_snapshot_gpu.py."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from q38.sglang_ext import gdn_snapshot

NOTHING = {"track_state": None, "track_chunk_idx": None}


class TritonGDNKernel:
    supports_track_state_snapshot = False


class FlashInferGDNKernel(TritonGDNKernel):
    pass


@pytest.mark.parametrize(
    ("kernel", "cuda", "told"),
    [(TritonGDNKernel, True, True), (TritonGDNKernel, False, False), (FlashInferGDNKernel, True, False)],
)
def test_only_the_kernel_that_can_is_said_to_write_it(
    monkeypatch: pytest.MonkeyPatch, kernel: type[TritonGDNKernel], cuda: bool, told: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    created = SimpleNamespace()

    def original(self: Any, chosen: type[TritonGDNKernel]) -> None:
        self.extend_kernel = chosen()

    gdn_snapshot.dispatcher(original, created, kernel)
    assert created.extend_kernel.supports_track_state_snapshot is told
    assert TritonGDNKernel.supports_track_state_snapshot is False


def dispatcher(kernel: type[TritonGDNKernel]) -> SimpleNamespace:
    return SimpleNamespace(extend_kernel=kernel())


def test_what_a_step_wants_reaches_the_kernel_of_that_step_and_no_other() -> None:
    seen: list[dict[str, Any]] = []

    def kernel(**kwargs: Any) -> None:
        seen.append(kwargs)

    def step(_self: Any, *, fails: bool = False, **kwargs: Any) -> str:
        assert kwargs in ({}, NOTHING)
        gdn_snapshot.states(kernel, k=1)
        if fails:
            raise RuntimeError("failed")
        return "output"

    buffer, chunks = torch.zeros(2, 4, 8, 8), torch.tensor([1, -1], dtype=torch.int32)
    wanted, triton = {"track_state": buffer, "track_chunk_idx": chunks}, dispatcher(TritonGDNKernel)
    assert gdn_snapshot.extend(step, triton, **wanted) == "output"
    assert gdn_snapshot.extend(step, triton, **NOTHING) == "output"
    with pytest.raises(RuntimeError, match="failed"):
        gdn_snapshot.extend(step, triton, fails=True, **wanted)
    gdn_snapshot.states(kernel, k=1)
    gdn_snapshot.states(kernel, k=1, track_state="its own")
    assert [each.get("track_state") for each in seen] == [buffer, None, buffer, None, "its own"]
    assert [each.get("track_chunk_idx") is chunks for each in seen] == [True, False, True, False, False]


def test_a_kernel_that_takes_them_itself_gets_them() -> None:
    wanted = {"track_state": torch.zeros(1), "track_chunk_idx": torch.zeros(1)}
    given = gdn_snapshot.extend(lambda _self, **kwargs: kwargs, dispatcher(FlashInferGDNKernel), **wanted)
    assert given == wanted


def test_a_snapshot_that_nothing_writes_ends_the_step() -> None:
    wanted = {"track_state": torch.zeros(1), "track_chunk_idx": torch.zeros(1)}
    with pytest.raises(RuntimeError, match="was not asked"):
        gdn_snapshot.extend(lambda _self, **_: "output", dispatcher(TritonGDNKernel), **wanted)
