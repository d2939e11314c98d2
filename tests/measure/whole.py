"""The reference: a whole model in memory, forwarded by transformers, and what a comparison needs of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from q38.hf.hooks import qsa_shortcut
from q38.measure.forward import Run, text_model
from q38.measure.loading import holds_table, load_for_measuring
from q38.measure.quality import Comparison, compare


def run_model(model: Any, ids: torch.Tensor, *, batch_size: int = 4) -> tuple[Run, torch.Tensor]:
    """The run, and the output of every block [layers, sequences, tokens, width]."""
    layers = text_model(model).layers
    blocks: list[list[torch.Tensor]] = [[] for _ in layers]
    handles = [
        layer.register_forward_hook(lambda module, inputs, output, kept=kept: kept.append(output.clone()))
        for layer, kept in zip(layers, blocks, strict=True)
    ]
    try:
        with torch.inference_mode(), qsa_shortcut():
            hidden = [
                model.model(input_ids=batch, use_cache=False)[0] for batch in torch.split(ids, batch_size)
            ]
    finally:
        for handle in handles:
            handle.remove()
    outputs = torch.stack([torch.cat(layer) for layer in blocks])
    return Run(torch.cat(hidden), model.get_output_embeddings()), outputs


def measure_whole(
    model: Path, source: Path, ids: torch.Tensor, *, ple: Path | None = None, batch_size: int = 4
) -> tuple[Comparison, list[float]]:
    """Source and model on the same tokens, each whole in memory: the comparison, and the error of each block."""
    reference, wanted = run_model(
        load_for_measuring(source, ple=None if holds_table(source) else ple), ids, batch_size=batch_size
    )
    run, found = run_model(load_for_measuring(model, ple=ple), ids, batch_size=batch_size)
    errors = [
        float((ours.double() - theirs.double()).norm() / theirs.double().norm())
        for ours, theirs in zip(found, wanted, strict=True)
    ]
    (comparison,) = compare(reference, [run], ids)
    assert np.isfinite(comparison.kl).all()
    return comparison, errors
