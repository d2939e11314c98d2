"""What this machine lacks for the steps that a run has yet to do, told before the first of them.

Sizes come from config.json and the recipe, before there is a model. Every step checks again when it starts, and knows more then.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from q38.base.errors import InputError, ResourceError
from q38.base.memory import available_memory
from q38.base.units import parse_bytes
from q38.checkpoint.index import read_json
from q38.checkpoint.writer import require_free_space
from q38.measure.host_memory import require_loadable
from q38.model.names import Group
from q38.pipeline.setup import Setup
from q38.recipe.bits import plan_bits
from q38.recipe.budget import Sizes, sizes
from q38.recipe.samples import ITEM_GPU, with_samples
from q38.recipe.schema import Recipe
from q38.serving.engines import choose_engine
from q38.serving.kv_choice import refuse_unreadable
from q38.serving.machine import has_cuda_gpu, probe_gpus
from q38.serving.preflight import check_memory
from q38.serving.recipe_plan import place
from q38.serving.requirements import lacking
from q38.serving.sglang_settings import SglangSettings

_NOT_LOADED = (Group.NGRAM, Group.MTP, Group.MTP_EXPERTS)
_FLOAT32 = 4  # bytes
Check = Callable[[], object]


@dataclass(frozen=True)
class Lack:
    """What keeps a step from being done here. step: its name, or "disk" for all that write."""

    step: str
    what: str
    remedy: str

    def to_dict(self) -> dict[str, str]:
        """For JSON."""
        return dict(vars(self))


def require_machine(setup: Setup, todo: Collection[str]) -> None:
    """Refuse a run that could not come to its end here.

    Raises:
        ResourceError: names every step of `todo` that lacks something, what, and the remedy of each.
        InputError: a value of the recipe that no machine can serve.
    """
    lacks = find_lacks(setup, todo)
    if lacks:
        raise ResourceError(
            f"this machine cannot do every step: {'; '.join(f'{lack.step}: {lack.what} ({lack.remedy})' for lack in lacks)}",
            where=f"recipe {setup.recipe.name}",
        )


def find_lacks(setup: Setup, todo: Collection[str]) -> list[Lack]:
    """What keeps the steps of `todo` from being done here. Writes and loads nothing.

    A synthetic model that is still to be made has no config.json: of its sizes nothing is checked.
    """
    lacks = []
    for step, check in _checks(setup, todo):
        try:
            check()
        except ResourceError as error:
            lacks.append(Lack(step, error.what, error.remedy or ""))
    return lacks


def _checks(setup: Setup, todo: Collection[str]) -> Iterator[tuple[str, Check]]:
    """(step, what raises where the machine lacks something for it)."""
    recipe = setup.recipe
    config = (setup.source or setup.work.synth) / "config.json"
    values = read_json(config) if config.is_file() else None
    cost = None if values is None else sizes(values, recipe, plan_bits(values, recipe))
    if "quantize" in todo:
        yield "quantize", partial(_packages, recipe)
    if values is not None and cost is not None:
        if "quantize" in todo:
            yield (
                "quantize",
                partial(with_samples, recipe, values, item=ITEM_GPU if has_cuda_gpu() else _FLOAT32),
            )
        yield "disk", partial(require_free_space, setup.work.root, _disk(setup, cost, todo))
        if "build-placement" in todo and recipe.placement.engine == "transformers":
            yield "build-placement", partial(_loadable, "placement", _stored(cost), "bfloat16")
        if "oracle-save" in todo and recipe.oracle.engine == "transformers":
            yield "oracle-save", partial(_loadable, "oracle", _in_float32(cost), "float32")
    if any(step.name in todo and (step.starts_server or step.server) for step in setup.steps):
        yield "serve", partial(_servable, recipe, values, cost)


def _packages(recipe: Recipe) -> None:
    """Whether AutoRound is there for a method that takes it; a version that does not do, quantize refuses itself."""
    absent = [need for need in lacking("quant") if need.found is None]
    if absent and recipe.quantize.experts.method != "rtn":
        raise ResourceError(f"{absent[0]}", remedy=absent[0].remedy)


def _disk(setup: Setup, cost: Sizes, todo: Collection[str]) -> int:
    """Bytes that are still to be written, at the most at any moment."""
    left = {name: cost.disk[name] for name in ("split-ple", "quantize", "requant-int8") if name in todo}
    begun = [path for step in setup.steps if step.name in left for path in step.writes]
    there = sum(file.stat().st_size for path in begun for file in path.rglob("*") if file.is_file())
    # What quantize writes beside its output goes when it is done, before requant-int8 begins.
    beside = (
        sum(n for what, n in cost.disk.items() if what.startswith("quantize, ")) if "quantize" in left else 0
    )
    return max(sum(left.values()) + max(beside - left.get("requant-int8", 0), 0) - there, 0)


def _loadable(section: str, needed: int, dtype: str) -> None:
    try:
        require_loadable(needed, where=section, dtype=dtype)
    except ResourceError as error:
        remedy = f"set {section}.engine and serve.engine to sglang in the recipe, or {section}.engine to none to go without"
        raise ResourceError(error.what, where=section, remedy=remedy) from None


def _stored(cost: Sizes) -> int:
    return sum(group.bytes for group in cost.groups if group.group not in _NOT_LOADED)


def _in_float32(cost: Sizes) -> int:
    return _FLOAT32 * sum(group.parameters for group in cost.groups if group.group not in _NOT_LOADED)


def _servable(recipe: Recipe, values: Mapping[str, Any] | None, cost: Sizes | None) -> None:
    """Whether the recipe's engine runs here, and has the memory that the model takes at the least."""
    on_cpu = recipe.serve.device == "cpu"
    try:
        engine = choose_engine(recipe.serve.engine, on_cpu=on_cpu)
    except ResourceError as error:
        remedy = "see q38 doctor, use a machine with a CUDA GPU, or set serve.device to cpu in the recipe for a tiny model"
        raise ResourceError(error.what, where="serve", remedy=remedy) from None
    width = recipe.quantize.bits.get(Group.EXPERTS, 16)
    if engine.name == "sglang" and width != 2:
        raise ResourceError(
            f"engine sglang, which is chosen here, serves 2-bit experts, the recipe makes {width} bits",
            remedy="set serve.engine to transformers in the recipe",
        )
    if values is None or cost is None:
        return
    if engine.name == "transformers":
        try:
            check_memory(_stored(cost), where="serve")
        except ResourceError as error:
            remedy = "set serve.engine to sglang in the recipe, on a machine with a CUDA GPU, or use one with more memory"
            raise ResourceError(error.what, where="serve", remedy=remedy) from None
    elif not on_cpu:
        _fits_gpu(recipe, values, cost)


def _fits_gpu(recipe: Recipe, values: Mapping[str, Any], cost: Sizes) -> None:
    """Whether `q38 serve` finds a plan for this machine."""
    serve, card = recipe.serve, probe_gpus()[0]
    free = card.memory_free
    gpu, ram = (
        there if given is None else min(parse_bytes(given), there)
        for given, there in ((serve.gpu_memory, free), (serve.ram, available_memory()))
    )
    settings = SglangSettings(context=serve.context, kv=serve.kv)
    try:
        resolved, _ = place(values, cost, settings, gpu=gpu, ram=ram, where="config.json")
        refuse_unreadable(resolved.kv, card)
    except ResourceError as error:
        remedy = "lower serve.context in the recipe, or free memory on the GPU and the host"
        raise ResourceError(error.what, where=error.where, remedy=remedy) from None
    except InputError as error:
        key = f"serve.{(error.where or '').removeprefix('--')}"
        raise InputError(error.what, where=f"recipe {recipe.name}: {key}", remedy=error.remedy) from None
