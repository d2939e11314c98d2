"""ModelShape: nested and flat configs, the three spellings of a layer, and what is refused."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from q38.base.errors import InputError
from q38.data import data_path
from q38.model.shape import ATTENTION_SPELLINGS, ModelShape

REAL = json.loads(data_path("assets", "models", "qwen3.8-flash-next.json").read_text())


def config(**changes: Any) -> dict[str, Any]:
    """The real config with other text_config fields; None removes one."""
    value = copy.deepcopy(REAL)
    value["text_config"].update(changes)
    value["text_config"] = {k: v for k, v in value["text_config"].items() if v is not None}
    return value


def test_the_real_model_has_36_linear_and_12_attention_layers() -> None:
    shape = ModelShape.from_config(REAL)
    assert shape.num_layers == 48
    assert shape.attention_layers == tuple(range(3, 48, 4))
    assert (shape.hidden_size, shape.num_experts, shape.num_experts_per_tok) == (2560, 512, 10)
    assert (shape.eos_token_id, shape.mtp_layers, shape.tied) == (248044, 1, False)


def test_the_ngram_table_sits_on_the_second_layer() -> None:
    ngram = ModelShape.from_config(REAL).ngram
    assert ngram is not None
    assert ngram.layer_ids == (1,)  # the config counts from one
    assert (ngram.heads, ngram.dim, ngram.parts, ngram.seed) == (16, 160, 128, 1234)


def test_a_flat_text_config_gives_the_same_shape() -> None:
    flat = {**REAL["text_config"], "model_type": "qwen4_exp_text"}
    assert ModelShape.from_config(flat) == ModelShape.from_config(REAL)


@pytest.mark.parametrize("spelling", ATTENTION_SPELLINGS)
def test_the_spellings_of_attention_mean_the_same(spelling: str) -> None:
    layers = [spelling if kind == "full_attention" else kind for kind in REAL["text_config"]["layer_types"]]
    assert ModelShape.from_config(config(layer_types=layers)) == ModelShape.from_config(REAL)


def test_layer_types_follow_from_the_interval_where_they_are_absent() -> None:
    assert ModelShape.from_config(config(layer_types=None)) == ModelShape.from_config(REAL)
    shape = ModelShape.from_config(config(layer_types=None, full_attention_interval=2, num_hidden_layers=4))
    assert shape.layer_types == ("linear_attention", "full_attention") * 2


def test_an_unknown_layer_type_is_named_with_its_index() -> None:
    layers = [*REAL["text_config"]["layer_types"][:-1], "sliding_attention"]
    with pytest.raises(InputError, match=r"layer_types\[47\] is 'sliding_attention'"):
        ModelShape.from_config(config(layer_types=layers))


def test_a_wrong_number_of_layer_types_is_refused() -> None:
    with pytest.raises(InputError, match="48 layer_types for num_hidden_layers 47"):
        ModelShape.from_config(config(num_hidden_layers=47))


@pytest.mark.parametrize("value", [[], "linear_attention", {}])
def test_layer_types_that_are_no_list_are_refused(value: Any) -> None:
    with pytest.raises(InputError, match="layer_types is missing or empty"):
        ModelShape.from_config(config(layer_types=value))


@pytest.mark.parametrize("field", ["hidden_size", "num_experts", "head_dim", "indexer_budget", "hc_count"])
def test_a_missing_field_is_named(field: str) -> None:
    with pytest.raises(InputError, match=f"text_config.{field} is missing"):
        ModelShape.from_config(config(**{field: None}))


@given(
    field=st.sampled_from(["hidden_size", "vocab_size", "linear_num_value_heads"]),
    value=st.one_of(st.integers(max_value=0), st.floats(), st.text(), st.booleans(), st.lists(st.integers())),
)
def test_a_field_that_is_no_positive_integer_is_refused(field: str, value: Any) -> None:
    with pytest.raises(InputError, match="not a positive integer"):
        ModelShape.from_config(config(**{field: value}))


@pytest.mark.parametrize(
    "value", [{}, {"model_type": "qwen3_moe"}, {"model_type": "qwen4_exp", "text_config": 3}]
)
def test_another_model_is_refused(value: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=r"not qwen4_exp|no model_type"):
        ModelShape.from_config(value)


@pytest.mark.parametrize("ids", [[0], [49], ["2"], [True]])
def test_ple_layers_outside_the_model_are_refused(ids: list[Any]) -> None:
    with pytest.raises(InputError, match=r"are not in 1\.\.48\. They count from one"):
        ModelShape.from_config(config(ple_layer_ids=ids))


def test_a_model_without_ple_layers_has_no_ngram_table() -> None:
    assert ModelShape.from_config(config(ple_layer_ids=[])).ngram is None


def test_ple_width_defaults_to_the_hidden_size() -> None:
    ngram = ModelShape.from_config(config(ple_embed_dim=None)).ngram
    assert ngram is not None
    assert ngram.embed_dim == 2560


def test_a_ple_width_that_the_heads_do_not_divide_is_refused() -> None:
    with pytest.raises(InputError, match="2561 is not a multiple of 16 n-gram heads"):
        ModelShape.from_config(config(ple_embed_dim=2561))


@pytest.mark.parametrize(("given_seed", "seed"), [(None, 1234), (0, 0), (7, 7)])
def test_the_seed_of_the_hash_is_1234_where_the_config_is_silent(given_seed: int | None, seed: int) -> None:
    ngram = ModelShape.from_config(config(seed=given_seed)).ngram
    assert ngram is not None
    assert ngram.seed == seed


@pytest.mark.parametrize(("value", "first"), [(5, 5), ([5, 6], 5), ([], None)])
def test_the_first_of_several_eos_tokens_counts(value: Any, first: int | None) -> None:
    assert ModelShape.from_config(config(eos_token_id=value)).eos_token_id == first


def test_tying_is_read_from_either_level() -> None:
    value = config(tie_word_embeddings=None)
    value["tie_word_embeddings"] = True
    assert ModelShape.from_config(value).tied


def test_a_refusal_names_the_file() -> None:
    with pytest.raises(InputError) as caught:
        ModelShape.from_config({}, where="/models/x/config.json")
    assert caught.value.where == "/models/x/config.json"


@pytest.mark.parametrize(
    "values",
    [
        {"layer_types": None, "num_hidden_layers": 10**12},
        {"layer_types": None, "num_hidden_layers": "48"},
        {"layer_types": None, "full_attention_interval": 0},
        {"num_experts": 2**31 - 1},
        {"mtp_num_hidden_layers": 10**9},
        {"mtp_num_hidden_layers": "one"},
        {"heads_per_ngram": 10**9},
        {"ple_embed_dim": 2**30, "heads_per_ngram": 2**28},
        {"split_ngram_parts": 10**9},
        {"ngram_vocab_size_base": 10**30},
        {"hidden_size": 2**31},
        {"ple_layer_ids": 2},
        {"seed": "x"},
        {"seed": -1},
        {"eos_token_id": "</s>"},
        {"eos_token_id": [2.5]},
    ],
    ids=str,
)
def test_a_size_that_no_model_has_is_refused_at_once(values: dict[str, Any]) -> None:
    with pytest.raises(InputError) as caught:
        ModelShape.from_config(config(**values))
    assert caught.value.remedy
