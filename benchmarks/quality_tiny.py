"""The figures of docs/quality.md: what rounding, tuning and the source's layout cost the trained tiny model.

    python benchmarks/quality_tiny.py WORKDIR [NAME ...]

trains the tiny model, writes it in both layouts, quantizes it by each recipe, and measures each result against the
bf16 source on the held-out part of the standard library (32 sequences of 128 tokens). About ten minutes on two cores.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from q38.base.settings import calm_threads

calm_threads()

from q38.checkpoint.index import Checkpoint  # noqa: E402
from q38.checkpoint.writer import copy_file, write_json, write_safetensors  # noqa: E402
from q38.measure.evaluate import measure_quality  # noqa: E402
from q38.ple.split import split_ple  # noqa: E402
from q38.quantize.driver import quantize  # noqa: E402
from q38.recipe.schema import load_recipe, parse_recipe  # noqa: E402
from q38.synth.config import tiny_config  # noqa: E402
from q38.synth.layout import fp8_layout  # noqa: E402
from q38.synth.tiny import synth_tiny  # noqa: E402

DENSE = {"gdn_in": 8, "shared_expert": 8, "gdn_out": 8, "attention": 8, "lm_head": 8}
# Name -> (source layout, bits of the experts, what else the experts' section says).
RECIPES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "all W8, rounded": ("bf16", 8, {"method": "rtn"}),
    "W2, rounded": ("bf16", 2, {"method": "rtn"}),
    "W2, rounded, FP8 source": ("fp8", 2, {"method": "rtn"}),
    "W2, optimal RTN (fast)": ("bf16", 2, {"method": "opt-rtn"}),
    "W2, AutoRound 24 (tiny)": ("bf16", 2, {"method": "autoround", "iters": 24}),
}


def main() -> None:
    root, names = Path(sys.argv[1]), sys.argv[2:] or ["FP8 source", *RECIPES]
    sources = {"bf16": root / "bf16", "fp8": root / "fp8"}
    synth_tiny(sources["bf16"], trained=True)
    split_ple(sources["bf16"], root / "ple")
    if not sources["fp8"].exists():
        write_fp8(sources["bf16"], sources["fp8"])
    say("| model | KL | standard error | noise floor | top-1 | NLL difference | seconds to quantize |")
    say("|---|---|---|---|---|---|---|")
    for name in names:
        if name == "FP8 source":
            report(name, sources["fp8"], sources["bf16"], root / "ple", 0.0)
            continue
        layout, bits, experts = RECIPES[name]
        out, start = root / name.replace(" ", "-").replace(",", ""), time.process_time()
        quantize(sources[layout], out, recipe(bits, experts), ple=root / "ple")
        report(name, out, sources["bf16"], root / "ple", time.process_time() - start)


def recipe(bits: int, experts: dict[str, Any]) -> Any:
    """The recipe `tiny` with the dense matrices at 8 bits and other experts."""
    value = load_recipe("tiny").to_dict()
    value["quantize"]["bits"] = {"experts": bits, **DENSE}
    value["requant_int8"]["groups"] = []
    value["quantize"]["experts"] |= experts
    return parse_recipe(value)


def write_fp8(bf16: Path, fp8: Path) -> None:
    """The same weights in the layout of the FP8 release."""
    source = Checkpoint.open(bf16)
    fp8.mkdir()
    write_safetensors(
        fp8 / "model.safetensors", fp8_layout({name: source.read(name) for name in source.tensors})
    )
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        copy_file(bf16 / name, fp8 / name)
    write_json(fp8 / "config.json", tiny_config(fp8=True))


def report(name: str, model: Path, source: Path, ple: Path, seconds: float) -> None:
    part = measure_quality(model, source, ple=ple, text="stdlib", tokens=4096, seqlen=128).to_dict()
    checks = {check["name"]: check for check in part["checks"]}
    kl, floor = checks["kl divergence"], part["floor"]["kl divergence"]["value"]
    say(
        f"| {name} | {kl['value']:.5f} | {kl['standard_error']:.5f} | {floor:.6f} |"
        f" {checks['top-1 agreement']['value']:.4f} | {checks['nll difference']['value']:.5f} | {seconds:.0f} |"
    )


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


main()
