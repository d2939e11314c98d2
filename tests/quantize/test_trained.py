"""On a model that learned something: what tuning gains, what 8 bits cost, and that both source layouts agree.

docs/quality.md has the figures of the fully trained tiny model; here it learns for fewer steps and less is measured.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from q38.checkpoint.index import Checkpoint
from q38.checkpoint.writer import copy_file, write_json, write_safetensors
from q38.measure.evaluate import measure_quality
from q38.model.text import load_texts
from q38.quantize.driver import quantize
from q38.synth.config import tiny_config
from q38.synth.layout import fp8_layout
from q38.synth.tiny import synth_tiny

STEPS = 20
WIDE = {"gdn_in": 8, "shared_expert": 8, "gdn_out": 8, "attention": 8, "lm_head": 8}


@dataclass(frozen=True)
class Trained:
    """The same weights in both layouts of the release, their n-gram table, and text that none of it saw."""

    bf16: Path
    fp8: Path
    ple: Path
    text: Path


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    from q38.ple.split import split_ple
    from q38.synth import train

    root = tmp_path_factory.mktemp("trained")
    found = Trained(root / "bf16", root / "fp8", root / "ple", root / "held_out.jsonl")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "STEPS", STEPS)
        patch.setattr(train, "EVALUATED", 8)
        synth_tiny(found.bf16, trained=True)
    weights = Checkpoint.open(found.bf16)
    stored = {name: weights.read(name) for name in weights.tensors}
    found.fp8.mkdir()
    write_safetensors(found.fp8 / "model.safetensors", fp8_layout(stored))
    write_json(found.fp8 / "config.json", tiny_config(fp8=True))
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        copy_file(found.bf16 / name, found.fp8 / name)
    split_ple(found.bf16, found.ple)
    rows = load_texts("stdlib", "held_out").texts[::12]
    found.text.write_text(
        "".join(json.dumps({"text": row[:4000], "split": "held_out"}) + "\n" for row in rows)
    )
    return found


@dataclass(frozen=True)
class Quality:
    kl: float
    error: float
    floor: float


@pytest.fixture(scope="module")
def measured(
    trained: Trained, vary: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Quality]:
    """Quantize by a method and measure against the bf16 source; each once."""
    root, known = tmp_path_factory.mktemp("models"), {}

    def measure(model: Path) -> Quality:
        part = measure_quality(
            model, trained.bf16, ple=trained.ple, text=str(trained.text), tokens=1024, seqlen=128
        ).to_dict()
        kl = next(c for c in part["checks"] if c["name"] == "kl divergence")
        return Quality(kl["value"], kl["standard_error"], part["floor"]["kl divergence"]["value"])

    def build(method: str, *, bits: int = 2, source: Path | None = None, **experts: Any) -> Quality:
        key = f"{method}-{bits}-{source.name if source else 'bf16'}"
        if key not in known:
            recipe = vary(bits={"experts": bits, **WIDE}, experts={"method": method, **experts})
            calibration = recipe.calibration.model_copy(update={"samples": 24, "seqlen": 128})
            recipe = recipe.model_copy(update={"calibration": calibration})
            quantize(source or trained.bf16, root / key, recipe, ple=trained.ple)
            known[key] = measure(root / key)
        return known[key]

    build.measure = measure  # type: ignore[attr-defined]
    return build


def test_tuned_two_bits_beat_plain_rounding(measured: Callable[..., Quality]) -> None:
    plain, tuned = measured("rtn"), measured("expert-local", iters=20, rows=128)
    assert plain.kl > 20 * plain.floor
    assert tuned.kl < plain.kl / 1.2
    assert plain.kl - tuned.kl > 3 * (plain.error + tuned.error)


def test_eight_bits_cost_less_than_a_thousandth_of_a_nat(measured: Callable[..., Quality]) -> None:
    wide = measured("rtn", bits=8)
    assert wide.floor < wide.kl < 1e-3


def test_both_source_layouts_agree_within_the_rounding_of_fp8(
    trained: Trained, measured: Callable[..., Quality]
) -> None:
    rounding = measured.measure(trained.fp8)  # type: ignore[attr-defined]
    from_bf16, from_fp8 = measured("rtn"), measured("rtn", source=trained.fp8)
    assert rounding.kl < 0.2 * from_bf16.kl
    # A small divergence is a squared distance: the two models lie no farther apart, seen from the source, than
    # the two sources do.
    assert abs(math.sqrt(from_fp8.kl) - math.sqrt(from_bf16.kl)) < math.sqrt(rounding.kl)
