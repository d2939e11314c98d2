from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from q38.base.errors import InputError
from q38.residency.profile import MIN_TOKENS, Profile, load, load_halves, merge, recording, save
from q38.residency.trace import Trace


def profile(
    seed: int = 0, *, layers: int = 3, experts: int = 8, tokens: int = 600, top_k: int = 2
) -> Profile:
    random = np.random.default_rng(seed)
    ids = np.stack(
        [np.stack([random.permutation(experts)[:top_k] for _ in range(layers)]) for _ in range(tokens)]
    )
    weights = random.random(ids.shape, dtype=np.float32)
    return Profile.of_trace(Trace(ids, weights / weights.sum(-1, keepdims=True), experts))


def test_a_profile_reads_back_as_it_was_written(tmp_path: Path) -> None:
    whole = Profile(profile().count, profile().mass, 600, {"model_source": "abc", "text": "stdlib"})
    save(whole, tmp_path / "p.safetensors")
    found = load(tmp_path / "p.safetensors")
    assert np.array_equal(found.count, whole.count)
    assert np.allclose(found.mass, whole.mass, rtol=1e-6)
    assert (found.tokens, dict(found.metadata)) == (600, whole.metadata)
    assert load_halves(tmp_path / "p.safetensors") is None


def test_halves_read_back(tmp_path: Path) -> None:
    halves = profile(1, tokens=300), profile(2, tokens=300)
    save(merge(halves), tmp_path / "p.safetensors", halves=halves)
    found = load_halves(tmp_path / "p.safetensors")
    assert found is not None
    assert all(
        np.array_equal(a.count, b.count) and a.tokens == b.tokens for a, b in zip(found, halves, strict=True)
    )


def test_the_file_is_plain_safetensors_with_the_documented_tensors(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    save(profile(), tmp_path / "p.safetensors")
    tensors = load_file(tmp_path / "p.safetensors")
    assert {n: (t.dtype, tuple(t.shape)) for n, t in tensors.items()} == {
        "count": (torch.int64, (3, 8)),
        "mass": (torch.float32, (3, 8)),
    }


def test_the_same_profile_makes_the_same_bytes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        save(profile(), tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_a_trace_below_the_minimum_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=f"{MIN_TOKENS - 1} tokens"):
        save(profile(tokens=MIN_TOKENS - 1), tmp_path / "p.safetensors")
    assert not (tmp_path / "p.safetensors").exists()


@pytest.mark.parametrize(
    "change", ["schema", "tokens", "few", "count dtype", "mass shape", "negative", "nan", "one half"]
)
def test_a_damaged_profile_is_refused(tmp_path: Path, change: str) -> None:
    from q38.checkpoint.writer import write_safetensors

    file, good = tmp_path / "p.safetensors", profile()
    tensors = {"count": torch.from_numpy(good.count), "mass": torch.from_numpy(good.mass).float()}
    metadata = {"schema": "q38.routing-profile/1", "tokens": "600"}
    match change:
        case "schema":
            metadata["schema"] = "other"
        case "tokens":
            metadata["tokens"] = "many"
        case "few":
            metadata["tokens"] = "100"
        case "count dtype":
            tensors["count"] = tensors["count"].int()
        case "mass shape":
            tensors["mass"] = tensors["mass"][:, :-1].contiguous()
        case "negative":
            tensors["count"][0, 0] = -1
        case "nan":
            tensors["mass"][0, 0] = float("nan")
        case _:
            tensors |= {"half_count": tensors["count"][None], "half_mass": tensors["mass"][None]}
    write_safetensors(file, tensors, metadata)
    with pytest.raises(InputError):
        load_halves(file) if change == "one half" else load(file)


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    save(profile(), tmp_path / "p.safetensors")
    data = (tmp_path / "p.safetensors").read_bytes()
    (tmp_path / "p.safetensors").write_bytes(data[:-1])
    with pytest.raises(InputError, match="truncated"):
        load(tmp_path / "p.safetensors")


@given(st.lists(st.integers(0, 99), min_size=1, max_size=4))
def test_merging_by_tokens_adds_up(seeds: list[int]) -> None:
    parts = [profile(seed, tokens=50 + seed) for seed in seeds]
    whole = merge(parts)
    assert np.array_equal(whole.count, sum(p.count for p in parts))
    assert np.allclose(whole.mass, sum(p.mass for p in parts))
    assert whole.tokens == sum(p.tokens for p in parts)


def test_a_workload_with_no_weight_does_not_count() -> None:
    a, b = profile(1), profile(2)
    only = merge([a, b], [1, 0])
    assert np.array_equal(only.count, 2 * a.count) and only.tokens == 1200


@pytest.mark.parametrize("weights", [[1.0], [1.0, -1.0], [0.0, 0.0]])
def test_weights_that_are_no_shares_are_refused(weights: list[float]) -> None:
    with pytest.raises(InputError, match="no shares"):
        merge([profile(1), profile(2)], weights)


def test_profiles_of_other_shapes_are_not_merged() -> None:
    with pytest.raises(InputError, match="different shape"):
        merge([profile(experts=8), profile(experts=16)])


class TinyRouter(torch.nn.Module):
    """What transformers' router gives: logits, gate weights, experts."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(8, 4))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        logits = x @ torch.arange(32.0).reshape(4, 8).sin()
        weights, experts = logits.softmax(-1).topk(2)
        return logits, weights, experts


class TinyModel(torch.nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList()
        for _ in range(layers):
            layer = torch.nn.Module()
            layer.mlp = torch.nn.Module()
            layer.mlp.gate = TinyRouter()
            self.layers.append(layer)

    def forward(self, x: torch.Tensor) -> None:
        for i, layer in enumerate(self.layers):
            layer.mlp.gate(x + i)


def test_every_selection_is_recorded_in_order() -> None:
    model, batches = TinyModel(3), [torch.randn(5, 4), torch.randn(2, 4)]
    with recording(model) as traces:
        for batch in batches:
            model(batch)
    (trace,) = traces
    assert trace.ids.shape == (7, 3, 2) and trace.experts == 8
    _, weights, experts = model.layers[1].mlp.gate(torch.cat(batches) + 1)
    assert np.array_equal(trace.ids[:, 1], experts.numpy())
    assert trace.weights is not None
    assert np.allclose(trace.weights[:, 1], weights.detach().numpy())


def test_the_hooks_are_gone_after_an_error() -> None:
    model: Any = TinyModel(2)
    with pytest.raises(RuntimeError, match="stop"), recording(model):
        raise RuntimeError("stop")
    assert not any(layer.mlp.gate._forward_hooks for layer in model.layers)


def test_a_model_without_routers_is_a_fault() -> None:
    with pytest.raises(ValueError, match="one in each layer"), recording(torch.nn.Linear(2, 2)):
        pass
