"""The fused kernels against the steps in plain torch."""

from __future__ import annotations

import pytest
import torch

from q38.quantize.local import gsq
from q38.quantize.local.grid import plain_scales
from q38.quantize.local.gsq import Gsq, choose, soften
from q38.quantize.local.signround import SignRound

pytest.importorskip("triton", reason="Triton is not installed (pip install 'q38[kernels]')")

E, N, K, GROUP = 2, 12, 64, 32


@pytest.fixture(scope="module")
def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def values(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("bits", [2, 4])
def test_a_step_of_signround_is_that_of_plain_torch(bits: int, device: str) -> None:
    from q38.quantize.local import fused

    weight = 0.02 * values(E, N, K, seed=0)
    base = torch.stack([plain_scales(w, bits, GROUP) for w in weight])
    plain, kernel = (SignRound(weight, base.clone(), bits=bits, steps=200, rate=1.0) for _ in range(2))
    kernel.base, kernel.clip, kernel.shift, kernel.current = (
        t.to(device) for t in (kernel.base, kernel.clip, kernel.shift, torch.full_like(weight, torch.nan))
    )
    for step in range(3):
        gradient = values(E, N, K, seed=1 + step)
        plain.step(gradient, step)
        fused.signround(gradient.to(device), kernel, weight.to(device), (1 - step / 200) / 200, bits, GROUP)
        assert torch.equal(kernel.shift.cpu(), plain.shift)
        # A sum in another order can be zero in one and not in the other, but then for few groups.
        assert (kernel.clip.cpu() == plain.clip).float().mean() > 0.99
        assert (kernel.current.cpu() == plain.current).float().mean() > 0.99
    assert plain.shift.abs().max() > 0.01


def test_a_step_of_gsq_is_that_of_plain_torch_under_the_same_noise(device: str) -> None:
    from q38.quantize.local import fused

    levels = torch.randint(-2, 2, (E, N, K), generator=torch.Generator().manual_seed(2)).to(torch.int8)
    scale = 0.02 * values(E, N, K // GROUP, seed=3)
    plain, kernel = (Gsq(levels, scale, [5, 77], bits=2, steps=50, dtype=torch.float32) for _ in range(2))
    for name in ("logits", "momentum", "scale", "scale_momentum", "scale_rate", "current"):
        setattr(kernel, name, getattr(kernel, name).to(device))
    fused.gsq(None, kernel, 0)
    for step in range(3):
        gradient = values(E, N, K, seed=10 + step)
        for e, seed in enumerate(plain.seeds):
            chances = choose(
                plain.logits[:, e], noise(seed + step, N * K, device).view(4, N, K), *plain.heat(step)
            )
            assert torch.allclose(kernel.current[e].cpu(), soften(chances, plain.scale[e]), atol=1e-4)
            gsq.reference_update(plain, chances, gradient[e], e, step)
        fused.gsq(gradient.to(device), kernel, step)
        # Where a gradient is all but zero, its sign may differ.
        off = (kernel.logits.cpu() - plain.logits).abs() > 1e-6
        assert off.float().mean() < 1e-3
        assert torch.allclose(kernel.scale.cpu(), plain.scale, rtol=1e-3, atol=1e-6)


def test_an_expert_gets_the_same_from_a_batch_of_any_size(device: str) -> None:
    from q38.quantize.local import fused

    levels = torch.randint(-2, 2, (E, N, K), generator=torch.Generator().manual_seed(2)).to(torch.int8)
    scale = 0.02 * values(E, N, K // GROUP, seed=3)
    both = Gsq(levels, scale, [5, 77], bits=2, steps=50, dtype=torch.float32)
    alone = Gsq(levels[1:], scale[1:], [77], bits=2, steps=50, dtype=torch.float32)
    for state in (both, alone):
        for name in ("logits", "momentum", "scale", "scale_momentum", "scale_rate", "current"):
            setattr(state, name, getattr(state, name).to(device))
        fused.gsq(None, state, 0)
        fused.gsq(values(E, N, K, seed=4)[-len(state.seeds) :].to(device), state, 0)
    assert torch.equal(both.logits[:, 1], alone.logits[:, 0])
    assert torch.equal(both.current[1], alone.current[0])


def noise(seed: int, count: int, device: str) -> torch.Tensor:
    """The Gumbel noise of the kernel for one matrix: float32 [4, count]."""
    import triton
    import triton.language as tl

    @triton.jit
    def draw(out, seed, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        u0, u1, u2, u3 = tl.rand4x(seed, at, 7)
        tl.store(out + at, u0, mask=at < count)
        tl.store(out + count + at, u1, mask=at < count)
        tl.store(out + 2 * count + at, u2, mask=at < count)
        tl.store(out + 3 * count + at, u3, mask=at < count)

    uniform = torch.empty(4, count, device=device)
    draw[(triton.cdiv(count, 1024),)](uniform, seed, count, BLOCK=1024)
    return -torch.log(-torch.log(uniform.cpu().clamp(1e-9, 0.9999999)))
