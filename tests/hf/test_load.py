import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from q38.base.errors import InputError
from q38.checkpoint.fp8 import dequantize_blocks
from q38.checkpoint.index import INDEX, Checkpoint, read_json
from q38.checkpoint.packing import dequantize
from q38.checkpoint.writer import write_safetensors
from q38.hf.load import load_model, load_tokenizer, open_table, weight_bytes
from tests.hf.conftest import logits
from tests.measure.packed import copy_model, edit_json, edit_tensor

LAYERS = "model.language_model.layers"


def similarity(a: torch.Tensor, b: torch.Tensor) -> float:
    return torch.cosine_similarity(a.float().flatten(), b.float().flatten(), dim=0).item()


def refusal(path: Path, **options) -> str:
    with pytest.raises(InputError) as caught:
        load_model(path, **options)
    assert caught.value.remedy
    return str(caught.value)


def test_the_bf16_release_gives_the_bits_that_transformers_gives(tiny_source, reference, ids):
    assert torch.equal(logits(load_model(tiny_source), ids), logits(reference, ids))


def test_a_split_table_is_used_when_it_is_given(tiny_source, tiny_ple, reference, ids):
    model = load_model(tiny_source, ple=tiny_ple)
    assert model.get_decoder().layers[1].ple.ple_embedding.ngram_embedding.table.dtype == "F8_E4M3"
    assert 0.99 < similarity(logits(model, ids), logits(reference, ids)) < 1.0


def test_the_exact_table_in_the_checkpoint_comes_before_a_split_one_beside_it(
    tiny_source, tiny_ple, tmp_path
):
    copy_model(tiny_source, tmp_path / "source")
    shutil.copytree(tiny_ple, tmp_path / "ple")
    assert open_table(Checkpoint.open(tmp_path / "source")).dtype == "BF16"


def test_the_model_is_in_eval_mode_without_gradients_or_table(tiny_source):
    model = load_model(tiny_source)
    assert not model.training
    assert not any(p.requires_grad or p.is_meta for p in model.parameters())
    assert not any("ngram_embedding" in name for name in model.state_dict())


def test_experts_of_the_fp8_release_are_dequantized_exactly(tiny_source_fp8):
    model, stored = load_model(tiny_source_fp8), Checkpoint.open(tiny_source_fp8)
    experts = model.get_decoder().layers[2].mlp.experts

    def weight(expert: int, projection: str) -> torch.Tensor:
        name = f"{LAYERS}.2.mlp.experts.{expert}.{projection}.weight"
        return dequantize_blocks(stored.read(name), stored.read(f"{name}_scale_inv"))

    for e in range(experts.num_experts):
        gate_up = torch.cat([weight(e, "gate_proj"), weight(e, "up_proj")])
        assert torch.equal(experts.gate_up_proj[e], gate_up)
        assert torch.equal(experts.down_proj[e], weight(e, "down_proj"))


def test_the_fp8_release_speaks_like_the_bf16_one(tiny_source_fp8, reference, ids):
    assert similarity(logits(load_model(tiny_source_fp8), ids), logits(reference, ids)) > 0.99


def test_a_packed_checkpoint_without_vision_loads_and_speaks_like_its_source(
    tiny_packed, tiny_ple, reference, ids
):
    model = load_model(tiny_packed, ple=tiny_ple)
    assert model.model.visual is None
    assert similarity(logits(model, ids), logits(reference, ids)) > 0.8


def test_unpacked_matrices_hold_what_the_words_stand_for(tiny_packed, tiny_ple):
    model, stored = load_model(tiny_packed, ple=tiny_ple, unpack=True), Checkpoint.open(tiny_packed)
    for name, bits in (("mlp.experts.3.down_proj", 2), ("linear_attn.in_proj_z", 8)):
        module = f"{LAYERS}.0.{name}"
        words, zeros, scales = (stored.read(f"{module}.{part}") for part in ("qweight", "qzeros", "scales"))
        weight = model.get_submodule(module).weight
        assert torch.equal(weight, dequantize(words, zeros, scales, bits).bfloat16())


