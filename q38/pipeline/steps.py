"""The steps of a run: which command each one is, what it reads and writes, which recipe sections it depends on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from q38.recipe.schema import Recipe


@dataclass(frozen=True)
class Workdir:
    """Names inside the directory of a run."""

    root: Path

    @property
    def state(self) -> Path:
        return self.root / "run.json"

    @property
    def recipe(self) -> Path:
        """The resolved recipe, every default filled in; what the commands are given."""
        return self.root / "recipe.yaml"

    @property
    def synth(self) -> Path:
        return self.root / "source"

    @property
    def ple(self) -> Path:
        return self.root / "ple"

    @property
    def quantized(self) -> Path:
        return self.root / "quantized"

    @property
    def model(self) -> Path:
        """The finished model."""
        return self.root / "model"

    @property
    def placement(self) -> Path:
        return self.root / "placement.safetensors"

    @property
    def oracle(self) -> Path:
        return self.root / "oracle.json"

    @property
    def oracle_layers(self) -> Path:
        """The block outputs that `oracle save` writes beside its reference."""
        return self.root / "oracle.layers.safetensors"

    @property
    def bench(self) -> Path:
        return self.root / "bench.json"

    @property
    def server_log(self) -> Path:
        return self.root / "server.log"

    @property
    def report(self) -> Path:
        return self.root / "report.json"

    @property
    def page(self) -> Path:
        return self.root / "report.html"

    def outputs(self) -> tuple[Path, ...]:
        """Everything that steps write, whatever the recipe."""
        return (
            self.synth,
            self.ple,
            self.quantized,
            self.model,
            self.placement,
            self.oracle,
            self.oracle_layers,
            self.bench,
        )

    def result(self, step: str) -> Path:
        """The JSON document that a step printed."""
        return self.root / "steps" / f"{step}.json"


@dataclass(frozen=True)
class Step:
    """One step.

    Attributes:
        name: unique in the run.
        args: the verb and its arguments; the command is `python -m q38 ARGS --json`.
        reads: files and directories whose contents the result depends on.
        writes: files and directories that the step makes.
        sections: recipe sections that the result depends on.
        needs_server: talks to the server of the step "serve".
    """

    name: str
    args: tuple[str, ...]
    reads: tuple[Path, ...]
    writes: tuple[Path, ...] = ()
    sections: tuple[str, ...] = ()
    needs_server: bool = False


def plan_steps(recipe: Recipe, source: Path | None, work: Workdir) -> list[Step]:
    """All steps in order. `source` is None where the recipe makes a synthetic model."""
    origin = source or work.synth
    src, ple, model = str(origin), str(work.ple), str(work.model)
    prompts = ["--prompts", recipe.oracle.prompts] if recipe.oracle.prompts else []
    steps = [] if source else [_synth(recipe, work)]
    return [
        *steps,
        Step("inspect", ("inspect", src), reads=(origin,)),
        Step("split-ple", ("split-ple", src, "-o", ple, "--dtype", recipe.ple.dtype),
             reads=(origin,), writes=(work.ple,), sections=("ple",)),
        Step("quantize", ("quantize", src, "-o", str(work.quantized), "--recipe", str(work.recipe), "--ple", ple),
             reads=(origin, work.ple), writes=(work.quantized,), sections=("name", "calibration", "quantize")),
        Step("requant-int8", ("requant-int8", str(work.quantized), "-o", model, "--source", src, "--recipe", str(work.recipe)),
             reads=(origin, work.quantized), writes=(work.model,), sections=("requant_int8",)),
        Step("build-placement",
             ("build-placement", model, "-o", str(work.placement), "--ple", ple,
              "--text", recipe.placement.text, "--tokens", str(recipe.placement.tokens)),
             reads=(work.model, work.ple), writes=(work.placement,), sections=("placement",)),
        Step("verify", ("verify", model, "--source", src, "--ple", ple, *_verify_options(recipe)),
             reads=(origin, work.model, work.ple), sections=("verify",)),
        Step("oracle-save",
             ("oracle", "save", model, "-o", str(work.oracle), "--ple", ple, *prompts, "--repeats", str(recipe.oracle.repeats)),
             reads=(work.model, work.ple), writes=(work.oracle, work.oracle_layers), sections=("oracle",)),
        Step("serve",
             ("serve", model, "--ple", ple, "--engine", recipe.serve.engine, "--port", "0", "--log", str(work.server_log)),
             reads=(work.model, work.ple), sections=("serve",)),
        Step("bench",
             ("bench", "serve", *_bench_options(recipe), "-o", str(work.bench)),
             reads=(work.model, work.ple), writes=(work.bench,), sections=("bench",), needs_server=True),
        Step("oracle-check", ("oracle", "check", model, str(work.oracle), "--ple", ple, *prompts),
             reads=(work.model, work.ple, work.oracle, work.oracle_layers), sections=("oracle",)),
    ]  # fmt: skip


def _synth(recipe: Recipe, work: Workdir) -> Step:
    assert recipe.source is not None
    flags = [flag for flag, on in (("--fp8", recipe.source.fp8), ("--trained", recipe.source.trained)) if on]
    args = ("synth", str(recipe.source.synth), str(work.synth), *flags, "--seed", str(recipe.source.seed))
    return Step("synth", args, reads=(), writes=(work.synth,), sections=("source",))


def _bench_options(recipe: Recipe) -> list[str]:
    bench = recipe.bench
    lists: dict[str, Sequence[object]] = {
        "--depths": bench.contexts,
        "--concurrency": bench.concurrency,
        "--prefix": bench.prefix,
    }
    numbers = {
        "--max-tokens": bench.max_tokens,
        "--repeats": bench.repeats,
        "--max-warmup": bench.max_warmup,
    }
    options = [part for name, values in lists.items() for part in (name, ",".join(map(str, values)))]
    return options + [part for name, value in numbers.items() for part in (name, str(value))]


def _verify_options(recipe: Recipe) -> list[str]:
    options = ["--text", recipe.verify.text, "--tokens", str(recipe.verify.tokens)]
    options += ["--seqlen", str(recipe.verify.seqlen)]
    if recipe.verify.max_kl is not None:
        options += ["--max-kl", str(recipe.verify.max_kl)]
    if recipe.verify.min_top1 is not None:
        options += ["--min-top1", str(recipe.verify.min_top1)]
    return options
