"""Damaged checkpoints: every verb that reads one refuses in one line, or its result is whole."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from q38.base.errors import Q38Error
from q38.checkpoint.index import INDEX, Checkpoint
from q38.checkpoint.writer import TEMPORARY
from q38.inspection.report import inspect
from q38.ple.split import split_ple
from q38.ple.verify import verify_ple
from q38.quantize.requant_int8 import requant_int8
from q38.recipe.schema import load_recipe
from q38.serving.recipe_plan import plan_recipe
from q38.serving.sglang_settings import SglangSettings
from q38.synth.sparse import synth_sparse
from tests.checkpoint.mutate import Draw, mutate_bytes, mutate_header, mutate_json, swap
from tests.inspection.broken import clone

RECIPE = """
schema: q38.recipe/1
name: fuzz
quantize: {bits: {experts: 2, gdn_in: 8, shared_expert: 8}}
requant_int8: {groups: [gdn_out, lm_head], max_relative_error: 0.5}
"""
fuzz = settings(
    max_examples=60,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@pytest.fixture(scope="module")
def bases(tiny_source: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Sound checkpoints of one small model: bf16, fp8, packed as `q38 quantize` leaves it, and the recipe."""
    root = tmp_path_factory.mktemp("fuzz")
    (root / "recipe.yaml").write_text(RECIPE)
    (root / "before.yaml").write_text(RECIPE.replace("groups: [gdn_out, lm_head], ", "groups: [], "))
    config = json.loads((tiny_source / "config.json").read_text())
    config["text_config"] |= {"vocab_size": 256, "num_experts": 4, "num_experts_per_tok": 2}
    config["text_config"]["split_ngram_parts"] = 3
    (root / "config.json").write_text(json.dumps(config))
    for layout in ("bf16", "fp8", "quantized"):
        recipe = str(root / "before.yaml") if layout == "quantized" else None
        synth_sparse(root / layout, root / "config.json", layout=layout, recipe=recipe, shard_bytes=10**6)  # type: ignore[arg-type]
        (root / layout / "MANIFEST.json").unlink()
    return {path.stem: path for path in root.iterdir()}


def damage(root: Path, draw: Draw) -> str:
    shards = sorted(root.glob("*.safetensors"))
    shard = draw(st.sampled_from(shards))
    kind = draw(
        st.sampled_from(
            ["index", "config", "text_config", "quantization", "rules", "header", "bytes", "json", "files"]
        )
    )
    if kind == "index":
        mutate_json(root / INDEX, draw)
    elif kind == "config":
        mutate_json(root / "config.json", draw)
    elif kind == "text_config":
        mutate_json(root / "config.json", draw, ("text_config",))
    elif kind == "quantization":
        mutate_json(root / "config.json", draw, ("quantization_config",))
    elif kind == "rules":
        mutate_json(root / "config.json", draw, ("quantization_config", "extra_config"))
    elif kind == "header":
        mutate_header(shard, draw)
    elif kind == "bytes":
        mutate_bytes(shard, draw)
    elif kind == "json":
        mutate_bytes(root / draw(st.sampled_from([INDEX, "config.json"])), draw)
    elif draw(st.booleans()):
        swap(shard, draw(st.sampled_from(shards)))
    else:
        shard.unlink()
    return kind


def state(root: Path) -> dict[str, tuple[int, int]]:
    return {p.name: (p.stat().st_size, p.stat().st_mtime_ns) for p in root.iterdir()}


def attempt(action: Callable[[], Any], out: Path, *inputs: Path) -> Any:
    """The result of a sound run; None after a refusal that says where and what to do and left nothing half done."""
    before = [state(root) for root in inputs]
    try:
        return action()
    except Q38Error as error:
        assert error.where, f"no place: {error}"
        assert error.remedy, f"no remedy: {error}"
        assert "\n" not in str(error)
        left = [p for p in out.rglob("*") if p.is_file()] if out.exists() else []
        assert not [p for p in left if p.name in ("MANIFEST.json", "ple.json", "config.json", INDEX)]
        assert not [p for p in left if p.name.endswith(TEMPORARY)]
        return None
    finally:
        assert [state(root) for root in inputs] == before


@fuzz
@given(st.data())
def test_inspect_reports_or_refuses_any_damage(bases: dict[str, Path], data: st.DataObject) -> None:
    base = data.draw(st.sampled_from(["bf16", "fp8", "quantized"]))
    with tempfile.TemporaryDirectory() as directory:
        root = clone(bases[base], Path(directory) / "in" / "model")
        damage(root, data.draw)
        result = attempt(lambda: inspect(root, deep=True), Path(directory) / "out", root)
        if result is not None:
            assert all(f.what and f.remedy and (f.file or f.tensor or f.code) for f in result.findings.kept)
            json.dumps(result.to_dict())


@fuzz
@given(st.data())
def test_plan_computes_or_refuses_any_config(bases: dict[str, Path], data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory) / "model"
        root.mkdir()
        shutil.copy(bases["config"], root / "config.json")
        if data.draw(st.booleans()):
            mutate_json(root / "config.json", data.draw, ("text_config",))
        else:
            mutate_json(root / "config.json", data.draw)
        attempt(
            lambda: plan_recipe(
                root, str(bases["recipe"]), gpu="24GiB", ram="30GiB", settings=SglangSettings(kv="fp8")
            ),
            Path(directory) / "out",
            root,
        )


@fuzz
@given(st.data())
def test_split_ple_makes_a_whole_table_or_refuses_any_damage(
    bases: dict[str, Path], data: st.DataObject
) -> None:
    base = data.draw(st.sampled_from(["bf16", "fp8"]))
    with tempfile.TemporaryDirectory() as directory:
        root, out = clone(bases[base], Path(directory) / "model"), Path(directory) / "out"
        damage(root, data.draw)
        if attempt(lambda: split_ple(root, out), out, root) is not None:
            assert verify_ple(out, against=root, full=True)["ok"]


@fuzz
@given(st.data())
def test_requant_int8_makes_a_whole_checkpoint_or_refuses_any_damage(
    bases: dict[str, Path], data: st.DataObject
) -> None:
    with tempfile.TemporaryDirectory() as directory:
        model, source = (clone(bases[b], Path(directory) / b) for b in ("quantized", "bf16"))
        out = Path(directory) / "out"
        damage(data.draw(st.sampled_from([model, model, source])), data.draw)
        recipe = load_recipe(bases["recipe"])
        action = lambda: requant_int8(model, out, source=source, recipe=recipe, threads=1)  # noqa: E731
        if attempt(action, out, model, source) is not None:
            assert Checkpoint.open(out).tensors
