import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.models.qwen4_exp.configuration_qwen4_exp import Qwen4ExpTextConfig
from transformers.models.qwen4_exp.modeling_qwen4_exp import Qwen4ExpTextNGramEmbedding

from q38.base.errors import InputError
from q38.model.ngram import head_offsets, head_sizes, last_row_ids, multipliers, row_ids, table_rows
from q38.model.shape import ModelShape
from tests.ple.sources import config

EOS = 3


def both(index: int, **text):
    """The same two-table model for q38 and for transformers (its n-gram module of PLE layer `index`)."""
    raw = config(**{"ple_layer_ids": [1, 3], "eos_token_id": EOS, **text})
    theirs = Qwen4ExpTextConfig.from_dict({**raw["text_config"], "num_hidden_layers": 4})
    module = Qwen4ExpTextNGramEmbedding(theirs, theirs.ple_embed_dim, 0, index)
    return ModelShape.from_config(raw), module


CASES = [
    {},
    {"seed": 0},
    {"seed": 99, "ngram_size": 4, "heads_per_ngram": 4, "ple_embed_dim": 240},
    {"ngram_size": 2, "heads_per_ngram": 16},
]


@pytest.mark.parametrize("text", CASES)
@pytest.mark.parametrize("index", [0, 1])
def test_the_constants_are_those_of_transformers(index, text):
    shape, module = both(index, **text)
    assert list(multipliers(shape, index)) == module.layer_multipliers.tolist()
    assert list(head_sizes(shape.ngram, index)) == module.ngram_heads_vocab_sizes.tolist()
    assert list(head_offsets(shape.ngram, index)) == module.ngram_heads_offsets.tolist()
    assert table_rows(shape.ngram, index) == module.ngram_embedding.num_embeddings


@pytest.mark.parametrize("text", CASES)
@pytest.mark.parametrize("index", [0, 1])
def test_row_ids_are_those_of_transformers(index, text):
    shape, module = both(index, **text)
    looked_up = []
    module.ngram_embedding.register_forward_pre_hook(lambda _, ids: looked_up.append(ids[0]))
    tokens = torch.randint(0, 12, (3, 50), generator=torch.Generator().manual_seed(index))  # eos is frequent
    module(tokens, None)
    assert np.array_equal(row_ids(tokens.numpy(), shape, index), looked_up[0].numpy())


def test_the_constants_of_the_real_model():
    """Published in the release checkpoint: three multipliers, 16 primes, 320,001,536 rows."""
    shape = ModelShape.from_config(config(vocab_base=20_000_000, hidden_size=2560, vocab_size=248_320))
    assert multipliers(shape) == (23703573157769, 20109073645365, 8052911324071)
    assert (head_sizes(shape.ngram)[0], head_sizes(shape.ngram)[-1]) == (20_000_003, 20_000_171)
    assert (sum(head_sizes(shape.ngram)), table_rows(shape.ngram)) == (320_001_446, 320_001_536)


SHAPE = ModelShape.from_config(config(eos_token_id=EOS))
TOKENS = st.lists(st.integers(0, 2047), min_size=1, max_size=40)


@given(TOKENS)
def test_each_row_lies_in_its_head(tokens):
    ids = row_ids(np.array(tokens), SHAPE)
    first = np.array(head_offsets(SHAPE.ngram))
    assert ids.shape == (len(tokens), SHAPE.ngram.heads)
    assert (ids >= first).all()
    assert (ids < first + np.array(head_sizes(SHAPE.ngram))).all()


@given(TOKENS, TOKENS)
def test_nothing_before_an_eos_reaches_the_tokens_after_it(before, after):
    joined = row_ids(np.array([*before, EOS, *after]), SHAPE)
    alone = row_ids(np.array([EOS, *after]), SHAPE)
    assert np.array_equal(joined[len(before) + 1 :], alone[1:])


@given(TOKENS)
def test_rows_of_a_token_do_not_depend_on_later_ones(tokens):
    whole = row_ids(np.array(tokens), SHAPE)
    assert np.array_equal(row_ids(np.array(tokens[:-1] or tokens), SHAPE), whole[: len(tokens[:-1]) or 1])


def test_a_model_without_a_table_is_refused():
    shape = ModelShape.from_config(config(ple_layer_ids=[]))
    with pytest.raises(InputError, match="no n-gram table"):
        row_ids(np.array([1]), shape)


def test_a_model_without_eos_is_refused():
    shape = ModelShape.from_config(config(eos_token_id=None))
    with pytest.raises(InputError, match="eos_token_id"):
        row_ids(np.array([1]), shape)


def test_the_first_of_several_eos_tokens_counts():
    assert ModelShape.from_config(config(eos_token_id=[7, 8])).eos_token_id == 7


@pytest.mark.parametrize(("seed", "expected"), [(None, 1234), (0, 0), (5, 5)])
def test_the_seed_is_1234_where_the_config_is_silent(seed, expected):
    ngram = ModelShape.from_config(config(seed=seed)).ngram
    assert ngram is not None
    assert ngram.seed == expected


@pytest.mark.parametrize("text", CASES)
@given(tokens=st.lists(st.sampled_from([1, 2, 77, EOS]), min_size=1, max_size=6))
def test_the_rows_of_the_last_token_alone_are_those_of_the_whole_text(text: dict, tokens: list[int]) -> None:
    shape = ModelShape.from_config(config(**{"ple_layer_ids": [1, 3], "eos_token_id": EOS, **text}))
    window = tokens[-shape.ngram.ngram_size :]
    for index in (0, 1):
        assert last_row_ids(window, shape, index) == row_ids(np.array(tokens), shape, index)[-1].tolist()
