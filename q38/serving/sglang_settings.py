"""Settings of the sglang engine: one typed object, its conflicts, and SGLang's command line made of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from q38.base.errors import InputError
from q38.base.settings import SGLANG
from q38.model.kv import RING_SLOTS

if TYPE_CHECKING:
    from q38.serving.engines import ServeOptions

DEVICES = ("cuda", "cpu")
# q38's name -> SGLang's --kv-cache-dtype. SGLang takes the three quantized ones for bf16; the extension stores them.
KV_FORMATS = {
    "bf16": "bfloat16",
    "fp8": "fp8_e4m3",
    "int8": "bfloat16",
    "int8ring_int4": "bfloat16",
    "int4": "bfloat16",
}
KV_AUTO = "auto"
# Slots of GDN states, in the words of SGLang 0.5.23: a running request takes 3 and one that follows it for the
# cache, two where steps overlap; what is beyond keeps the states of finished conversations.
_STATES_PER_REQUEST, _STATES_PER_OVERLAPPED = 4, 5
_KEPT_STATES = 4
_PAGE = 64


@dataclass(frozen=True)
class SglangSettings:
    """What `q38 serve` may be told about the sglang engine. None: not given.

    device: "cuda", or "cpu" for tests and tiny models (plain torch in place of the kernels).
    gpu_memory: bytes of device memory that the server may use; all that is free by default.
    ram: bytes of host memory that it may use; all that is free by default.
    context: tokens of prompt and answer together; the model's own limit by default.
    requests: requests that run at once; further ones wait.
    chunk: prompt tokens of one prefill step.
    kv: format of the KV cache, of KV_FORMATS, or "auto".
    kv_ring: newest tokens that int8ring_int4 keeps in INT8.
    profile: routing profile from q38 build-placement.
    prefix_cache: keep the KV cache of finished requests for prompts that begin alike.
    adapt: exchange expert rows while serving, by what is read; on a GPU by default.
    resident: experts of each layer that start in GPU memory; as many as fit by default.
    return_routes: answers can name the experts that each token chose (for q38 build-placement --server --trace).
    overlap: schedule a decode step while the one before runs; where the n-gram rows allow it by default.
    int8_mixes: round the matrices of the hyper-connections to INT8 while loading.
    check_finite: look for values that are not finite in prompt steps.
    tp: GPUs that share the model; 1, since expert rows are addresses of one.
    kv_zeroed: write zeros into a quantized cache: the control of `q38 oracle kv`, and no option of `q38 serve`.
    kv_limit: the most bytes behind a quantized cache, for tests of what happens without memory; likewise no option.
    early_rows: read expert rows while SGLang is imported; on a GPU by default. Likewise no option.
    early_scheduler: import SGLang for its scheduler meanwhile; on a GPU by default. Likewise no option.
    """

    device: str | None = None
    gpu_memory: int | None = None
    ram: int | None = None
    context: int | None = None
    requests: int | None = None
    chunk: int | None = None
    kv: str | None = None
    profile: Path | None = None
    prefix_cache: bool | None = None
    kv_ring: int | None = None
    kv_zeroed: bool | None = None
    kv_limit: int | None = None
    adapt: bool | None = None
    resident: int | None = None
    return_routes: bool | None = None
    tp: int | None = None
    overlap: bool | None = None
    int8_mixes: bool | None = None
    check_finite: bool | None = None
    early_rows: bool | None = None
    early_scheduler: bool | None = None

    @property
    def given(self) -> list[str]:
        """Options that were given, as on the command line."""
        names = (f.name for f in fields(self) if getattr(self, f.name) is not None)
        return [f"--{name.replace('_', '-')}" for name in names]

    @property
    def on_cpu(self) -> bool:
        return self.device == "cpu"


@dataclass(frozen=True)
class Resolved:
    """Settings with every default filled in, for one model."""

    device: str
    context: int
    requests: int
    chunk: int
    kv: str
    prefix_cache: bool
    kv_ring: int = RING_SLOTS
    return_routes: bool = False
    overlap: bool = True

    @property
    def stored_kv(self) -> str | None:
        """The format that the extension stores; None where SGLang's own cache has it."""
        own = ("bf16",) if self.device == "cpu" else ("bf16", "fp8")
        return None if self.kv in own else self.kv

    @property
    def states(self) -> int:
        """Slots of GDN states."""
        each = _STATES_PER_OVERLAPPED if self.overlap else _STATES_PER_REQUEST
        return self.requests * each + _KEPT_STATES if self.prefix_cache else self.requests


def refuse_conflicts(settings: SglangSettings, *, engine: str, device: str) -> None:
    """Refuse options that contradict each other, before anything is looked at.

    Args:
        engine: the engine that will serve. device: the device it will use.

    Raises:
        InputError: one line with both options.
    """
    if settings.device is not None and settings.device not in DEVICES:
        raise InputError(
            f"unknown device '{settings.device}'", where="--device", remedy=f"known: {', '.join(DEVICES)}"
        )
    if engine != "sglang":
        if settings.given:
            raise InputError(
                f"engine {engine} has no {settings.given[0]}",
                where=settings.given[0],
                remedy="leave it out, or use --engine sglang",
            )
        return
    if settings.kv is not None and settings.kv not in (*KV_FORMATS, KV_AUTO):
        known = ", ".join((*KV_FORMATS, KV_AUTO))
        raise InputError(f"no KV format '{settings.kv}'", where="--kv", remedy=f"known: {known}")
    for name in ("gpu_memory", "ram", "context", "requests", "chunk", "kv_ring"):
        value = getattr(settings, name)
        if value is not None and value <= 0:
            raise InputError(f"{value} is not positive", where=f"--{name.replace('_', '-')}")
    if settings.tp not in (None, 1):
        raise InputError(
            f"{settings.tp} GPUs: the expert rows are found by address, in the memory of one GPU and its host",
            where="--tp",
            remedy="start one server per GPU",
        )
    if settings.resident is not None and settings.resident < 0:
        raise InputError(f"{settings.resident} is negative", where="--resident")
    if device == "cpu":
        _refuse_on_cpu(settings)


