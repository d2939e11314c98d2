"""The derived tensor list against the published totals of the real release."""

from __future__ import annotations

import json
import math
from collections import Counter
from typing import Any

import pytest

from q38.base.errors import InputError
from q38.checkpoint.header import ITEM_BITS
from q38.data import data_path
from q38.model.expected import (
    Expected,
    quantized_tensors,
    source_tensors,
    text_tensors,
    unfuse,
    vision_tensors,
)
from q38.model.names import Group, classify
from q38.model.shape import ModelShape

CONFIG = json.loads(data_path("assets", "models", "qwen3.8-flash-next.json").read_text())


def _bytes(tensors: list[Expected]) -> int:
    return sum(math.prod(t.shape) * ITEM_BITS[t.dtypes[0]] // 8 for t in tensors)


def test_the_bf16_release_has_1658_tensors_and_its_published_bytes() -> None:
    tensors = list(source_tensors(CONFIG))
    assert len(tensors) == 1_658
    assert _bytes(tensors) == 359_999_963_128


def test_the_fp8_release_stores_each_expert_alone() -> None:
    tensors = list(source_tensors(CONFIG, "fp8"))
    experts = [t for t in tensors if classify(t.name) is Group.EXPERTS]
    assert len(experts) == 48 * 512 * 3 * 2
    assert sum(t.name.endswith("weight_scale_inv") for t in experts) == len(experts) // 2
    assert next(t.shape for t in experts if t.name.endswith("gate_proj.weight_scale_inv")) == (5, 20)


def test_the_published_quantized_checkpoint_is_reproduced_to_the_byte() -> None:
    eight = {Group.GDN_IN, Group.GDN_OUT, Group.ATTENTION, Group.SHARED_EXPERT, Group.LM_HEAD}
    names = [u.name for t in text_tensors(ModelShape.from_config(CONFIG)) for u in unfuse(t)]
    bits = {
        n.removesuffix(".weight"): 2 if classify(n) is Group.EXPERTS else 8
        for n in names
        if classify(n) in eight | {Group.EXPERTS}
    }
    tensors = list(quantized_tensors(CONFIG, bits, 128, mtp=False, vision=False))
    assert len(tensors) == 222_856
    assert _bytes(tensors) == 38_755_352_600


def test_no_name_is_listed_twice_and_none_is_unclassified() -> None:
    for layout in ("bf16", "fp8"):
        names = Counter(t.name for t in source_tensors(CONFIG, layout))
        assert max(names.values()) == 1
        assert [n for n in names if classify(n) is Group.OTHER] == []


@pytest.mark.parametrize(
    "change",
    [{"hidden_size": None}, {"depth": "2"}, {"depth": 10**9}, {"patch_size": {}}, {"out_hidden_size": 0}],
    ids=str,
)
def test_a_vision_size_that_is_no_size_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=rf"vision_config\.{next(iter(change))}"):
        list(vision_tensors({**CONFIG["vision_config"], **change}))
