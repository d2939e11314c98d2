"""Is everything there that config.json promises, in the shape it promises, and nothing else?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from q38.base.errors import InputError
from q38.base.progress import SILENT, Progress
from q38.checkpoint.index import read_json
from q38.checkpoint.job import read_manifest
from q38.checkpoint.packing import symmetric_zeros
from q38.measure.checks import SHOWN_FAULTS, Check, Fault, Part
from q38.measure.files import check_files
from q38.measure.stored import Stored, file_of
from q38.measure.tokenizer import (
    TOKENIZER,
    TOKENIZER_CONFIG,
    chat_template,
    read_tokenizer,
    token_ids,
    tokenizer_identity,
)
from q38.model.expected import Expected, ngram_tensors, quantized_tensors, source_tensors
from q38.model.names import EXPERT, LAYERS, PACKABLE, Group, classify
from q38.model.ngram import constants, table_rows
from q38.ple.find import PLE_JSON, find_ple
from q38.ple.table import read_info
from q38.recipe.bits import check_resolution, fused_modules
from q38.recipe.resolve import HIGH, resolve_loader


def check_structure(
    stored: Stored, *, source: Path | None = None, ple: Path | None = None, progress: Progress = SILENT
) -> Part:
    """Compare files, tensors, config and tokenizer with each other.

    Args:
        source: the checkpoint this one was made from; adds the comparison of the tokenizers.
        ple: directory of the split n-gram table, if it is not where `find_ple` looks.
    """
    expected = {tensor.name: tensor for tensor in _expected(stored)}
    checks = [
        Check.of_faults(
            "index and shards", stored.faults, checked=len(stored.checkpoint.headers), unit="files"
        ),
        _manifest(stored.root),
        Check.of_faults("tensors present", _missing(stored, expected), checked=len(expected)),
        Check.of_faults("no other tensors", _unexpected(stored, expected), checked=len(stored.tensors)),
        Check.of_faults("shapes and dtypes", _misshapen(stored, expected), checked=len(expected)),
    ]
    if stored.layout == "quantized":
        checks += [_zero_words(stored, progress), _config(stored), _resolution(stored), _fused(stored)]
    checks += [_ngram_table(stored, ple), _ngram_constants(stored), _tokenizer(stored, source)]
    data = {
        "layout": stored.layout,
        "dropped": [part for part, there in _optional(stored).items() if not there],
    }
    return Part("structure", checks, data)


def _optional(stored: Stored) -> dict[str, bool]:
    """Parts that a checkpoint may leave out as a whole, and whether this one has to have them.

    Loaders build the vision tower unless config.json says language_model_only, so it may be left out only then.
    """
    config = stored.checkpoint.config
    no_vision = not config.get("vision_config") or config.get("language_model_only", False)
    return {
        "vision": stored.has("model.visual.") or not no_vision,
        "mtp": stored.has("mtp."),
        "n-gram table": any(".ngram_embedding." in name for name in stored.tensors),
    }


def _expected(stored: Stored) -> Iterator[Expected]:
    """Every tensor of this checkpoint: config.json's, less the parts it leaves out, at the widths stored."""
    kept = _optional(stored)
    config = stored.checkpoint.config
    if stored.layout == "quantized":
        group_size = int(stored.quantization.get("group_size", 0))
        bits = {**stored.bits, **_announced(stored)}
        yield from quantized_tensors(config, bits, group_size, mtp=kept["mtp"], vision=kept["vision"])
        if kept["n-gram table"]:
            yield from (
                t
                for t in ngram_tensors(stored.shape, _ngram_layout(stored))
                if classify(t.name) is Group.NGRAM
            )
        return
    for tensor in source_tensors(config, stored.layout):
        group = classify(tensor.name)
        left_out = (
            (group is Group.VISION and not kept["vision"])
            or (group in (Group.MTP, Group.MTP_EXPERTS) and not kept["mtp"])
            or (group is Group.NGRAM and not kept["n-gram table"])
        )
        if not left_out:
            yield tensor


def _announced(stored: Stored) -> dict[str, int]:
    """Widths by config.json, for the matrices whose own tensors do not tell."""
    absent = [module for module in stored.matrices if not stored.bits.get(module)]
    return {
        m: resolve_loader(m, stored.quantization, stored.matrices).bits if classify(m) in PACKABLE else HIGH
        for m in absent
    }


def _ngram_layout(stored: Stored) -> Any:
    fp8 = any(".ngram_embedding." in name and t.dtype == "F8_E4M3" for name, t in stored.tensors.items())
    return "fp8" if fp8 else "bf16"


