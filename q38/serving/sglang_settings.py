"""Settings of the sglang engine: one typed object, its conflicts, and SGLang's command line made of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from q38.base.errors import InputError
from q38.base.settings import SGLANG

if TYPE_CHECKING:
    from q38.serving.engines import ServeOptions

DEVICES = ("cuda", "cpu")
KV_FORMATS = {"bf16": "bfloat16", "fp8": "fp8_e4m3"}  # q38's name -> SGLang's


@dataclass(frozen=True)
class SglangSettings:
    """What `q38 serve` may be told about the sglang engine. None: not given.

    device: "cuda", or "cpu" for tests and tiny models (plain torch in place of the kernels).
    gpu_memory: bytes of device memory that the server may use; all that is free by default.
    ram: bytes of host memory that it may use; all that is free by default.
    context: tokens of prompt and answer together; the model's own limit by default.
    requests: requests that run at once; further ones wait.
    chunk: prompt tokens of one prefill step.
    kv: format of the KV cache, "bf16" or "fp8".
    profile: routing profile from q38 build-placement.
    prefix_cache: keep the KV cache of finished requests for prompts that begin alike.
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
    if settings.kv is not None and settings.kv not in KV_FORMATS:
        raise InputError(
            f"SGLang has no KV format '{settings.kv}'", where="--kv", remedy=f"known: {', '.join(KV_FORMATS)}"
        )
    for name in ("gpu_memory", "ram", "context", "requests", "chunk"):
        value = getattr(settings, name)
        if value is not None and value <= 0:
            raise InputError(f"{value} is not positive", where=f"--{name.replace('_', '-')}")
    if device == "cpu":
        _refuse_on_cpu(settings)


def _refuse_on_cpu(settings: SglangSettings) -> None:
    reasons = {
        "--gpu-memory": (settings.gpu_memory is not None, "there is no GPU"),
        "--kv": (settings.kv == "fp8", "an fp8 cache needs a GPU"),
        "--prefix-cache": (settings.prefix_cache is True, "the prefix cache of this model needs a GPU"),
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
    on_cpu = settings.on_cpu
    return Resolved(
        device="cpu" if on_cpu else "cuda",
        context=context,
        requests=settings.requests or 1,
        chunk=settings.chunk or min(2048, context),
        kv=settings.kv or ("bf16" if on_cpu else "fp8"),
        prefix_cache=bool(settings.prefix_cache) and not on_cpu,
    )


def command(options: ServeOptions, resolved: Resolved, *, language_model_only: bool) -> list[str]:
    """SGLang's options. The API key is none of them: it travels by environment."""
    tokens = resolved.context * resolved.requests
    values = {
        "--model-path": options.model,
        "--host": options.host,
        "--port": options.port,
        "--served-model-name": options.served_name,
        "--dtype": "bfloat16",
        "--context-length": resolved.context,
        "--max-running-requests": resolved.requests,
        "--max-total-tokens": -(-tokens // 64) * 64,  # whole pages of the sparse attention
        "--chunked-prefill-size": resolved.chunk,
        # They match the chat template of the release.
        "--reasoning-parser": "qwen3",
        "--tool-call-parser": "qwen3_coder",
    }
    # The host must know a step's tokens before the step: rows of the n-gram table are read by them.
    flags = ["--disable-overlap-schedule", "--skip-server-warmup"]
    if not language_model_only:
        flags.append("--language-model-only")
    if not resolved.prefix_cache:
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
            "--kv-cache-dtype": KV_FORMATS[resolved.kv],
            "--cuda-graph-max-bs-decode": resolved.requests,
            # Its graphs would capture the experts of prefill, whose rows move.
            "--cuda-graph-backend-prefill": "disabled",
            "--mem-fraction-static": 0.95,
        }
    return [str(word) for pair in values.items() for word in pair] + flags


def environment(resolved: Resolved, extension: str) -> dict[str, str]:
    """Variables of the child. `extension`: the plugin's options as JSON."""
    variables = {SGLANG: extension, "SGLANG_PLUGINS": "q38,q38cpu", "HF_HUB_OFFLINE": "1"}
    if resolved.device == "cpu":
        # Triton's interpreter runs what has no reference; torch.compile would compile for minutes.
        variables |= {"SGLANG_PLATFORM": "q38cpu", "TRITON_INTERPRET": "1", "TORCHDYNAMO_DISABLE": "1"}
    return variables
