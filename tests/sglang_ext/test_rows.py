"""Expert rows of a packed checkpoint, found by address: the same results wherever they lie."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from q38.base.errors import InputError, ResourceError
from q38.checkpoint.index import Checkpoint
from q38.checkpoint.packing import dequantize
from q38.residency import profile
from q38.sglang_ext import residency
from q38.sglang_ext.expert_kernels import run
from q38.sglang_ext.options import ExtensionOptions
from q38.sglang_ext.residency import ExpertRows

LAYERS, EXPERTS, TOP_K, CPU = 4, 16, 4, torch.device("cpu")


@pytest.fixture(scope="module")
def checkpoint(tiny_packed: Path) -> Checkpoint:
    return Checkpoint.open(tiny_packed)


@pytest.fixture(scope="module")
def stored(checkpoint: Checkpoint) -> Iterator[ExpertRows]:
    options = ExtensionOptions(str(checkpoint.path), device_rows=30, fewest_device_rows=10, spare=4)
    rows = ExpertRows(checkpoint, options, CPU)
    yield rows
    rows.cache.close()


def weight(checkpoint: Checkpoint, layer: int, expert: int, proj: str) -> torch.Tensor:
    """[N, K] float32, by the code that transformers' models are unpacked with."""
    name = f"model.language_model.layers.{layer}.mlp.experts.{expert}.{proj}."
    words, zeros, scales = (checkpoint.read(name + kind) for kind in ("qweight", "qzeros", "scales"))
    return dequantize(words, zeros, scales, 2).float()


def routing(tokens: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, 256, generator=g).bfloat16()
    ids = torch.stack([torch.randperm(EXPERTS, generator=g)[:TOP_K] for _ in range(tokens)]).int()
    return x, ids, torch.rand(tokens, TOP_K, generator=g)


@pytest.mark.parametrize("tokens", [1, 17])
@pytest.mark.parametrize("layer", range(LAYERS))
def test_the_result_is_that_of_the_checkpoints_weights(
    stored: ExpertRows, checkpoint: Checkpoint, layer: int, tokens: int
) -> None:
    x, ids, weights = routing(tokens, layer)
    expected = torch.zeros(tokens, 256)
    for t in range(tokens):
        for k in range(TOP_K):
            gate, up, down = (
                weight(checkpoint, layer, int(ids[t, k]), p) for p in ("gate_proj", "up_proj", "down_proj")
            )
            h = torch.nn.functional.silu(gate @ x[t].float()) * (up @ x[t].float())
            expected[t] += weights[t, k] * (down @ h)
    out = run(stored, layer, x, ids, weights)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), expected, rtol=1e-2, atol=1e-2 * float(expected.abs().max()))


def test_moving_rows_changes_the_addresses_and_no_result(stored: ExpertRows) -> None:
    tables = [stored.table(layer) for layer in range(LAYERS)]
    before = [run(stored, layer, *routing(5, 7)) for layer in range(LAYERS)]
    addresses = torch.stack(tables).clone()
    for move in (
        lambda: stored.cache.shrink(15),
        lambda: stored.cache.grow(25),
        lambda: stored.cache.shrink(10),
    ):
        move()
        for layer in range(LAYERS):
            assert torch.equal(run(stored, layer, *routing(5, 7)), before[layer])
    assert not torch.equal(torch.stack(tables), addresses)
    # The tensors that kernels and captured graphs hold are the ones that follow.
    assert all(stored.table(layer).data_ptr() == tables[layer].data_ptr() for layer in range(LAYERS))
    assert stored.status()["rows_on_device"] == 30


def test_a_padded_token_contributes_nothing(stored: ExpertRows) -> None:
    x, ids, weights = routing(3, 1)
    ids[1] = -1
    assert not run(stored, 0, x, ids, weights)[1].any()


def test_fewer_rows_than_the_pool_can_take_stay_on_the_device(stored: ExpertRows) -> None:
    with pytest.raises(ResourceError, match="short"):
        stored.cache.shrink(stored.status()["rows_on_device"])


def test_the_hottest_rows_of_a_profile_start_on_the_device(checkpoint: Checkpoint, tmp_path: Path) -> None:
    count = np.arange(LAYERS * EXPERTS).reshape(LAYERS, EXPERTS)
    file = tmp_path / "profile.safetensors"
    profile.save(profile.Profile(count, count / count.max(), int(count.sum()), {}), file)
    options = ExtensionOptions("", profile=str(file), device_rows=8, spare=2)
    rows = ExpertRows(checkpoint, options, CPU)
    assert np.flatnonzero(rows.cache.resident).tolist() == list(range(56, 64))
    rows.cache.close()


def test_a_profile_of_another_model_is_refused(checkpoint: Checkpoint, tmp_path: Path) -> None:
    count = np.ones((2, 3), np.int64)
    file = tmp_path / "profile.safetensors"
    profile.save(profile.Profile(count, count / 1.0, 600, {}), file)
    with pytest.raises(InputError, match="2 x 3"):
        ExpertRows(checkpoint, ExtensionOptions("", profile=str(file), device_rows=8), CPU)


def test_a_process_holds_the_rows_of_one_model(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(residency, "_rows", None)
    with pytest.raises(ResourceError, match="not loaded"):
        residency.rows()
    options = ExtensionOptions("", device_rows=8, spare=2)
    opened = residency.open_rows(checkpoint, options, CPU)
    assert residency.rows() is opened
    with pytest.raises(ResourceError, match="already"):
        residency.open_rows(checkpoint, options, CPU)
    opened.cache.close()