def _manifest(root: Path) -> Check:
    try:
        manifest = read_manifest(root)
    except InputError as error:
        return Check.of_faults(
            "manifest", [Fault(Path(error.where or "").name, None, error.what)], checked=1, unit="files"
        )
    if manifest is None:
        return Check.skipped("manifest", "no MANIFEST.json")
    return check_files(root, manifest)


def _missing(stored: Stored, expected: Mapping[str, Expected]) -> list[Fault]:
    return [Fault("-", name, "is missing") for name in expected if name not in stored.tensors]


def _unexpected(stored: Stored, expected: Mapping[str, Expected]) -> list[Fault]:
    return [
        Fault(info.file.name, name, "has no place in this model")
        for name, info in stored.tensors.items()
        if name not in expected
    ]


def _misshapen(stored: Stored, expected: Mapping[str, Expected]) -> list[Fault]:
    faults = []
    for name, wanted in expected.items():
        info = stored.tensors.get(name)
        if info is None:
            continue
        if info.shape != wanted.shape:
            faults.append(
                Fault(
                    info.file.name,
                    name,
                    f"has shape {list(info.shape)}, config.json implies {list(wanted.shape)}",
                )
            )
        elif info.dtype not in wanted.dtypes:
            faults.append(
                Fault(info.file.name, name, f"is {info.dtype}, expected {' or '.join(wanted.dtypes)}")
            )
    return faults


def _zero_words(stored: Stored, progress: Progress) -> Check:
    """Every zero point of a symmetric tensor is 2^(bits-1), stored as 2^(bits-1) - 1 in every field."""
    import torch

    rows = lru_cache(lambda n, bits: symmetric_zeros(1, n, bits))  # one per width and size, not per matrix
    faults, checked = [], 0
    with progress.task("zero points", len(stored.bits), "matrices") as task:
        for module, bits in stored.bits.items():
            task.advance(1)
            info = stored.tensors.get(f"{module}.qzeros")
            if bits in (0, HIGH) or info is None or len(info.shape) != 2:
                continue
            checked += 1
            wanted = rows(stored.matrices[module][0], bits)  # [1, N * bits / 32] int32
            words = stored.checkpoint.read(info.name)  # [groups, N * bits / 32] int32
            if words.dtype != torch.int32 or words.shape[1] != wanted.shape[1]:
                continue  # reported as a wrong shape
            wrong = words != wanted
            if wrong.any():
                row, column = wrong.nonzero()[0].tolist()
                found, right = (int(w) & 0xFFFFFFFF for w in (words[row, column], wanted[0, column]))
                what = (
                    f"{int(wrong.sum())} of {words.numel()} words, first [{row}, {column}]: 0x{found:08X}, "
                    f"a symmetric tensor has 0x{right:08X}"
                )
                faults.append(Fault(info.file.name, info.name, what))
    return Check.of_faults("zero-point words", faults, checked=checked, unit="matrices")


def _config(stored: Stored) -> Check:
    """The fields of quantization_config that no tensor shape can confirm."""
    found = stored.quantization
    wanted = {"packing_format": "auto_round:auto_gptq", "sym": True, "data_type": "int"}
    faults = [
        Fault("config.json", None, f"quantization_config.{key} is {found.get(key)!r}, expected {value!r}")
        for key, value in wanted.items()
        if found.get(key) != value
    ]
    beside = stored.root / "quantization_config.json"
    if beside.exists() and read_json(beside) != found:
        faults.append(
            Fault(
                beside.name, None, "differs from quantization_config of config.json; engines may read either"
            )
        )
    return Check.of_faults(
        "quantization_config", faults, checked=len(wanted) + beside.exists(), unit="fields"
    )


def _resolution(stored: Stored) -> Check:
    """Both engines, by their own rules, read every matrix at the width its tensors have."""
    bits = {**stored.bits, **_announced(stored)}
    faults: list[Fault] = []
    if _disagreement(stored, bits):  # then find out where, one module at a time
        for module, width in bits.items():
            if what := _disagreement(stored, {module: width}):
                faults.append(Fault(file_of(stored.tensors, module), module, what))
            if len(faults) == SHOWN_FAULTS:
                break
        faults = faults or [Fault("config.json", None, _disagreement(stored, bits) or "")]
    return Check.of_faults("bits by both engines' rules", faults, checked=len(bits), unit="matrices")


def _disagreement(stored: Stored, bits: Mapping[str, int]) -> str | None:
    try:
        check_resolution(stored.quantization, bits)
    except (InputError, ValueError) as error:
        return error.what if isinstance(error, InputError) else str(error)
    except KeyError as error:
        return f"quantization_config has no {error}"
    return None