def test_packed_and_unpacked_give_the_same_answer(tiny_packed, tiny_ple, ids):
    packed = logits(load_model(tiny_packed, ple=tiny_ple), ids)
    assert similarity(packed, logits(load_model(tiny_packed, ple=tiny_ple, unpack=True), ids)) > 0.999


@pytest.mark.parametrize("name", ["tiny_source", "tiny_source_fp8", "tiny_packed"])
def test_every_layout_loads_in_float32(name, request, tiny_ple, ids):
    model = load_model(request.getfixturevalue(name), ple=tiny_ple, dtype=torch.float32)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert logits(model, ids).dtype == torch.float32


@pytest.mark.parametrize("spelling", ["qwen_sparse_attention", "indexed_attention"])
def test_other_spellings_of_the_layer_types_load(tiny_source, tmp_path, reference, ids, spelling):
    copy_model(tiny_source, tmp_path / "source")

    def respell(config):
        kinds = config["text_config"]["layer_types"]
        config["text_config"]["layer_types"] = [spelling if k == "full_attention" else k for k in kinds]

    edit_json(tmp_path / "source" / "config.json", respell)
    assert torch.equal(logits(load_model(tmp_path / "source"), ids), logits(reference, ids))


@pytest.mark.parametrize("prefix", ["model.", "model.language_model."])
def test_a_text_only_checkpoint_loads(tiny_source, tmp_path, reference, ids, prefix):
    """A flat config, and either spelling of the names."""
    tensors = {}
    for file in sorted(tiny_source.glob("*.safetensors")):
        tensors |= load_file(file)
    text = {
        name.replace("model.language_model.", prefix): value
        for name, value in tensors.items()
        if not name.startswith(("mtp.", "model.visual."))
    }
    write_text_only(tiny_source, tmp_path / "text", text)
    model = load_model(tmp_path / "text")
    assert type(model).__name__ == "Qwen4ExpForCausalLM"
    assert torch.equal(logits(model, ids), logits(reference, ids))


def write_text_only(source: Path, out: Path, tensors: dict[str, torch.Tensor]) -> None:
    out.mkdir()
    config = read_json(source / "config.json")["text_config"]
    config |= {"model_type": "qwen4_exp_text", "architectures": ["Qwen4ExpForCausalLM"]}
    (out / "config.json").write_text(json.dumps(config))
    write_safetensors(out / "model.safetensors", tensors)


def test_a_missing_tensor_is_named(tiny_source, tmp_path):
    copy_model(tiny_source, tmp_path / "source")
    edit_tensor(tmp_path / "source", f"{LAYERS}.0.linear_attn.out_proj.weight", lambda t: None)
    assert f"1 tensors are missing, first {LAYERS}.0.linear_attn.out_proj.weight" in refusal(
        tmp_path / "source"
    )


def test_a_missing_expert_of_the_fp8_release_is_refused(tiny_source_fp8, tmp_path):
    copy_model(tiny_source_fp8, tmp_path / "source")
    for suffix in ("weight", "weight_scale_inv"):
        edit_tensor(tmp_path / "source", f"{LAYERS}.1.mlp.experts.5.up_proj.{suffix}", lambda t: None)
    assert "layers.1.mlp.experts.5.up_proj.weight is missing" in refusal(tmp_path / "source")


def test_fp8_codes_without_their_scale_are_refused(tiny_source_fp8, tmp_path):
    copy_model(tiny_source_fp8, tmp_path / "source")
    edit_tensor(tmp_path / "source", f"{LAYERS}.1.mlp.experts.5.up_proj.weight_scale_inv", lambda t: None)
    assert "experts.5.up_proj.weight is fp8 and has no" in refusal(tmp_path / "source")


def test_an_unexpected_tensor_is_named(tiny_source, tmp_path):
    copy_model(tiny_source, tmp_path / "source")
    checkpoint = Checkpoint.open(tmp_path / "source")
    write_safetensors(
        tmp_path / "source" / "more.safetensors", {"model.language_model.extra": torch.zeros(2)}
    )
    edit_json(
        tmp_path / "source" / INDEX,
        lambda index: index["weight_map"].update({"model.language_model.extra": "more.safetensors"}),
    )
    assert "1 tensors are unexpected, first model.language_model.extra" in refusal(checkpoint.path)


