"""A tiny Qwen4-Exp checkpoint in the layout of the real release, for trying every step on any machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from q38.base.errors import InputError
from q38.base.progress import SILENT, Progress
from q38.checkpoint.header import ITEM_BITS
from q38.checkpoint.index import INDEX, read_json
from q38.checkpoint.job import MANIFEST, Job
from q38.checkpoint.writer import (
    FileRecord,
    atomic_file,
    require_free_space,
    write_json,
    write_safetensors,
)
from q38.model.expected import source_tensors
from q38.model.text import load_texts
from q38.synth.chat import chat_texts
from q38.synth.config import generation_config, preprocessor_configs, tiny_config
from q38.synth.layout import fp8_layout, shard_names
from q38.synth.tokenizer import special_id, tokenizer_files
from q38.synth.weights import initial_tensor

if TYPE_CHECKING:
    import torch

SHARD_BYTES = 4 * 2**20
_EVERY = 4  # where a part of the local sources is enough, every fourth file
_SMALL_FILES = 2**20  # more than config, tokenizer and index take together


def plan_tiny(*, fp8: bool = False, layers: int = 4) -> dict[str, Any]:
    """What `synth_tiny` would write: {"tensors", "tensor_bytes"}. Writes nothing."""
    config = tiny_config(layers=layers, fp8=fp8)
    specs = list(source_tensors(config, "fp8" if fp8 else "bf16"))
    bits = sum(_numel(s.shape) * ITEM_BITS[s.dtypes[0]] for s in specs)
    return {"tensors": len(specs), "tensor_bytes": bits // 8}


def synth_tiny(
    out: Path,
    *,
    fp8: bool = False,
    trained: bool = False,
    seed: int = 0,
    layers: int = 4,
    fresh: bool = False,
    progress: Progress = SILENT,
) -> dict[str, Any]:
    """Write the checkpoint. The same options on the same machine give the same bytes.

    A killed run goes on with the same call; a kill during the training begins it anew.

    Args:
        out: a new or empty directory.
        fp8: the FP8 release layout instead of bf16.
        trained: train on the local Python sources for a fixed number of steps (about a minute).
        seed: seed of the weights and of the training batches.
        layers: a multiple of 4; every fourth is a sparse attention layer.
        fresh: start over if `out` holds an earlier run.

    Returns:
        {"tensors", "tensor_bytes", "shards", "training"}; "training" is None or its steps and losses.

    Raises:
        InputError: wrong options, or `out` holds something else.
        ResourceError: the disk is full.
    """
    if seed < 0:
        raise InputError(f"seed {seed} is negative", where="--seed", remedy="give 0 or more")
    config = tiny_config(layers=layers, fp8=fp8)
    text = load_texts("stdlib", "train")
    identity = {"config": config, "seed": seed, "text": text.sha256, "trained": trained}
    if trained:
        from q38.synth.train import schedule

        identity["training"] = schedule()
    with Job(out, "synth tiny", identity, fresh=fresh) as job:
        if job.up_to_date:
            return dict(read_json(out / MANIFEST)["result"])
        require_free_space(out, plan_tiny(fp8=fp8, layers=layers)["tensor_bytes"] + _SMALL_FILES)
        _write_small_files(job, config, text.texts)
        tensors = {s.name: initial_tensor(s, config, seed) for s in source_tensors(config)}
        training = None
        if trained:
            tensors, training = _train(job, tensors, config, text.texts, seed, progress)
        if fp8:
            tensors = fp8_layout(tensors)
        result = _write_shards(job, tensors, progress) | {"training": training}
        job.finish(result)
        return result


def _write_small_files(job: Job, config: dict[str, Any], texts: list[str]) -> None:
    if "files" in job.done:
        return
    values = {
        "config.json": config,
        "generation_config.json": generation_config(),
        **preprocessor_configs(),
    }
    files = {name: write_json(job.out / name, value) for name, value in values.items()}
    for name, content in tokenizer_files(texts[::_EVERY]).items():
        with atomic_file(job.out / name) as f:
            f.write(content.encode())
        files[name] = f.record()
    job.commit("files", files=files)


def _train(
    job: Job,
    tensors: dict[str, torch.Tensor],
    config: dict[str, Any],
    texts: list[str],
    seed: int,
    progress: Progress,
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Train once; the result waits in the job's state, so that a kill after it costs no second training."""
    from safetensors.torch import load_file

    from q38.synth.train import train

    scratch = job.state / "trained.safetensors"
    if "train" not in job.done:
        streams = {
            "code": _stream(job.out, texts[::_EVERY]),
            "chat": _stream(job.out, chat_texts(texts[::_EVERY])),
            "held_out": _stream(job.out, load_texts("stdlib", "held_out").texts[::_EVERY]),
        }
        trained, facts = train(tensors, config, **streams, seed=seed, progress=progress)
        write_safetensors(scratch, trained)
        job.commit("train", result=facts)
        return trained, facts
    return load_file(scratch), job.done["train"]["result"]


def _stream(directory: Path, texts: list[str]) -> torch.Tensor:
    """int64 [tokens] of all texts, each ended by <|endoftext|>."""
    import torch
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    end = torch.tensor([special_id("<|endoftext|>")])
    pieces = []
    for text in texts:  # one by one: the library's result takes a hundred bytes a token
        pieces += [torch.tensor(tokenizer.encode(text, add_special_tokens=False).ids), end]
    return torch.cat(pieces)


def _write_shards(job: Job, tensors: dict[str, torch.Tensor], progress: Progress) -> dict[str, Any]:
    shards = shard_names(tensors, SHARD_BYTES)
    total = sum(t.numel() * t.element_size() for t in tensors.values())
    with progress.task("synth tiny", total) as task:
        for file, names in shards.items():
            if file not in job.done:
                record = write_safetensors(job.out / file, {name: tensors[name] for name in names})
                job.commit(file, files={file: record})
            task.advance(sum(tensors[n].numel() * tensors[n].element_size() for n in names))
    weight_map = {name: file for file, names in shards.items() for name in names}
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    files: dict[str, FileRecord] = {INDEX: write_json(job.out / INDEX, index)}
    job.commit("index", files=files)
    return {"tensors": len(tensors), "tensor_bytes": total, "shards": len(shards)}


def _numel(shape: tuple[int, ...]) -> int:
    result = 1
    for n in shape:
        result *= n
    return result
