from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from q38.base.errors import InputError
from q38.residency.imported import Sizes, import_files
from q38.residency.profile import Profile, merge, save
from q38.residency.trace import Trace, write_trace

LAYERS, EXPERTS, TOP_K = 3, 16, 2
SIZES = Sizes(LAYERS, EXPERTS, TOP_K)


def trace(tokens: int = 600, seed: int = 0) -> Trace:
    random = np.random.default_rng(seed)
    ids = random.random((tokens, LAYERS, EXPERTS)).argsort(-1)[..., :TOP_K].astype(np.int64)
    gates = random.random(ids.shape, dtype=np.float32)
    return Trace(ids, gates / gates.sum(-1, keepdims=True), EXPERTS)


def steps(recorded: Trace) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """As the earlier tool dumped them: int16 ids and float32 weights of one token."""
    assert recorded.weights is not None
    return [
        (torch.from_numpy(i.astype(np.int16)), torch.from_numpy(w.copy()))
        for i, w in zip(recorded.ids, recorded.weights, strict=True)
    ]


def test_a_folder_of_dumps_is_the_trace_that_was_dumped(tmp_path: Path) -> None:
    recorded = trace()
    for i in range(0, 600, 64):
        torch.save(steps(recorded)[i : i + 64], tmp_path / f"routing_{i // 64:05d}.pt")
    found = import_files([tmp_path], SIZES)
    assert np.array_equal(found.whole.count, Profile.of_trace(recorded).count)
    assert np.allclose(found.whole.mass, Profile.of_trace(recorded).mass)
    assert found.whole.tokens == 600 and found.halves is not None
    assert np.array_equal(found.halves[1].count, Profile.of_trace(recorded.split(300)[1]).count)


def test_one_dump_file_and_one_trace_file_say_the_same(tmp_path: Path) -> None:
    recorded = trace()
    torch.save(steps(recorded), tmp_path / "dump.pt")
    write_trace(tmp_path / "trace.safetensors", recorded)
    dump, written = (
        import_files([tmp_path / name], SIZES).whole for name in ("dump.pt", "trace.safetensors")
    )
    assert np.array_equal(dump.count, written.count) and np.allclose(dump.mass, written.mass)


@pytest.mark.parametrize("tokens", [None, 600])
def test_an_old_profile_is_read_with_the_tokens_it_says_or_its_counts_tell(
    tmp_path: Path, tokens: int | None
) -> None:
    of = Profile.of_trace(trace())
    value: dict[str, Any] = {"count": torch.from_numpy(of.count), "mass": torch.from_numpy(of.mass).float()}
    torch.save(value if tokens is None else {**value, "tokens": tokens}, tmp_path / "expert_freq.pt")
    found = import_files([tmp_path / "expert_freq.pt"], SIZES)
    assert np.array_equal(found.whole.count, of.count) and np.allclose(found.whole.mass, of.mass, rtol=1e-6)
    assert found.whole.tokens == 600 and found.halves is None


def test_files_are_merged_by_the_weights_given(tmp_path: Path) -> None:
    parts = [Profile.of_trace(trace(seed=seed)) for seed in (1, 2)]
    files = [tmp_path / f"{i}.safetensors" for i in (1, 2)]
    for part, file in zip(parts, files, strict=True):
        save(part, file)
    found = import_files(files, SIZES, weights=[3, 1]).whole
    assert np.array_equal(found.count, merge(parts, [3, 1]).count)
    assert not np.array_equal(found.count, merge(parts).count)


def test_halves_survive_a_merge_only_when_every_file_has_them(tmp_path: Path) -> None:
    save(Profile.of_trace(trace()), tmp_path / "whole.safetensors")
    for i in (1, 2):
        write_trace(tmp_path / f"{i}.safetensors", trace(seed=i))
    traces = [tmp_path / "1.safetensors", tmp_path / "2.safetensors"]
    both = import_files(traces, SIZES).halves
    assert both is not None
    assert np.array_equal(both[0].count + both[1].count, import_files(traces, SIZES).whole.count)
    assert import_files([*traces, tmp_path / "whole.safetensors"], SIZES).halves is None


class Trap:
    """Writes a file when it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return Path.touch, (self.file,)


def test_no_code_of_a_file_runs(tmp_path: Path) -> None:
    torch.save({"count": Trap(tmp_path / "ran"), "mass": 0}, tmp_path / "p.pt")
    with pytest.raises(InputError, match="no plain tensors"):
        import_files([tmp_path / "p.pt"], SIZES)
    assert not (tmp_path / "ran").exists()


def damaged(kind: str) -> Any:
    of = Profile.of_trace(trace())
    value: dict[str, Any] = {"count": torch.from_numpy(of.count), "mass": torch.from_numpy(of.mass).float()}
    pairs: list[Any] = list(steps(trace(4)))
    match kind:
        case "no mass":
            del value["mass"]
        case "other experts":
            value = {name: tensor[:, :-1].contiguous() for name, tensor in value.items()}
        case "negative":
            value["count"][0, 0] = -1
        case "fractions":
            value["count"] = value["count"] + 0.5
        case "nan":
            value["mass"][0, 0] = float("nan")
        case "tokens":
            value["tokens"] = "many"
        case "a number":
            return 5
        case "no pairs":
            return [1, 2]
        case "other layers":
            return [(ids[:-1], gates[:-1]) for ids, gates in pairs]
        case "an expert too many":
            pairs[1][0][0, 0] = EXPERTS
            return pairs
        case _:
            pairs[1][1][0, 0] = -1
            return pairs
    return value


@pytest.mark.parametrize(
    "kind",
    ["no mass", "other experts", "negative", "fractions", "nan", "tokens", "a number", "no pairs", "other layers",
     "an expert too many", "negative weights"],
)  # fmt: skip
def test_a_damaged_file_or_one_of_another_model_is_refused_by_name(tmp_path: Path, kind: str) -> None:
    torch.save(damaged(kind), tmp_path / "x.pt")
    with pytest.raises(InputError, match=r"x\.pt"):
        import_files([tmp_path / "x.pt"], SIZES)


def test_files_that_are_none_are_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "text.pt").write_text("hello")
    write_trace(tmp_path / "other.safetensors", Trace(np.zeros((600, 1, 2), np.int64), None, EXPERTS))
    for name in ("absent.pt", "absent.safetensors", "empty", "text.pt", "other.safetensors"):
        with pytest.raises(InputError):
            import_files([tmp_path / name], SIZES)