def _refuse_on_cpu(settings: SglangSettings) -> None:
    reasons = {
        "--gpu-memory": (settings.gpu_memory is not None, "there is no GPU"),
        "--resident": (settings.resident is not None, "there is no GPU"),
    }
    for option, (conflict, why) in reasons.items():
        if conflict:
            raise InputError(
                f"contradicts --device cpu: {why}", where=option, remedy=f"leave out {option} or --device cpu"
            )


def resolve(settings: SglangSettings, config: Mapping[str, Any], *, where: str) -> Resolved:
    """Fill in the defaults.

    Raises:
        InputError: more context than the model has, or a chunk beyond the context.
    """
    from q38.model.shape import ModelShape

    longest = ModelShape.from_config(config, where=where).max_position_embeddings
    context = settings.context or longest
    if context > longest:
        raise InputError(
            f"{context} tokens, the model has {longest}", where="--context", remedy=f"use {longest} or fewer"
        )
    if settings.chunk is not None and settings.chunk > context:
        raise InputError(
            f"a chunk of {settings.chunk} tokens contradicts --context {context}",
            where="--chunk",
            remedy="use a chunk that fits the context",
        )
    on_cpu, requests = settings.on_cpu, settings.requests or 1
    # With it a request takes five slots of GDN states instead of one: cheap for one request, not for many.
    keeps_prefixes = not on_cpu and requests == 1
    return Resolved(
        device="cpu" if on_cpu else "cuda",
        context=context,
        requests=requests,
        chunk=settings.chunk or min(2048, context),
        kv=settings.kv or ("bf16" if on_cpu else KV_AUTO),
        prefix_cache=keeps_prefixes if settings.prefix_cache is None else settings.prefix_cache,
        kv_ring=settings.kv_ring or RING_SLOTS,
        return_routes=bool(settings.return_routes),
        overlap=settings.overlap is not False,
    )


def command(
    options: ServeOptions, resolved: Resolved, *, language_model_only: bool, static: float = 0.95
) -> list[str]:
    """SGLang's options. The API key is none of them: it travels by environment.

    Args:
        static: share of the GPU memory that is free at start which weights, rows and KV cache may take.
    """
    # Whole pages of the sparse attention. SGLang admits a request only while more than a page beyond its prompt and answer
    # is left; without two on top a prompt of the whole context would wait for ever.
    pages = resolved.requests * (-(-resolved.context // _PAGE) + 2)
    values = {
        "--model-path": options.model,
        "--host": options.host,
        "--port": options.port,
        "--served-model-name": options.served_name,
        "--dtype": "bfloat16",
        "--context-length": resolved.context,
        "--max-running-requests": resolved.requests,
        "--max-total-tokens": pages * _PAGE,
        "--chunked-prefill-size": resolved.chunk,
        # They match the chat template of the release.
        "--reasoning-parser": "qwen3",
        "--tool-call-parser": "qwen3_coder",
    }
    flags = ["--skip-server-warmup", "--sleep-on-idle", "--enable-metrics"]
    if not resolved.overlap:
        flags.append("--disable-overlap-schedule")
    if resolved.return_routes:
        flags.append("--enable-return-routed-experts")
    if not language_model_only:
        flags.append("--language-model-only")
    if resolved.prefix_cache:
        values |= {"--max-mamba-cache-size": resolved.states}
        flags.append("--enable-cache-report")  # the answer's usage then says how much of a prompt was cached
    else:
        flags.append("--disable-radix-cache")
    if resolved.device == "cpu":
        values |= {
            "--device": "cpu",
            "--attention-backend": "torch_native",
            "--sampling-backend": "pytorch",
            "--grammar-backend": "none",
        }
        flags.append("--disable-cuda-graph")
    else:
        flags.append("--no-ple-offload-embedding")  # it would pin the n-gram table
        values |= {
            # For what is not sparse attention; its own workspace is the smallest.
            "--attention-backend": "triton",
            "--kv-cache-dtype": KV_FORMATS[resolved.kv],
            "--cuda-graph-max-bs-decode": resolved.requests,
            # Its graphs would capture the experts of prefill, whose rows move.
            "--cuda-graph-backend-prefill": "disabled",
            "--mem-fraction-static": static,
        }
    return [str(word) for pair in values.items() for word in pair] + flags


def environment(resolved: Resolved, extension: str) -> dict[str, str]:
    """Variables of the child. `extension`: the plugin's options as JSON."""
    variables = {SGLANG: extension, "SGLANG_PLUGINS": "q38,q38cpu", "HF_HUB_OFFLINE": "1"}
    if resolved.device == "cpu":
        # Triton's interpreter runs what has no reference; torch.compile would compile for minutes.
        variables |= {"SGLANG_PLATFORM": "q38cpu", "TRITON_INTERPRET": "1", "TORCHDYNAMO_DISABLE": "1"}
    return variables
