"""The steps of a run: which command each one is, what it reads and writes, which recipe sections it depends on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from q38.recipe.schema import Recipe
from q38.residency.find import PROFILE
from q38.serving.profile_choice import NONE

SERVE = "serve"
MEASURE = "serve-measuring"  # the server without a profile, which steps measure that would not fit in memory
URL = "URL"  # stands in a step's arguments for the address of its server


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
        return self.root / PROFILE

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
        server: name of the step that starts the server which this one talks to; its address takes the place of URL in `args`.
    """

    name: str
    args: tuple[str, ...]
    reads: tuple[Path, ...]
    writes: tuple[Path, ...] = ()
    sections: tuple[str, ...] = ()
    server: str | None = None

    @property
    def starts_server(self) -> bool:
        """Whether this is a server, up as long as later steps talk to it."""
        return self.name in (SERVE, MEASURE)


def plan_steps(recipe: Recipe, source: Path | None, work: Workdir) -> list[Step]:
    """All steps in order. `source` is None where the recipe makes a synthetic model.

    Measurements that a server makes come last before the server that is asked and timed: none holds a GPU while another step works.
    """
    origin = source or work.synth
    src, ple, model = str(origin), str(work.ple), str(work.model)
    before = (_placement(recipe, work), _verify(recipe, origin, work), _oracle_save(recipe, work))
    local = [step for step in before if step and step.server is None]
    served = [step for step in before if step and step.server is not None]
    after = (_bench(recipe, work), _oracle_check(recipe, work))
    return [
        *([] if source else [_synth(recipe, work)]),
        Step("inspect", ("inspect", src), reads=(origin,)),
        Step("split-ple", ("split-ple", src, "-o", ple, "--dtype", recipe.ple.dtype),
             reads=(origin,), writes=(work.ple,), sections=("ple",)),
        Step("quantize", ("quantize", src, "-o", str(work.quantized), "--recipe", str(work.recipe), "--ple", ple),
             reads=(origin, work.ple), writes=(work.quantized,), sections=("name", "calibration", "quantize")),
        Step("requant-int8", ("requant-int8", str(work.quantized), "-o", model, "--source", src, "--recipe", str(work.recipe)),
             reads=(origin, work.quantized), writes=(work.model,), sections=("requant_int8",)),
        *local,
        *([_serve(MEASURE, recipe, work)] if served else []),
        *served,
        _serve(SERVE, recipe, work),
        *(step for step in after if step),
    ]  # fmt: skip


def left_out(recipe: Recipe) -> list[str]:
    """What the recipe leaves out of a run, a sentence each."""
    told = {
        "placement": "No routing profile (placement.engine: none): the server starts with all experts alike.",
        "oracle": "No oracle (oracle.engine: none): nothing says that the served model computes what was built.",
    }
    return [text for section, text in told.items() if getattr(recipe, section).engine == "none"]


def _placement(recipe: Recipe, work: Workdir) -> Step | None:
    placement = recipe.placement
    engine = _engine(placement.engine, work)
    args = ("build-placement", str(work.model), "-o", str(work.placement), *engine,
            "--text", placement.text, "--tokens", str(placement.tokens))  # fmt: skip
    step = Step("build-placement", args, (work.model, work.ple), (work.placement,), ("placement",))
    return _at(step, placement.engine, MEASURE)


def _verify(recipe: Recipe, origin: Path, work: Workdir) -> Step:
    args = ("verify", str(work.model), "--source", str(origin), "--ple", str(work.ple),
            *_verify_options(recipe))  # fmt: skip
    return Step("verify", args, reads=(origin, work.model, work.ple), sections=("verify",))


def _oracle_save(recipe: Recipe, work: Workdir) -> Step | None:
    oracle = recipe.oracle
    args = ("oracle", "save", str(work.model), "-o", str(work.oracle), *_engine(oracle.engine, work),
            *_prompts(recipe), "--repeats", str(oracle.repeats))  # fmt: skip
    step = Step("oracle-save", args, (work.model, work.ple), _reference(recipe, work), ("oracle",))
    return _at(step, oracle.engine, MEASURE)


def _oracle_check(recipe: Recipe, work: Workdir) -> Step | None:
    engine = recipe.oracle.engine
    args = ("oracle", "check", str(work.model), str(work.oracle), *_engine(engine, work), *_prompts(recipe))
    reads = (work.model, work.ple, *_reference(recipe, work))
    return _at(Step("oracle-check", args, reads, sections=("oracle",)), engine, SERVE)


def _bench(recipe: Recipe, work: Workdir) -> Step:
    # --fresh: replaces the result of a run that was killed after writing it.
    options = (*_bench_options(recipe), "--url", URL, "-o", str(work.bench), "--fresh")
    args = ("bench", "serve", *options)
    return Step("bench", args, (work.model, work.ple), (work.bench,), ("bench",), server=SERVE)


def _serve(name: str, recipe: Recipe, work: Workdir) -> Step:
    """A server: of the question and the benchmark, with the run's profile, or of what is measured before there is one.

    Engine auto is given no profile here: where it takes sglang, `q38 serve` finds the one beside the model.
    """
    serve = recipe.serve
    unused = name == MEASURE or recipe.placement.engine == "none" or serve.engine == "transformers"
    profile = () if unused else (work.placement,)
    options = [word for option in serve.options.items() for word in option]
    if serve.engine == "sglang":
        options += ["--profile", str(work.placement) if profile else NONE]
    args = ("serve", str(work.model), "--ple", str(work.ple), "--engine", serve.engine, *options,
            "--port", "0", "--log", str(work.server_log))  # fmt: skip
    # What the recipe leaves out is in no step of its own; from the server on, a run without it is another.
    sections = ("serve",) if name == MEASURE else ("serve", "placement", "oracle")
    return Step(name, args, (work.model, work.ple, *profile), sections=sections)


def _engine(engine: str, work: Workdir) -> tuple[str, str]:
    """Where a measurement gets its numbers: the server, or the model and its n-gram table in its own process."""
    return ("--server", URL) if engine == "sglang" else ("--ple", str(work.ple))


def _at(step: Step, engine: str, server: str) -> Step | None:
    """The step with its server; None where the recipe leaves it out."""
    if engine == "none":
        return None
    return replace(step, server=server) if engine == "sglang" else step


def _reference(recipe: Recipe, work: Workdir) -> tuple[Path, ...]:
    """What `oracle save` writes; the blocks of a server are out of its reach."""
    return (work.oracle,) if recipe.oracle.engine == "sglang" else (work.oracle, work.oracle_layers)


def _prompts(recipe: Recipe) -> tuple[str, ...]:
    return ("--prompts", recipe.oracle.prompts) if recipe.oracle.prompts else ()


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
