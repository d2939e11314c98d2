"""One entry per kind of damage: the checkpoint to start from, what is done to it, and the code it must get."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from q38.checkpoint.index import INDEX
from q38.checkpoint.writer import write_safetensors
from q38.quantize.rtn import round_to_nearest
from tests.inspection.broken import (
    damage,
    drop,
    drop_where,
    edit_config,
    edit_json,
    edit_tensor,
    edit_tensors,
    edit_text_config,
)

LAYERS = "model.language_model.layers"
PLE = f"{LAYERS}.1.ple.ple_embedding"
EXPERT = f"{LAYERS}.0.mlp.experts.2"
BF16, FP8, PACKED = "tiny_source", "tiny_source_fp8", "tiny_packed"


@dataclass(frozen=True)
class Fault:
    code: str
    what: str
    base: str
    break_it: Callable[[Path], object]
    deep: bool = False

    def __str__(self) -> str:
        return f"{self.code}: {self.what}"


def shard(root: Path, n: int = 1) -> Path:
    return sorted(root.glob("*.safetensors"))[n]


def quantization(change: Callable[[dict], object]) -> Callable[[Path], object]:
    return lambda root: edit_json(root / "config.json", lambda c: change(c["quantization_config"]))


def rule(key: str, entry: object) -> Callable[[Path], object]:
    return quantization(lambda q: q["extra_config"].update({key: entry}))


def repack(module: str, bits: int) -> Callable[[Path], object]:
    """Pack a matrix at another width; its config entry stays."""

    def change(root: Path) -> None:
        def apply(tensors: dict[str, torch.Tensor]) -> None:
            n = tensors[f"{module}.scales"].shape[1]
            k = tensors[f"{module}.scales"].shape[0] * 128
            packed = round_to_nearest(torch.randn(n, k), bits, 128)
            tensors.update({f"{module}.{part}": value for part, value in packed._asdict().items()})

        gather(root, module)
        edit_tensors(root, apply, file_of=f"{module}.scales")

    return change


def gather(root: Path, module: str) -> None:
    """Bring the three tensors of one packed matrix into one shard."""
    moved: dict[str, torch.Tensor] = {}
    for part in ("qweight", "qzeros"):
        name = f"{module}.{part}"
        edit_tensors(root, lambda t, name=name: moved.update({name: t.pop(name)}), file_of=name)
    edit_tensors(root, lambda t: t.update(moved), file_of=f"{module}.scales")


def add_shard(root: Path, tensors: dict[str, torch.Tensor], *, listed: bool) -> None:
    write_safetensors(root / "more.safetensors", tensors)
    if listed:
        edit_json(root / INDEX, lambda i: i["weight_map"].update(dict.fromkeys(tensors, "more.safetensors")))


def misplace(root: Path) -> None:
    def change(index: dict) -> None:
        holder = index["weight_map"]["lm_head.weight"]
        index["weight_map"]["lm_head.weight"] = next(
            f.name for f in root.glob("*.safetensors") if f.name != holder
        )

    edit_json(root / INDEX, change)


def split_experts(root: Path) -> None:
    name = f"{LAYERS}.0.mlp.experts.down_proj"

    def apply(tensors: dict[str, torch.Tensor]) -> None:
        for e, matrix in enumerate(tensors.pop(name)):
            tensors[f"{LAYERS}.0.mlp.experts.{e}.down_proj.weight"] = matrix

    edit_tensors(root, apply, file_of=name)


def beside(root: Path, change: Callable[[Path], object]) -> None:
    """A split table beside the model, changed."""
    from q38.ple.split import split_ple
    from tests.ple.sources import make_source

    source = make_source(root.parent / "table_source")
    split_ple(source, root.parent / "ple")
    shutil.rmtree(source)
    change(root.parent / "ple")


def truncate(directory: Path) -> None:
    with (directory / "ple.f8_e4m3.bin").open("r+b") as f:
        f.truncate(100)


def first(value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def change(tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.clone()
        tensor.view(-1)[0] = value
        return tensor

    return change


FAULTS = [
    # index and shards
    Fault("index-missing", "no index", BF16, lambda r: (r / INDEX).unlink()),
    Fault("index-broken", "cut off", BF16, lambda r: (r / INDEX).write_text('{"weight_map": {')),
    Fault("index-broken", "a list as weight_map", BF16, lambda r: edit_json(r / INDEX, lambda i: i.update(weight_map=[]))),
    Fault("index-file-absent", "a shard is missing", BF16, lambda r: shard(r).unlink()),
    Fault("index-tensor-absent", "a tensor is elsewhere", BF16, misplace),
    Fault("index-unlisted", "a tensor is not listed", BF16, lambda r: edit_json(r / INDEX, lambda i: i["weight_map"].pop("lm_head.weight"))),
    Fault("index-unlisted", "the whole table is not listed", BF16, lambda r: edit_json(r / INDEX, lambda i: i.update(weight_map={k: v for k, v in i["weight_map"].items() if "ngram" not in k}))),
    Fault("index-size", "another total", BF16, lambda r: edit_json(r / INDEX, lambda i: i["metadata"].update(total_size=1))),
    Fault("stray-file", "a shard too many", BF16, lambda r: add_shard(r, {"x": torch.zeros(1)}, listed=False)),
    Fault("shard-broken", "empty", BF16, lambda r: damage(shard(r), bytearray.clear)),
    Fault("shard-broken", "cut off", BF16, lambda r: damage(shard(r), lambda b: b.__delitem__(slice(-10, None)))),
    Fault("shard-broken", "bytes at the end", BF16, lambda r: damage(shard(r), lambda b: b.extend(b"x"))),
    Fault("shard-broken", "shifted offsets", BF16, lambda r: damage(shard(r), lambda b: b.__setitem__(slice(None), b.replace(b'"data_offsets":[0,', b'"data_offsets":[8,')))),
    Fault("shard-broken", "header is not JSON", BF16, lambda r: damage(shard(r), lambda b: b.__setitem__(8, 0))),
    Fault("duplicate-tensor", "in two shards", BF16, lambda r: add_shard(r, {"lm_head.weight": torch.zeros(1)}, listed=True)),
    # layout
    Fault("layout-unknown", "no experts", BF16, lambda r: drop_where(r, lambda n: ".experts." in n)),
    Fault("layout-config", "bf16 called fp8", BF16, lambda r: edit_config(r, quantization_config={"quant_method": "fp8"})),
    Fault("layout-config", "packed called gptq", PACKED, quantization(lambda q: q.update(quant_method="gptq"))),
    Fault("layout-config", "packed without a word", PACKED, lambda r: edit_json(r / "config.json", lambda c: c.pop("quantization_config"))),
    Fault("experts-mixed-layout", "one layer unfused", BF16, split_experts),
    # tensors
    Fault("tensor-missing", "a projection", BF16, lambda r: drop(r, f"{LAYERS}.0.linear_attn.out_proj.weight")),
    Fault("tensor-missing", "an expert", FP8, lambda r: drop(r, f"{EXPERT}.up_proj.weight")),
    Fault("tensor-missing", "words of an expert", PACKED, lambda r: drop(r, f"{EXPERT}.up_proj.qweight")),
    Fault("tensor-missing", "an MTP norm", BF16, lambda r: drop(r, "mtp.pre_fc_norm_hidden.weight")),
    Fault("tensor-missing", "a vision bias", BF16, lambda r: drop(r, "model.visual.merger.norm.bias")),
    Fault("tensor-unexpected", "another name", BF16, lambda r: add_shard(r, {"model.extra": torch.zeros(1)}, listed=True)),
    Fault("shape-wrong", "fewer rows", BF16, lambda r: edit_tensor(r, "lm_head.weight", lambda t: t[:9])),
    Fault("shape-wrong", "group size 64 in the config", PACKED, quantization(lambda q: q.update(group_size=64))),
    Fault("dtype-wrong", "float16", BF16, lambda r: edit_tensor(r, "lm_head.weight", torch.Tensor.half)),
    Fault("scale-missing", "of an expert", FP8, lambda r: drop(r, f"{EXPERT}.up_proj.weight_scale_inv")),
    Fault("scale-missing", "fp8 codes offered as weights", BF16, lambda r: edit_tensor(r, f"{LAYERS}.0.mlp.gate.weight", lambda t: t.to(torch.float8_e4m3fn))),
    # n-gram table
    Fault("ple-absent", "no table", BF16, lambda r: drop_where(r, lambda n: ".ngram_embedding." in n)),
    Fault("ple-not-beside", "packed, no table near", PACKED, lambda r: None),
    Fault("ple-elsewhere", "split off", PACKED, lambda r: beside(r, lambda p: None)),
    Fault("ple-dir-broken", "cut off", PACKED, lambda r: beside(r, truncate)),
    Fault("ple-shards", "one is missing", BF16, lambda r: drop(r, f"{PLE}.ngram_embedding.shard_3.weight")),
    Fault("ple-shards", "mixed dtypes", BF16, lambda r: edit_tensor(r, f"{PLE}.ngram_embedding.shard_3.weight", torch.Tensor.float)),
    Fault("ple-shards", "another width", BF16, lambda r: edit_tensor(r, f"{PLE}.ngram_embedding.shard_3.weight", lambda t: t[:, :8])),
    Fault("ple-parts", "another count", BF16, lambda r: edit_text_config(r, split_ngram_parts=5)),
    Fault("ple-rows", "the config wants more", BF16, lambda r: edit_text_config(r, ngram_vocab_size_base=2000)),
    Fault("ple-scale", "missing", FP8, lambda r: drop(r, f"{PLE}.ngram_embedding.weight_scale")),
    Fault("ple-scale", "zero", FP8, lambda r: edit_tensor(r, f"{PLE}.ngram_embedding.weight_scale", torch.zeros_like)),
    Fault("ple-scale", "two numbers", FP8, lambda r: edit_tensor(r, f"{PLE}.ngram_embedding.weight_scale", lambda t: t.repeat(2))),
    Fault("ple-constants", "another seed", BF16, lambda r: edit_text_config(r, seed=7)),
    Fault("ple-constants", "a changed head size", BF16, lambda r: edit_tensor(r, f"{PLE}.ngram_heads_vocab_sizes", lambda t: t + 1)),
    Fault("ple-layer-kind", "on an attention layer", BF16, lambda r: edit_text_config(r, ple_layer_ids=[4])),
    Fault("ple-eos", "no eos", BF16, lambda r: edit_text_config(r, eos_token_id=None)),
    # widths
    Fault("bits-width", "zero points cut", PACKED, lambda r: edit_tensor(r, f"{EXPERT}.up_proj.qzeros", lambda t: t[:, :3])),
    Fault("bits-config", "an entry at another width", PACKED, quantization(lambda q: q["extra_config"][f"{LAYERS}.0.linear_attn.in_proj_z"].update(bits=4))),
    Fault("bits-config", "group size -1", PACKED, quantization(lambda q: q.update(group_size=-1))),
    Fault("bits-config", "a packed lm_head without its entry", PACKED, quantization(lambda q: q["extra_config"].pop("lm_head"))),
    Fault("bits-config", "a fused runtime name is missing", PACKED, quantization(lambda q: q["extra_config"].pop(f"{LAYERS}.0.linear_attn.in_proj_qkvz"))),
    Fault("bits-config", "bits as text", PACKED, quantization(lambda q: q["extra_config"][f"{LAYERS}.0.linear_attn.in_proj_z"].update(bits="8"))),
    Fault("bits-config", "a group size as text", PACKED, quantization(lambda q: q["extra_config"]["lm_head"].update(group_size="128"))),
    Fault("bits-config", "extra_config is a number", PACKED, quantization(lambda q: q.update(extra_config=1.5))),
    Fault("bits-config", "block names are numbers", PACKED, quantization(lambda q: q.update(block_name_to_quantize=[1]))),
    Fault("bits-asymmetric", "sym false", PACKED, quantization(lambda q: q.update(sym=False))),
    Fault("bits-packing", "awq", PACKED, quantization(lambda q: q.update(packing_format="auto_round:auto_awq"))),
    Fault("rule-unmatched", "a name that is no module", PACKED, rule(f"{LAYERS}.99.mlp.gate", {"bits": 16})),
    Fault("rule-unmatched", "escaped dots", PACKED, rule(r".*linear_attn\\.nothing$", {"bits": 8})),
    Fault("rule-shadowed", "exact names come first", PACKED, rule(".*linear_attn.in_proj_z$", {"bits": 8})),
    Fault("rule-broken", "not a pattern", PACKED, rule("(unclosed", {"bits": 8})),
    Fault("fused-mixed", "z at 2 bits, qkv at 8", PACKED, repack(f"{LAYERS}.0.linear_attn.in_proj_z", 2)),
    Fault("experts-mixed", "one expert at 4 bits", PACKED, repack(f"{EXPERT}.down_proj", 4)),
    Fault("quantization-stale", "another file", PACKED, lambda r: (r / "quantization_config.json").write_text("{}")),
    # parts
    Fault("vision-absent", "dropped without a word", PACKED, lambda r: edit_json(r / "config.json", lambda c: c.pop("language_model_only"))),
    Fault("vision-dropped", "dropped on purpose", PACKED, lambda r: None),
    Fault("mtp-absent", "dropped", PACKED, lambda r: None),
    Fault("tokenizer-absent", "no tokenizer.json", BF16, lambda r: (r / "tokenizer.json").unlink()),
    Fault("chat-template-absent", "no template", BF16, lambda r: (r / "chat_template.jinja").unlink()),
    Fault("generation-config-absent", "no generation_config.json", BF16, lambda r: (r / "generation_config.json").unlink()),
    # values
    Fault("values-not-finite", "NaN in bf16", BF16, lambda r: edit_tensor(r, "lm_head.weight", first(float("nan"))), deep=True),
    Fault("values-not-finite", "infinite scale", PACKED, lambda r: edit_tensor(r, f"{EXPERT}.up_proj.scales", first(float("inf"))), deep=True),
    Fault("values-not-finite", "NaN code in fp8", FP8, lambda r: edit_tensor(r, f"{EXPERT}.up_proj.weight", lambda t: torch.full_like(t.view(torch.uint8), 0x7F).view(t.dtype)), deep=True),
    Fault("values-zero", "a zero matrix", BF16, lambda r: edit_tensor(r, "lm_head.weight", torch.zeros_like), deep=True),
    Fault("scale-zero", "a zero scale", PACKED, lambda r: edit_tensor(r, f"{EXPERT}.up_proj.scales", first(0.0)), deep=True),
    Fault("zeros-asymmetric", "another zero point", PACKED, lambda r: edit_tensor(r, f"{EXPERT}.up_proj.qzeros", first(0)), deep=True),
    Fault("hash-wrong", "not the file of the manifest", PACKED, lambda r: edit_tensor(r, "lm_head.scales", lambda t: t * 2), deep=True),
]  # fmt: skip
