"""How a server of a recipe's result lies on a machine that may be elsewhere: `q38 serve`'s own plan, before the download."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from q38.base.errors import ResourceError
from q38.base.units import parse_bytes
from q38.model.names import Group
from q38.model.shape import ModelShape
from q38.recipe.budget import Sizes, read_cost
from q38.serving.kv_choice import choose_kv
from q38.serving.sglang_plan import ServePlan, Weights, plan_for
from q38.serving.sglang_settings import Resolved, SglangSettings, refuse_conflicts, resolve


@dataclass(frozen=True)
class Fit:
    """The plan of one server. gpu_total, ram_total: bytes that it may use."""

    gpu_total: int
    ram_total: int
    resolved: Resolved
    plan: ServePlan
    layers: int
    experts: int

    @property
    def resident_per_layer(self) -> int:
        """Experts of each layer that start in GPU memory, on average."""
        return round(self.plan.device_rows / self.layers)

    @property
    def resident_when_full(self) -> int:
        """The same once the KV cache holds the whole context."""
        return round(self.plan.fewest_device_rows / self.layers)

    @property
    def gpu(self) -> dict[str, int]:
        """Bytes by purpose once the KV cache holds the whole context, what is left not among them."""
        return {what: n for what, n in self.plan.device.items() if what != "left"}

    @property
    def host(self) -> dict[str, int]:
        """Bytes by purpose, what is left not among them."""
        return {what: n for what, n in self.plan.host.items() if what != "left"}

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "gpu_total": self.gpu_total,
            "ram_total": self.ram_total,
            "context": self.resolved.context,
            "requests": self.resolved.requests,
            "kv_format": self.plan.kv,
            "chunk": self.plan.chunk,
            "gpu": self.gpu,
            "host": self.host,
            "gpu_left": self.plan.device["left"],
            "ram_left": self.plan.host["left"],
            "experts": self.experts,
            "resident_per_layer": self.resident_per_layer,
            "resident_when_full": self.resident_when_full,
            "device_rows": self.plan.device_rows,
            "fewest_device_rows": self.plan.fewest_device_rows,
        }


def plan_recipe(
    config: Path, recipe: str, *, gpu: str, ram: str, settings: SglangSettings, source_layout: str = "bf16"
) -> tuple[Sizes, Fit | ResourceError]:
    """What a recipe makes of a model, and how a server of it would lie on a machine.

    Args:
        config: config.json, or a directory that holds one. recipe: see q38.recipe.budget.read_cost.
        gpu, ram: memory that the server may use, as a user writes it.
        settings: of the server; what is not given is `q38 serve`'s default on a GPU.

    Returns:
        the cost; and the plan, or why the machine does not suffice.

    Raises:
        InputError: no config, recipe or size; or settings that contradict each other or the model.
    """
    gpu_total, ram_total = parse_bytes(gpu, where="--gpu"), parse_bytes(ram, where="--ram")
    refuse_conflicts(settings, engine="sglang", device="cuda")
    values, cost = read_cost(config, recipe, source_layout=source_layout)
    experts = next((g.bits for g in cost.groups if g.group == Group.EXPERTS), {})
    if set(experts) != {"2"}:
        made = " and ".join(sorted(experts)) or "no"
        return cost, ResourceError(
            f"experts at {made} bits, the sglang engine serves 2-bit experts",
            where=f"recipe {recipe}",
            remedy="serve it with --engine transformers",
        )
    try:
        resolved, plan = place(values, cost, settings, gpu=gpu_total, ram=ram_total, where=str(config))
    except ResourceError as failure:
        return cost, failure
    shape = ModelShape.from_config(values)
    return cost, Fit(gpu_total, ram_total, resolved, plan, shape.num_layers, shape.num_experts)


def place(
    config: Mapping[str, Any], cost: Sizes, settings: SglangSettings, *, gpu: int, ram: int, where: str
) -> tuple[Resolved, ServePlan]:
    """The settings and the plan of a server of what a recipe makes.

    Args:
        config: config.json; `where` names it. cost: of the recipe. gpu, ram: bytes that the server may use.

    Raises:
        InputError: settings that the model does not have.
        ResourceError: it does not fit.
    """
    weights = Weights(config, {Group(g.group): g.bytes for g in cost.groups}, cost.row_bytes)
    return choose_kv(
        resolve(settings, config, where=where),
        lambda chosen: plan_for(weights, settings, chosen, gpu=gpu, ram=ram),
    )
