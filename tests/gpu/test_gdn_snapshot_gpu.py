"""SGLang's Gated DeltaNet kernel with q38's hook: the snapshot inside a prompt step is the state a step that ends there leaves."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from q38.sglang_ext import gdn_snapshot

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU"),
]
KEY_HEADS, HEADS, SIZE = 16, 32, 128
LENGTHS, CHUNKS = (100, 150, 40), (1, 2, -1)  # the third request wants none
CHUNK = 64


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Any:
    """SGLang's class, its kernel's function hooked."""
    module = pytest.importorskip("sglang.srt.layers.attention.linear.kernels.gdn_triton")
    from sglang.kernels.ops.attention.fla import chunk

    hooked = partial(gdn_snapshot.states, chunk.chunk_gated_delta_rule_fwd_h)
    monkeypatch.setattr(chunk, "chunk_gated_delta_rule_fwd_h", hooked)
    return module.TritonGDNKernel()


def inputs() -> dict[str, torch.Tensor]:
    """q, k [1, T, Hk, K], v [1, T, H, V] bfloat16; g (log) and beta [1, T, H] float32."""
    torch.manual_seed(38)
    tokens = sum(LENGTHS)

    def random(heads: int) -> torch.Tensor:
        return torch.randn(1, tokens, heads, SIZE, device="cuda").bfloat16()

    gates = torch.rand(2, 1, tokens, HEADS, device="cuda")
    return {
        "q": random(KEY_HEADS),
        "k": random(KEY_HEADS),
        "v": random(HEADS),
        "g": -0.1 * gates[0],
        "beta": gates[1],
    }


def run(
    kernel: Any, given: dict[str, torch.Tensor], states: torch.Tensor, lengths: tuple[int, ...], **asked: Any
) -> Any:
    starts = torch.tensor([0, *lengths]).cumsum(0).to("cuda", torch.int32)
    slots = torch.arange(len(lengths), device="cuda", dtype=torch.int32)
    call = partial(
        type(kernel).extend, kernel, **given, ssm_states=states, cache_indices=slots, query_start_loc=starts
    )
    dispatcher = SimpleNamespace(extend_kernel=kernel)
    return gdn_snapshot.extend(lambda _self, **kwargs: call(**kwargs), dispatcher, **asked)


def test_the_snapshot_is_the_state_to_the_bit(kernel: Any) -> None:
    given = inputs()
    begun = torch.randn(len(LENGTHS), HEADS, SIZE, SIZE, device="cuda")
    snapshot = torch.full_like(begun, 7.0)
    after = begun.clone()
    asked = {
        "track_state": snapshot,
        "track_chunk_idx": torch.tensor(CHUNKS, device="cuda", dtype=torch.int32),
    }
    output, _, chunk_states = run(kernel, given, after, LENGTHS, **asked)
    plain = begun.clone()
    same, _, _ = run(kernel, given, plain, LENGTHS)
    assert torch.equal(output, same)
    assert torch.equal(after, plain)
    first = 0  # token, and row of chunk_states
    row = 0
    for request, (length, chunk) in enumerate(zip(LENGTHS, CHUNKS, strict=True)):
        if chunk < 0:
            assert (snapshot[request] == 7.0).all()
        else:
            part = {name: tensor[:, first : first + chunk * CHUNK] for name, tensor in given.items()}
            ended = begun[request : request + 1].clone()
            run(kernel, {n: t.contiguous() for n, t in part.items()}, ended, (chunk * CHUNK,))
            assert torch.equal(snapshot[request], ended[0])
            # What SGLang takes otherwise.
            rounded = chunk_states.squeeze(0)[row + chunk]
            assert rounded.dtype == torch.bfloat16
            assert torch.equal(rounded, ended[0].bfloat16())
        first, row = first + length, row + (length + CHUNK - 1) // CHUNK
