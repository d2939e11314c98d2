"""Adjustments to AutoRound that a Qwen4-Exp checkpoint needs, each against one known symptom.

They change nothing on disk, hold only while a run is inside `adjusted`, and are undone after it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from q38.base.errors import InputError, ResourceError
from q38.checkpoint.fp8 import dequantize_blocks
from q38.model.names import NGRAM_SHARD
from q38.ple.reader import PleTable
from q38.quantize.blockstate import BlockState
from q38.quantize.sources import BLOCK_SCALE

SUPPORTED = ("0.16.1",)
_FP8_ITEM = 1


@dataclass(frozen=True)
class Run:
    """What the adjustments need to know about a run.

    table: the n-gram table on disk; None for a model without one.
    state: progress through the blocks.
    dtype: torch dtype of weights and activations while tuning.
    """

    table: PleTable | None
    state: BlockState
    dtype: Any


@dataclass(frozen=True)
class Adjustment:
    """One change to AutoRound or to the model class it runs.

    name: short, for tests and logs.
    prevents: what happens without it.
    install: makes the change; leaving the context undoes it.
    """

    name: str
    prevents: str
    install: Callable[[Run], AbstractContextManager[None]]


def require_supported() -> None:
    """Refuse an AutoRound whose insides this module was not tested against.

    Raises:
        ResourceError: AutoRound is not installed.
        InputError: another version is.
    """
    supported = ", ".join(SUPPORTED)
    try:
        version = metadata.version("auto-round")
    except metadata.PackageNotFoundError:
        raise ResourceError(
            "AutoRound is not installed", where="auto-round", remedy="pip install 'q38[quant]'"
        ) from None
    if version not in SUPPORTED:
        raise InputError(
            f"version {version} is not supported; supported: {supported}",
            where="auto-round",
            remedy=f"pip install auto-round=={SUPPORTED[-1]}",
        )


@contextmanager
def adjusted(run: Run, *, without: Collection[str] = ()) -> Iterator[None]:
    """Hold all adjustments for the body.

    Args:
        without: names to leave out, to show what they prevent.

    Raises:
        ResourceError, InputError: see `require_supported`.
    """
    require_supported()
    with ExitStack() as stack:
        for adjustment in ADJUSTMENTS:
            if adjustment.name not in without:
                stack.enter_context(adjustment.install(run))
        yield


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Hold another value in an attribute."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextmanager
def _language_model_route(run: Run) -> Iterator[None]:
    from auto_round.utils import model

    del run
    known = model._LLM_ONLY_MODEL_TYPES
    with (
        replaced(model, "_LLM_ONLY_MODEL_TYPES", known | {"qwen4_exp"}),
        replaced(model, "_is_mllm_model_cache", {}),
    ):
        yield


@contextmanager
def _own_ignore_list(run: Run) -> Iterator[None]:
    from auto_round import special_model_handler as handler

    del run
    # The first rule that matches counts. The router is a bare parameter, so naming it pins nothing:
    # an empty list would make AutoRound fall back to pins of its own.
    rule = handler.PreDefinedIgnoreLayers([handler.ArchitectureMatcher("Qwen4", mode="in")], ["mlp.gate"])
    rules = [rule, *handler._PRE_DEFINED_IGNORE_LAYERS]
    with replaced(handler, "_PRE_DEFINED_IGNORE_LAYERS", rules):
        yield


@contextmanager
def _fp8_blocks(run: Run) -> Iterator[None]:
    from auto_round.utils.disk_stream_util import SafetensorsIndex

    del run
    original = SafetensorsIndex.read_tensors

    @functools.wraps(original)
    def read_tensors(self: Any, names: list[str], device: str = "cpu") -> dict[str, Any]:
        scale_of = {n: s for n in names if (s := n.removesuffix(".weight") + BLOCK_SCALE) in self.weight_map}
        tensors: dict[str, Any] = original(self, [*names, *scale_of.values()], device)
        for name, scale in scale_of.items():
            tensors[name] = dequantize_blocks(tensors[name], tensors.pop(scale))
        for name, tensor in tensors.items():
            if (
                tensor.is_floating_point()
                and tensor.element_size() == _FP8_ITEM
                and not NGRAM_SHARD.match(name)
            ):
                raise InputError(
                    f"tensor {name} is fp8 and has no {BLOCK_SCALE}",
                    where=self.checkpoint_dir,
                    remedy="download the checkpoint again",
                )
        return tensors

    with replaced(SafetensorsIndex, "read_tensors", read_tensors):
        yield


@contextmanager
def _compute_dtype(run: Run) -> Iterator[None]:
    from auto_round.utils import disk_stream_util as stream

    read, build = stream.SafetensorsIndex.read_tensors, stream.build_meta_model

    @functools.wraps(read)
    def read_tensors(self: Any, names: list[str], device: str = "cpu") -> dict[str, Any]:
        tensors: dict[str, Any] = read(self, names, device)
        return {n: t.to(run.dtype) if t.is_floating_point() else t for n, t in tensors.items()}

    @functools.wraps(build)
    def build_meta_model(*args: Any, **kwargs: Any) -> tuple[Any, Any, Any]:
        model, tokenizer, index = build(*args, **kwargs)
        for parameter in model.parameters():  # declared in the config's dtype, and read into that
            parameter.data = parameter.data.to(run.dtype)
        return model, tokenizer, index

    with (
        replaced(stream.SafetensorsIndex, "read_tensors", read_tensors),
        replaced(stream, "build_meta_model", build_meta_model),
    ):
        yield


@contextmanager
def _ngram_on_disk(run: Run) -> Iterator[None]:
    from q38.hf.hooks import ngram_lookup

    with ngram_lookup(run.table, dtype=run.dtype) if run.table is not None else nullcontext():
        yield


@contextmanager
def _short_qsa(run: Run) -> Iterator[None]:
    from q38.hf.hooks import qsa_shortcut

    del run
    with qsa_shortcut():
        yield


@contextmanager
def _no_vision_tower(run: Run) -> Iterator[None]:
    from q38.hf.hooks import without_vision

    del run
    with without_vision():
        yield


@contextmanager
def _norm_group_size(run: Run) -> Iterator[None]:
    from auto_round.auto_scheme import delta_loss, utils

    del run
    original = utils.remove_quant_scheme

    @functools.wraps(original)
    def remove_quant_scheme(model: Any) -> None:
        norms = [
            (module, module.group_size)
            for module in model.modules()
            if type(module).__name__.endswith("RMSNorm") and "group_size" in vars(module)
        ]
        original(model)
        for module, group_size in norms:
            module.group_size = group_size

    with (
        replaced(utils, "remove_quant_scheme", remove_quant_scheme),
        replaced(delta_loss, "remove_quant_scheme", remove_quant_scheme),
    ):
        yield


@contextmanager
def _durable_resume(run: Run) -> Iterator[None]:
    from auto_round.utils import resume

    with replaced(resume, "ResumeState", lambda directory, signature, blocks: run.state.start()):
        yield


@contextmanager
def _quiet_bars(run: Run) -> Iterator[None]:
    from auto_round.compressors import orchestrator

    del run
    with replaced(orchestrator, "tqdm", functools.partial(orchestrator.tqdm, disable=True)):
        yield


ADJUSTMENTS: tuple[Adjustment, ...] = (
    Adjustment(
        "language-model-route",
        "a composite checkpoint is taken for a multimodal one: AutoProcessor asks for torchvision, and the"
        " fallback dies with a TypeError",
        _language_model_route,
    ),
    Adjustment(
        "own-ignore-list",
        "AutoRound's built-in list for Qwen4 pins the shared expert to 16 bit, after and against the recipe",
        _own_ignore_list,
    ),
    Adjustment(
        "fp8-blocks",
        "block scales of an FP8 source are ignored while streaming: raw codes are tuned (a loss near 1e14),"
        " and the output is noise without an error",
        _fp8_blocks,
    ),
    Adjustment(
        "compute-dtype",
        "on a CPU AutoRound computes in float32, but streams blocks in the checkpoint's bfloat16: the first"
        " forward dies",
        _compute_dtype,
    ),
    Adjustment(
        "ngram-on-disk",
        "the n-gram table (95 GiB in the release) is assembled in memory and written into the output again",
        _ngram_on_disk,
    ),
    Adjustment(
        "short-qsa",
        "the indexer's loop over every query of every row takes most of the time of an attention block",
        _short_qsa,
    ),
    Adjustment(
        "no-vision-tower",
        "the vision tower is read into memory, though text alone calibrates and its tensors are copied as they are",
        _no_vision_tower,
    ),
    Adjustment(
        "norm-group-size",
        "AutoScheme deletes the group_size of Qwen4-Exp's own RMSNorm, and the next forward dies",
        _norm_group_size,
    ),
    Adjustment(
        "durable-resume",
        "AutoRound writes the two activation files of its resume state one after the other, in place: a kill"
        " between them resumes from outputs of different blocks, without a word",
        _durable_resume,
    ),
    Adjustment("quiet-bars", "AutoRound's progress bar writes over ours", _quiet_bars),
)
