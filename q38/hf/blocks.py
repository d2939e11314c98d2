"""A checkpoint as a transformers model of which one block at a time holds weights.

For models that do not fit in memory: the source release (bf16 or FP8) and packed checkpoints give the same
modules, with the experts of a block stacked as the release stacks them, so that two models differ in their
weights alone. The n-gram table is read by row.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from q38.base.errors import InputError
from q38.checkpoint.index import Checkpoint
from q38.hf.load import model_config, open_table
from q38.hf.matrices import Matrices
from q38.hf.quiet import silence_libraries
from q38.model.shape import ModelShape

_INSPECT = "run q38 inspect on this directory"
_EXPERTS = "mlp.experts."


class BlockModel:
    """The text model of a checkpoint.

    Args:
        path: bf16 release, FP8 release or packed checkpoint.
        ple: directory of the split n-gram table; see `q38.hf.load.load_model`.
        dtype: of weights and activations.
        device: where a block's weights and the activations lie.

    Attributes:
        shape: sizes of the model.
        width: of the residual stream, hc_count * hidden_size.

    Raises:
        InputError: no checkpoint, transformers refuses its config, a tensor of a block is missing or of
            another shape (the first is named), or no n-gram table.
    """

    def __init__(
        self, path: Path, *, ple: Path | None = None, dtype: torch.dtype = torch.bfloat16, device: str = "cpu"
    ) -> None:
        silence_libraries()
        self.checkpoint = Checkpoint.open(path)
        self.shape = ModelShape.from_config(self.checkpoint.config, where=str(path / "config.json"))
        self.dtype, self.device = dtype, torch.device(device)
        self._matrices = Matrices(self.checkpoint, dtype, self.device)
        self._prefix = self._find_prefix()
        self._model = self._empty_model(ple)
        self._model.rotary_emb = type(self._model.rotary_emb)(self._model.config).to(self.device)
        self._blocks: list[Any] = list(self._model.layers)
        self._arguments: dict[tuple[int, int], dict[str, Any]] = {}
        for part, prefix in self._parts():
            self._require(part, prefix)

    @property
    def width(self) -> int:
        return self.shape.hc_count * self.shape.hidden_size

    @property
    def block_bytes(self) -> int:
        """Bytes of the largest block in `dtype`."""
        return max(_parameters(block) for block in self._blocks) * self.dtype.itemsize

    @property
    def head_bytes(self) -> int:
        """Bytes of the output head in `dtype`."""
        return self.shape.vocab_size * self.shape.hidden_size * self.dtype.itemsize

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """What enters the first block: int64 [B, T] -> [B, T, hc_count * H] on the CPU.

        Only the rows of the embedding that occur are read.
        """
        unique, inverse = torch.unique(ids, return_inverse=True)
        rows = self._matrices.rows(f"{self._prefix}embed_tokens.weight", unique)  # [n, H]
        return rows[inverse].repeat(1, 1, self.shape.hc_count)

    @contextmanager
    def block(self, index: int, *, experts: bool = True) -> Iterator[LoadedBlock]:
        """A block with its weights; they are let go at the end. `experts` False leaves its routed experts out."""
        layer = self._blocks[index]
        if not experts:
            layer.mlp.experts = nn.Identity()
        self._fill(layer, f"{self._prefix}layers.{index}.")
        try:
            yield LoadedBlock(self, layer)
        finally:
            layer.to("meta")

    @contextmanager
    def head(self) -> Iterator[tuple[nn.Module, torch.Tensor]]:
        """(final mixer [.., hc_count * H] -> [.., H], output matrix [V, H]), both with weights."""
        mixer = self._model.hyper_connection_mixer
        self._fill(mixer, f"{self._prefix}hyper_connection_mixer.")
        name = f"{self._prefix}embed_tokens" if self.shape.tied else "lm_head"
        try:
            yield mixer, self._matrices.matrix(name, self.shape.vocab_size, self.shape.hidden_size)
        finally:
            mixer.to("meta")

    def arguments(self, x: torch.Tensor) -> dict[str, Any]:
        """What the model would call its blocks with for a batch of this shape [B, T, width]: masks and positions."""
        key = (x.shape[0], x.shape[1])
        if key not in self._arguments:
            recorder = _Recorder()
            self._model.layers = nn.ModuleList([recorder])
            ids = torch.zeros(key, dtype=torch.int64, device=self.device)
            # Of the embeddings only shape, dtype and device are looked at before the first block.
            with contextlib.suppress(_Recorded):
                self._model(
                    inputs_embeds=x[..., : self.shape.hidden_size], ple_input_ids=ids, use_cache=False
                )
            self._arguments = {key: recorder.arguments}  # one shape, and a last, smaller batch
        return self._arguments[key]

    @contextmanager
    def other_experts(self) -> Iterator[str]:
        """Compute the experts by another implementation of transformers inside; yields what changed."""
        config = self._model.config
        used = config._experts_implementation
        other = "eager" if used != "eager" else "grouped_mm"
        config._experts_implementation = other
        try:
            yield f"{used} -> {other}"
        finally:
            config._experts_implementation = used

    def _empty_model(self, ple: Path | None) -> Any:
        """The whole text model without memory for its weights."""
        from transformers.models.qwen4_exp.modeling_qwen4_exp import Qwen4ExpTextModel

        from q38.hf.hooks import ngram_lookup

        config = model_config(self.checkpoint).get_text_config()
        with ExitStack() as stack:
            if self.shape.ngram is not None:
                table = open_table(self.checkpoint, ple)
                stack.enter_context(ngram_lookup(table, dtype=self.dtype))
            stack.enter_context(torch.device("meta"))
            return Qwen4ExpTextModel(config).eval().requires_grad_(False)

    def _find_prefix(self) -> str:
        for prefix in ("model.language_model.", "model."):
            if f"{prefix}embed_tokens.weight" in self.checkpoint.tensors:
                return prefix
        raise InputError(
            "tensor model.language_model.embed_tokens.weight is missing",
            where=self.checkpoint.path,
            remedy=_INSPECT,
        )

    def _parts(self) -> Iterator[tuple[nn.Module, str]]:
        for index, block in enumerate(self._blocks):
            yield block, f"{self._prefix}layers.{index}."
        yield self._model.hyper_connection_mixer, f"{self._prefix}hyper_connection_mixer."

    def _require(self, part: nn.Module, prefix: str) -> None:
        """Every tensor of a part is in the checkpoint, in the right shape."""
        for name, tensor in part.state_dict().items():
            if name.startswith(_EXPERTS):
                for expert in range(self.shape.num_experts):
                    self._matrices.require_expert(prefix + name, expert, tuple(tensor.shape[1:]))
            else:
                self._matrices.require(prefix + name, tuple(tensor.shape))

    def _fill(self, part: nn.Module, prefix: str) -> None:
        """Give a part its weights, one tensor after the other."""
        state: dict[str, torch.Tensor] = {}
        for name, tensor in part.state_dict().items():
            if name.startswith(_EXPERTS):
                state[name] = self._matrices.experts(prefix + name, tuple(tensor.shape))
            elif name.endswith(".weight") and tensor.ndim == 2:
                state[name] = self._matrices.matrix((prefix + name).removesuffix(".weight"), *tensor.shape)
            else:
                state[name] = self._matrices.plain(prefix + name)
        part.load_state_dict(state, assign=True)


class LoadedBlock:
    """A block that holds its weights, in the module `layer`. Call it inside `BlockModel.block`."""

    def __init__(self, model: BlockModel, layer: Any) -> None:
        self._model, self.layer = model, layer

    def __call__(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """x [B, T, width] on the CPU, in the model's dtype; ids int64 [B, T] -> the same shape, on the CPU."""
        model = self._model
        x = x.to(model.device)
        out = self.layer(x, **{**model.arguments(x), "ple_input_ids": ids.to(model.device)})
        return out.cpu()  # type: ignore[no-any-return]


class _Recorded(Exception):
    """Ends a forward pass of the model at its first block."""


class _Recorder(nn.Module):
    """Stands where the blocks were: takes the arguments of the first call and ends the pass."""

    arguments: dict[str, Any]

    def forward(self, hidden: torch.Tensor, **arguments: Any) -> None:
        del hidden
        self.arguments = arguments
        raise _Recorded


def _parameters(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())
