"""A short training of the tiny model on the local Python sources.

It stops after a fixed number of steps, not after a time, and computes in float32 with a fixed number
of threads: the same seed gives the same weights on the same machine, however busy it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from q38.base.progress import SILENT, Progress
from q38.model.names import LAYERS, NGRAM_SHARD

STEPS = 80
LENGTH = 64  # one chunk of the delta rule, the cheapest a token
CODE_ROWS, CHAT_ROWS = 7, 1  # sequences per step
THREADS = 2  # part of the result: another number would round differently
LEARNING_RATE = 6e-3
FASTER = {"embed_tokens": 5, "ngram_embedding": 20, "lm_head": 5}  # a row of these gets few gradients
WARM_UP = 20
ROUTER_BALANCE = 0.01  # weight of the load-balancing loss; without it most experts stay unused
EVALUATED, EVALUATED_LENGTH = 32, 128  # held-out sequences


def schedule() -> dict[str, Any]:
    """What the trained weights depend on beside data and seed."""
    return {
        "steps": STEPS,
        "length": LENGTH,
        "rows": [CODE_ROWS, CHAT_ROWS],
        "learning_rate": LEARNING_RATE,
        "faster": FASTER,
        "threads": THREADS,
    }


def train(
    tensors: Mapping[str, torch.Tensor],
    config: Mapping[str, Any],
    *,
    code: torch.Tensor,
    chat: torch.Tensor,
    held_out: torch.Tensor,
    seed: int,
    progress: Progress = SILENT,
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Train the text model; MTP layers then start as copies of the last attention layer.

    Args:
        tensors: the bf16 layout, all of it.
        code, chat: int64 [n], the streams to learn from.
        held_out: int64 [n], code to be judged on.
        seed: order of the training windows.

    Returns:
        The bf16 layout with new values, and {"steps", "tokens", "loss_before", "loss_after"}: mean
        negative log-likelihood on the held-out text in nats per token.
    """
    windows = _held_out_windows(held_out)
    with _fixed_arithmetic():
        model = _build(tensors, config)
        before = evaluate(model, windows)
        _optimize(model, code, chat, seed, progress)
        trained = _export(model, tensors)
        # The loss of what is written: rounded to bfloat16.
        model.load_state_dict(_state(trained))
        after = evaluate(model, windows)
    facts = {
        "steps": STEPS,
        "tokens": STEPS * (CODE_ROWS + CHAT_ROWS) * LENGTH,
        "loss_before": before,
        "loss_after": after,
    }
    return trained, facts


