"""One block of the model at a time: its forward without the routed experts, and the experts' part added after.

The output of a block is linear in what its routed experts return,

    output = rest + experts ⊗ injection         rest, output [.., hc_count * H], experts [.., H], injection [.., hc_count]

so the block runs once, with experts that return zero, and gives the experts' inputs, their routing, `rest` and
`injection`; when the experts are quantized, their outputs are added. The other matrices are rounded to nearest first.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from q38.checkpoint.packing import PackedMatrix, dequantize
from q38.checkpoint.source import SourceWeights
from q38.hf.blocks import BlockModel
from q38.hf.hooks import qsa_shortcut
from q38.model.names import EXPERT, LAYERS
from q38.quantize.local.moe import activate
from q38.quantize.local.tokens import Routed
from q38.quantize.local.tune import Weights
from q38.quantize.plan import Plan
from q38.quantize.rtn import round_rows

_TOKENS = 8192  # in a forward pass


@dataclass
class Half:
    """A block after its one forward pass.

    rest: one [1, T, hc_count * H] per sample, on the CPU.
    routed: what its experts get.
    injection: [samples * T, hc_count].
    packed: the other matrices that the plan packs, by module.
    """

    rest: list[torch.Tensor]
    routed: Routed
    injection: torch.Tensor
    packed: dict[str, PackedMatrix]


class Walk:
    """The blocks of a source checkpoint over calibration tokens.

    Args:
        ple: directory of the split n-gram table; see `q38.hf.load.load_model`.
        ids: int64 [samples, T].
        dtype: of weights and activations.

    Raises:
        InputError: see `BlockModel`.
    """

    def __init__(
        self,
        source: Path,
        plan: Plan,
        ple: Path | None,
        ids: torch.Tensor,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._model = BlockModel(source, ple=ple, dtype=dtype, device=str(device))
        self._weights = SourceWeights(self._model.checkpoint)
        self._plan, self._ids = plan, ids
        self._batch = max(1, _TOKENS // ids.shape[1])

    def start(self) -> list[torch.Tensor]:
        """What enters the first block: one [1, T, hc_count * H] per sample."""
        return list(torch.split(self._model.embed(self._ids), 1))

    def half(self, block: int, states: list[torch.Tensor]) -> Half:
        """Run a block without its experts. `states` is what enters it; its tensors are let go one by one."""
        rest: list[torch.Tensor] = []
        with self._model.block(block, experts=False) as loaded, torch.no_grad(), qsa_shortcut():
            packed = self._round(block, loaded.layer)
            silent = SilentExperts(loaded.layer, self._plan.shape.num_experts)
            for start in range(0, len(states), self._batch):
                part = slice(start, start + self._batch)
                rest += torch.split(loaded(torch.cat(states[part]), self._ids[part]), 1)
                states[part] = [torch.empty(0)] * len(states[part])
            return Half(rest, *silent.seen(), packed)

    def whole(self, half: Half, experts: torch.Tensor) -> list[torch.Tensor]:
        """The output of a block, one tensor per sample: `experts` [samples * T, H] is what its experts return."""
        outputs, tokens = [], self._ids.shape[1]
        for i, rest in enumerate(half.rest):
            own = slice(i * tokens, (i + 1) * tokens)
            added = experts[own].unsqueeze(-2) * half.injection[own].unsqueeze(-1)
            outputs.append((rest.to(experts.device) + added.flatten(-2)).cpu())
            half.rest[i] = torch.empty(0)
        return outputs

    def experts(self, block: int, which: list[int], device: torch.device) -> Weights:
        """The source's matrices of some experts."""
        shape, prefix = self._plan.shape, f"{LAYERS}.{block}.mlp.experts"
        source, dtype = self._model.checkpoint, self._model.dtype
        middle, width = shape.moe_intermediate_size, shape.hidden_size
        gate_up = torch.empty(len(which), 2 * middle, width, dtype=dtype, device=device)
        down = torch.empty(len(which), width, middle, dtype=dtype, device=device)
        for i, e in enumerate(which):
            if f"{prefix}.gate_up_proj" in source.tensors:
                gate_up[i] = source.read_rows(f"{prefix}.gate_up_proj", e, e + 1)[0]
                down[i] = source.read_rows(f"{prefix}.down_proj", e, e + 1)[0]
                continue
            gate_up[i, :middle] = self._weights.rows(f"{prefix}.{e}.gate_proj", 0, middle)
            gate_up[i, middle:] = self._weights.rows(f"{prefix}.{e}.up_proj", 0, middle)
            down[i] = self._weights.rows(f"{prefix}.{e}.down_proj", 0, width)
        return Weights(gate_up, down)

    def _round(self, block: int, layer: Any) -> dict[str, PackedMatrix]:
        """Round every matrix of a block that the plan packs, but the routed experts, in place; the packed ones."""
        packed: dict[str, PackedMatrix] = {}
        for module in self._plan.blocks[block].packed:
            if EXPERT.match(module):
                continue
            bits, shape = self._plan.bits[module], self._weights.shape(module)
            assert shape is not None  # the plan found it
            packed[module] = round_rows(
                lambda start, stop, module=module: self._weights.rows(module, start, stop),  # type: ignore[misc]
                *shape, bits, self._plan.group_size,
            )  # fmt: skip
            weight = layer.get_submodule(module.removeprefix(f"{LAYERS}.{block}.")).weight
            weight.copy_(dequantize(*packed[module], bits))
        return packed


class SilentExperts(nn.Module):
    """Takes the place of a block's routed experts: returns zero, and keeps what they are given and the injection."""

    def __init__(self, layer: Any, experts: int) -> None:
        super().__init__()
        self._experts = experts
        self._calls: list[tuple[torch.Tensor, ...]] = []
        self._injections: list[torch.Tensor] = []
        layer.mlp.experts = self
        layer.mlp_hyper_connection.register_forward_hook(
            lambda module, inputs, output: self._injections.append(output[2].flatten(0, -2))
        )

    def forward(self, hidden: torch.Tensor, chosen: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """hidden [n, H], chosen int64 [n, k], weight [n, k]."""
        self._calls.append((hidden.clone(), chosen, weight))
        return torch.zeros_like(hidden)

    def seen(self) -> tuple[Routed, torch.Tensor]:
        """All inputs and all injections so far; forgotten here."""
        hidden, chosen, weight = (torch.cat(parts) for parts in zip(*self._calls, strict=True))
        injection = torch.cat(self._injections)
        self._calls, self._injections = [], []
        return Routed.of(hidden, chosen, weight, self._experts), injection


def add_expert(
    out: torch.Tensor, routed: Routed, expert: int, gate_up: torch.Tensor, down: torch.Tensor
) -> None:
    """Add one expert's route-weighted outputs to `out` [T, H] (no token has an expert twice)."""
    token, weight = routed.of_expert(expert)
    y = activate(routed.hidden[token] @ gate_up.T) @ down.T
    out[token] += (y.float() * weight.unsqueeze(-1)).to(out.dtype)
