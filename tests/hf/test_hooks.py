import pytest
import torch
from transformers import DynamicCache
from transformers.models.qwen4_exp import modeling_qwen4_exp as modeling
from transformers.models.qwen4_exp.configuration_qwen4_exp import Qwen4ExpConfig, Qwen4ExpTextConfig

from q38.base.errors import InputError
from q38.checkpoint.index import Checkpoint, read_json
from q38.hf import hooks
from q38.hf.hooks import NgramLookup, ngram_lookup, qsa_shortcut, without_vision
from q38.ple.reader import PleTable
from tests.hf.conftest import logits


@pytest.fixture(scope="module")
def table(tiny_source):
    return PleTable.from_checkpoint(Checkpoint.open(tiny_source))


@pytest.fixture(scope="module")
def text_config(tiny_source):
    return Qwen4ExpTextConfig.from_dict(read_json(tiny_source / "config.json")["text_config"])


def ngram_embedding(config):
    return modeling.Qwen4ExpTextNGramEmbedding(config, config.ple_embed_dim, 1, 0)


def test_a_lookup_gives_what_the_embedding_in_memory_gives(reference, table, text_config, ids):
    with ngram_lookup(table):
        module = ngram_embedding(text_config)
    original = reference.get_decoder().layers[1].ple.ple_embedding
    assert torch.equal(module(ids, None), original(ids, None))


def test_a_lookup_has_no_parameters_and_no_state(table, text_config):
    with ngram_lookup(table):
        module = ngram_embedding(text_config)
    assert not list(module.parameters())
    assert set(module.state_dict()) == {"layer_multipliers", "ngram_heads_vocab_sizes", "ngram_heads_offsets"}


def test_the_constants_are_real_though_the_table_is_never_allocated(table, text_config):
    with ngram_lookup(table):
        module = ngram_embedding(text_config)
    plain = ngram_embedding(text_config)
    assert all(torch.equal(value, plain.state_dict()[name]) for name, value in module.state_dict().items())


def test_a_lookup_gives_the_dtype_it_is_asked_for(table):
    assert NgramLookup(table, torch.float32)(torch.tensor([[1, 2]])).dtype == torch.float32


def test_the_table_of_another_model_is_refused(table, text_config):
    other = Qwen4ExpTextConfig.from_dict({**text_config.to_dict(), "ngram_vocab_size_base": 2000})
    with ngram_lookup(table), pytest.raises(InputError, match="the model wants"):
        ngram_embedding(other)


def test_transformers_is_as_before_after_the_hook(table, text_config):
    before = modeling.Qwen4ExpTextNGramEmbedding.__init__
    with ngram_lookup(table):
        assert modeling.Qwen4ExpTextNGramEmbedding.__init__ is not before
    assert modeling.Qwen4ExpTextNGramEmbedding.__init__ is before


def test_a_model_can_be_built_without_its_vision_tower(tiny_source):
    config = Qwen4ExpConfig.from_dict(read_json(tiny_source / "config.json"))
    with torch.device("meta"), without_vision():
        model = modeling.Qwen4ExpForConditionalGeneration(config)
    assert model.model.visual is None
    assert not any(".visual." in name for name in model.state_dict())


# The sparse-attention indexer alone: budget 8, ratio 4, so at most 11 keys take the shortcut.
LIMIT = 11


@pytest.fixture(scope="module")
def indexer(text_config):
    config = Qwen4ExpTextConfig.from_dict({**text_config.to_dict(), "indexer_budget": 8})
    torch.manual_seed(0)
    return modeling.Qwen4ExpTextQSAIndexer(config, layer_idx=3)


def masks(length: int, padding: int, dtype: torch.dtype) -> torch.Tensor:
    """Causal [2, 1, length, length]; the second row has `padding` tokens of padding on its left."""
    causal = torch.ones(length, length).tril().bool().expand(2, 1, -1, -1).clone()
    causal[1, :, :, :padding] = False
    if dtype == torch.bool:
        return causal
    return torch.where(causal, torch.zeros((), dtype=dtype), torch.finfo(dtype).min)


def select(indexer, attention_mask: torch.Tensor) -> torch.Tensor:
    length = attention_mask.shape[-1]
    generator = torch.Generator().manual_seed(length)
    hidden = torch.randn(2, length, indexer.index_qk_proj.in_features, generator=generator)
    angles = torch.randn(2, length, 16, generator=generator)
    with torch.no_grad():
        return indexer(hidden, (angles.cos(), angles.sin()), attention_mask, None)


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("padding", [0, 1, 5])
def test_the_shortcut_equals_the_indexer_at_every_length_it_takes(indexer, dtype, padding):
    for length in range(max(1, padding), LIMIT + 1):
        mask = masks(length, padding, dtype)
        slow = select(indexer, mask)
        with qsa_shortcut():
            assert torch.equal(select(indexer, mask), slow)


def test_up_to_the_limit_the_slow_indexer_does_not_run(indexer, monkeypatch):
    def refuse(*args):
        raise AssertionError("the slow indexer ran")

    monkeypatch.setattr(hooks, "_full_forward", refuse)
    with qsa_shortcut():
        select(indexer, masks(LIMIT, 0, torch.bool))


@pytest.mark.parametrize("length", [LIMIT + 1, LIMIT + 9])
def test_beyond_the_limit_some_keys_are_dropped_and_the_slow_indexer_decides(indexer, length):
    mask = masks(length, 0, torch.bool)
    slow = select(indexer, mask)
    assert not torch.equal(slow, mask)
    with qsa_shortcut():
        assert torch.equal(select(indexer, mask), slow)


def test_a_whole_model_gives_the_same_bits(reference, ids):
    with qsa_shortcut():
        short = logits(reference, ids)
    assert torch.equal(short, logits(reference, ids))


def steps(indexer, text_config) -> list[torch.Tensor]:
    """Selections of a prefill of 7 tokens and of nine decode steps after it, through one cache."""
    cache = DynamicCache(config=text_config)
    hidden = torch.randn(2, 16, indexer.index_qk_proj.in_features, generator=torch.Generator().manual_seed(2))
    angles = torch.randn(2, 16, 16, generator=torch.Generator().manual_seed(3))
    causal = masks(16, 1, torch.bool)
    selected = []
    for start, stop in [(0, 7), *((n, n + 1) for n in range(7, 16))]:
        positions = (angles[:, :stop].cos(), angles[:, :stop].sin())
        with torch.no_grad():
            selected.append(indexer(hidden[:, start:stop], positions, causal[:, :, start:stop, :stop], cache))
    return selected


def test_decoding_past_the_limit_finds_the_keys_of_the_steps_before(indexer, text_config):
    slow = steps(indexer, text_config)
    with qsa_shortcut():
        short = steps(indexer, text_config)
    assert all(torch.equal(a, b) for a, b in zip(slow, short, strict=True))
    assert int(slow[-1].sum()) < int(masks(16, 1, torch.bool)[:, :, -1].sum())  # something was dropped