def test_another_shape_is_named(tiny_source, tmp_path):
    copy_model(tiny_source, tmp_path / "source")
    edit_tensor(tmp_path / "source", "lm_head.weight", lambda t: t[:100].clone())
    assert "tensor lm_head.weight has shape [100, 256]" in refusal(tmp_path / "source")


def test_a_missing_matrix_of_a_packed_checkpoint_is_named(tiny_packed, tiny_ple, tmp_path):
    copy_model(tiny_packed, tmp_path / "model")
    edit_tensor(tmp_path / "model", f"{LAYERS}.0.mlp.experts.1.up_proj.qweight", lambda t: None)
    assert "experts.1.up_proj.qweight" in refusal(tmp_path / "model", ple=tiny_ple)


def test_missing_vision_tensors_need_the_word_of_the_config(tiny_packed, tiny_ple, tmp_path):
    copy_model(tiny_packed, tmp_path / "model")
    edit_json(tmp_path / "model" / "config.json", lambda config: config.pop("language_model_only"))
    message = refusal(tmp_path / "model", ple=tiny_ple)
    assert "first model.visual." in message
    assert "Set language_model_only to true" in message


def test_vision_tensors_are_ignored_where_the_config_says_text_only(tiny_source, tmp_path, reference, ids):
    copy_model(tiny_source, tmp_path / "source")
    edit_json(tmp_path / "source" / "config.json", lambda config: config.update(language_model_only=True))
    model = load_model(tmp_path / "source")
    assert model.model.visual is None
    assert torch.equal(logits(model, ids), logits(reference, ids))


def test_a_checkpoint_with_no_table_anywhere_is_refused(tiny_packed, tmp_path):
    copy_model(tiny_packed, tmp_path / "inner" / "model")
    assert "Give its directory with --ple" in refusal(tmp_path / "inner" / "model")


def test_a_config_that_transformers_refuses_is_one_line(tiny_source, tmp_path):
    copy_model(tiny_source, tmp_path / "source")
    edit_json(tmp_path / "source" / "config.json", lambda c: c["text_config"].update(indexer_budget=63))
    assert "transformers refuses the config" in refusal(tmp_path / "source")


def test_the_tokenizer_loads_with_its_chat_template(tiny_source):
    tokenizer = load_tokenizer(tiny_source)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hello"}], tokenize=False, add_generation_prompt=True
    )
    assert tokenizer.decode(tokenizer(prompt).input_ids) == prompt


def test_a_directory_without_tokenizer_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"holds no tokenizer_config\.json"):
        load_tokenizer(tmp_path)


def test_a_broken_tokenizer_is_one_line(tiny_source, tmp_path):
    shutil.copy(tiny_source / "tokenizer_config.json", tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(InputError, match="the tokenizer cannot be loaded"):
        load_tokenizer(tmp_path)


def test_loading_and_running_say_nothing(tiny_source, tiny_packed, tiny_ple, ids, capfd):
    for path in (tiny_source, tiny_packed):
        logits(load_model(path, ple=tiny_ple), ids)
    captured = capfd.readouterr()
    assert (captured.out, captured.err) == ("", "")


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("tiny_source", {}),
        ("tiny_source", {"dtype": torch.float32}),
        ("tiny_source_fp8", {}),
        ("tiny_packed", {}),
        ("tiny_packed", {"unpack": True}),
        ("tiny_packed", {"dtype": torch.float32}),
    ],
)
def test_the_bytes_of_the_weights_are_known_before_they_are_loaded(request, tiny_ple, name, options):
    path = request.getfixturevalue(name)
    model = load_model(path, ple=tiny_ple, **options)
    tensors = {t.data_ptr(): t for t in (*model.parameters(), *model.buffers())}
    loaded = sum(t.numel() * t.element_size() for t in tensors.values())
    assert weight_bytes(Checkpoint.open(path), **options) == pytest.approx(loaded, rel=0.02)