@torch.no_grad()
def evaluate(model: Any, windows: torch.Tensor) -> float:
    """Mean negative log-likelihood of the next token over int64 [sequences, length], nats."""
    model.eval()
    batches = torch.tensor_split(windows, len(windows) // 8)
    losses = [model(input_ids=batch, labels=batch, use_cache=False).loss for batch in batches]
    return float(torch.stack(losses).mean())


def _optimize(model: Any, code: torch.Tensor, chat: torch.Tensor, seed: int, progress: Progress) -> None:
    optimizer = _optimizer(model)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    generator = torch.Generator().manual_seed(seed)
    model.train()
    with progress.task("train", STEPS, "steps") as task:
        for step in range(STEPS):
            for group in optimizer.param_groups:
                group["lr"] = group["peak"] * _factor(step)
            rows = [*_windows(code, CODE_ROWS, generator), *_windows(chat, CHAT_ROWS, generator)]
            batch = torch.stack(rows)  # [sequences, LENGTH]
            loss = model(input_ids=batch, labels=batch, output_router_logits=True, use_cache=False).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            task.advance(1)
            task.note(f"loss {loss.item():.2f}")


def _optimizer(model: Any) -> torch.optim.Optimizer:
    groups = []
    for name, parameter in model.named_parameters():
        learned = ".indexer." not in name  # the selection has no gradient
        parameter.requires_grad_(learned)
        if learned:
            faster = next((factor for part, factor in FASTER.items() if part in name), 1)
            # Rows that the few steps never touch must not shrink.
            decay = 0.05 if parameter.dim() > 1 and faster == 1 else 0.0
            groups.append({"params": [parameter], "peak": LEARNING_RATE * faster, "weight_decay": decay})
    return torch.optim.AdamW(groups, betas=(0.9, 0.98), fused=True)


def _windows(stream: torch.Tensor, count: int, generator: torch.Generator) -> list[torch.Tensor]:
    starts = torch.randint(0, len(stream) - LENGTH, (count,), generator=generator).tolist()
    return [stream[s : s + LENGTH] for s in starts]


def _factor(step: int) -> float:
    """Warm-up, then a straight line down to a twentieth."""
    return min(1.0, (step + 1) / WARM_UP) * (1 - 0.95 * step / STEPS)


def _held_out_windows(stream: torch.Tensor) -> torch.Tensor:
    windows = len(stream) // EVALUATED_LENGTH
    starts = [i * windows // EVALUATED * EVALUATED_LENGTH for i in range(EVALUATED)]
    return torch.stack([stream[s : s + EVALUATED_LENGTH] for s in starts])


def _build(tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any]) -> Any:
    """transformers' model without vision, in float32."""
    from transformers.models.qwen4_exp import Qwen4ExpConfig, Qwen4ExpForConditionalGeneration

    from q38.hf.hooks import without_vision
    from q38.hf.quiet import silence_libraries

    silence_libraries()
    settings = Qwen4ExpConfig.from_dict({k: v for k, v in config.items() if k != "quantization_config"})
    settings.text_config.router_aux_loss_coef = ROUTER_BALANCE
    with without_vision():
        model = Qwen4ExpForConditionalGeneration(settings).float()
    model.set_experts_implementation("grouped_mm")
    model.load_state_dict(_state(tensors))
    return model


def _state(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The bf16 layout as transformers' state_dict in float32: one n-gram table, no MTP, no vision."""
    state: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if not NGRAM_SHARD.match(name) and not name.startswith(("mtp.", "model.visual.")):
            state[name] = tensor.float() if tensor.is_floating_point() else tensor
    for prefix, names in _tables(tensors).items():
        state[f"{prefix}.weight"] = torch.cat([tensors[n].float() for n in names])
    return state


def _export(model: Any, initial: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Back into the bf16 layout, every tensor of `initial` in its order."""
    state = model.state_dict()
    shards: dict[str, torch.Tensor] = {}
    for prefix, names in _tables(initial).items():
        rows = [len(initial[n]) for n in names]
        shards |= dict(zip(names, state[f"{prefix}.weight"].split(rows), strict=True))
    last = f"{LAYERS}.{model.config.text_config.num_hidden_layers - 1}."
    result = {}
    for name, tensor in initial.items():
        source = last + name.split(".", 3)[3] if name.startswith("mtp.layers.") else name
        if name.startswith("mtp.hyper_connection_mixer."):
            source = "model.language_model" + name.removeprefix("mtp")
        value = shards.get(name, state.get(source, tensor))
        result[name] = value.detach().to(tensor.dtype)
    return result


def _tables(tensors: Mapping[str, torch.Tensor]) -> dict[str, list[str]]:
    """Prefix of each n-gram table -> its shards, in numeric order."""
    found: dict[str, dict[int, str]] = {}
    for name in tensors:
        if match := NGRAM_SHARD.match(name):
            found.setdefault(match["prefix"], {})[int(match["n"])] = name
    return {prefix: [names[i] for i in sorted(names)] for prefix, names in found.items()}


@contextmanager
def _fixed_arithmetic() -> Iterator[None]:
    """A fixed number of threads, deterministic kernels, and the exact shortcut for short sequences."""
    from q38.hf.hooks import qsa_shortcut

    threads = torch.get_num_threads()
    deterministic = torch.are_deterministic_algorithms_enabled()
    state = torch.get_rng_state()
    torch.set_num_threads(THREADS)
    torch.use_deterministic_algorithms(True)
    try:
        with qsa_shortcut():
            yield
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(deterministic)
        torch.set_rng_state(state)