def _fused(stored: Stored) -> Check:
    """Matrices that an engine multiplies as one have one width: fused projections, and all experts of a layer."""
    fused = fused_modules(stored.bits)
    groups = {name: [m for m in members if m in stored.bits] for name, members in fused.items()}
    for module in stored.bits:
        if match := EXPERT.match(module):
            groups.setdefault(f"{match['layer']}.mlp.experts", []).append(module)
    faults = []
    for name, members in groups.items():
        widths = {m: stored.bits[m] for m in members}
        if len(set(widths.values())) > 1:
            usual = max(set(widths.values()), key=list(widths.values()).count)
            odd = next(m for m, width in widths.items() if width != usual)
            what = f"is one matrix in the server; {odd} has {widths[odd]} bit, others {usual}"
            faults.append(Fault(file_of(stored.tensors, odd), name, what))
    return Check.of_faults("fused groups", faults, checked=len(groups), unit="groups")


def _ngram_table(stored: Stored, ple: Path | None) -> Check:
    """The n-gram table is in the checkpoint, or beside it with the rows that config.json implies."""
    name = "n-gram table"
    if stored.shape.ngram is None:
        return Check.skipped(name, "the model has none")
    if _optional(stored)[name]:
        return Check.of_faults(name, [], checked=1, unit="tables", note="in the checkpoint")
    faults = []
    try:
        directory = find_ple(stored.root, ple)
        if directory is None:
            faults.append(
                Fault(PLE_JSON, None, "is neither in the checkpoint nor beside it; name it with --ple")
            )
        else:
            info = read_info(directory)
            wanted = table_rows(stored.shape.ngram), stored.shape.ngram.dim
            if (info.rows, info.dim) != wanted:
                faults.append(
                    Fault(
                        PLE_JSON,
                        None,
                        f"{info.rows} rows of {info.dim}, config.json implies {wanted[0]} of {wanted[1]}",
                    )
                )
    except InputError as error:
        faults.append(Fault(Path(error.where or PLE_JSON).name, None, error.what))
    return Check.of_faults(name, faults, checked=1, unit="tables")


def _ngram_constants(stored: Stored) -> Check:
    """The int64 constants of the hash are those that config.json implies; a wrong one degrades without an error."""
    name = "n-gram constants"
    if stored.shape.ngram is None:
        return Check.skipped(name, "the model has none")
    faults, checked = [], 0
    for index, layer in enumerate(stored.shape.ngram.layer_ids):
        for key, values in constants(stored.shape, index).items():
            info = stored.tensors.get(f"{LAYERS}.{layer}.ple.ple_embedding.{key}")
            if info is None or info.shape != (len(values),):
                continue  # reported as missing or of a wrong shape
            checked += 1
            if tuple(stored.checkpoint.read(info.name).tolist()) != values:
                faults.append(Fault(info.file.name, info.name, "is not what config.json implies"))
    return Check.of_faults(name, faults, checked=checked)


def _tokenizer(stored: Stored, source: Path | None) -> Check:
    """The tokenizer's files are whole, its ids fit the embedding, and it is the source's."""
    faults: list[Fault] = []
    try:
        faults += _vocabulary(stored)
        if chat_template(stored.root) is None:
            faults.append(
                Fault(TOKENIZER_CONFIG, None, "has no chat template, and there is no chat_template.jinja")
            )
        if source is not None:
            ours, theirs = tokenizer_identity(stored.root), tokenizer_identity(source)
            faults += [
                Fault(TOKENIZER, None, f"{key} differs from the source's")
                for key in ours
                if ours[key] != theirs[key]
            ]
        read_json(stored.root / "generation_config.json")
    except InputError as error:
        faults.append(Fault(Path(error.where or TOKENIZER).name, None, error.what))
    return Check.of_faults("tokenizer", faults, checked=4, unit="files")


def _vocabulary(stored: Stored) -> Iterator[Fault]:
    ids = token_ids(read_tokenizer(stored.root))
    largest = max(ids.values(), default=-1)
    if largest >= stored.shape.vocab_size:
        yield Fault(
            TOKENIZER, None, f"token id {largest} is outside the vocabulary of {stored.shape.vocab_size}"
        )
    known = set(ids.values())
    if stored.shape.eos_token_id is not None and stored.shape.eos_token_id not in known:
        yield Fault(
            TOKENIZER, None, f"has no token with eos_token_id {stored.shape.eos_token_id} of config.json"
        )
    named = read_json(stored.root / TOKENIZER_CONFIG)
    for key in ("eos_token", "pad_token"):
        token = named.get(key)
        text = token.get("content") if isinstance(token, Mapping) else token
        if isinstance(text, str) and text not in ids:
            yield Fault(TOKENIZER_CONFIG, None, f"{key} '{text}' is not in {TOKENIZER}")
