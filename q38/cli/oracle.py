"""q38 oracle: log-probabilities of fixed continuations, saved once and compared after every change."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from q38.cli.app import app
from q38.cli.console import Console, DebugFlag, DryRunFlag, FreshFlag, JsonFlag, session

if TYPE_CHECKING:
    from q38.measure.oracle_engine import Engine

oracle = typer.Typer(
    no_args_is_help=True, help="Score fixed continuations, and compare the scores after a change."
)
app.add_typer(oracle, name="oracle")

PleOption = Annotated[
    Path | None,
    typer.Option(
        help="Directory of the split n-gram table; default: MODEL/ple or beside MODEL.", show_default=False
    ),
]
PromptsOption = Annotated[
    Path | None,
    typer.Option(
        help="Prompt file, or short: the set that ships with q38 without its long prompts; default: that set.",
        show_default=False,
    ),
]
ServerOption = Annotated[
    str | None,
    typer.Option(
        help="Address of an SGLang server of MODEL that scores; default: transformers in this process.",
        show_default=False,
    ),
]
KeyOption = Annotated[
    str | None, typer.Option(envvar="Q38_API_KEY", help="The server's API key.", show_default=False)
]


class Kind(StrEnum):
    HOST = "host"
    KERNEL = "kernel"
    APPROX = "approx"


class EngineDtype(StrEnum):
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


@oracle.command("save")
def save(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="Directory of the checkpoint.")],
    out: Annotated[Path, typer.Option("-o", "--out", help="Reference file to write (JSON).")],
    ple: PleOption = None,
    prompts: PromptsOption = None,
    dtype: Annotated[
        EngineDtype, typer.Option(help="Arithmetic of the in-process engine.")
    ] = EngineDtype.FLOAT32,
    server: ServerOption = None,
    api_key: KeyOption = None,
    repeats: Annotated[int, typer.Option(help="Times to score; the spread is stored as the noise.")] = 2,
    dry_run: DryRunFlag = False,
    fresh: FreshFlag = False,
    json: JsonFlag = False,
    debug: DebugFlag = False,
) -> None:
    """Score the prompt set and write a reference file.

    The file carries hashes of the model, the tokenizer and the prompts, the noise, and the proof that
    a wrong input and a wrong weight are noticed. A reference that is there already is kept if it is
    of this model, and is replaced only with --fresh.
    """
    with session(json_mode=json, debug=debug) as console:
        from q38.measure.oracle import plan_save
        from q38.measure.oracle import save as run

        with _engine(server, model, api_key) as engine:
            if dry_run:
                about = (
                    {"name": "transformers", "dtype": dtype.value} if engine is None else engine.describe()
                )
                plan = plan_save(model, out, prompts=prompts, engine=about, repeats=repeats, fresh=fresh)
                console.emit(plan)
                if plan["up_to_date"]:
                    console.print(f"{out} is up to date")
                    return
                console.print(
                    f"would score {plan['tokens']:,} tokens of {plan['prompts']} prompts {repeats} times and write {out}"
                )
                return
            document = run(
                model,
                out,
                ple=ple,
                prompts=prompts,
                dtype=dtype.value,
                repeats=repeats,
                fresh=fresh,
                engine=engine,
                progress=console.progress,
            )
        console.emit(document)
        noise = document["noise"]
        console.table(
            ["fault put in", "mean |d| nats", "max |d| nats", "noticed"],
            [[row["what"], row["mean"], row["max"], row["noticed"]] for row in document["self_check"]],
        )
        console.print(
            f"noise over {noise['repeats']} runs: mean {noise['mean']:.3g}, max {noise['max']:.3g}, "
            f"NLL {noise['nll']:.3g} nats"
        )
        console.print(f"wrote {out}")


@oracle.command("check")
def check(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="Directory of the checkpoint.")],
    reference: Annotated[Path, typer.Argument(metavar="REF.json", help="File that q38 oracle save wrote.")],
    ple: PleOption = None,
    prompts: PromptsOption = None,
    kind: Annotated[
        Kind,
        typer.Option(
            "--class",
            help="Kind of change under test: host (no arithmetic changed: mean 0.01, max 0.5 nats), kernel (each block"
            " within 0.001 on identical inputs, mean 0.05) or approx (numbers changed on purpose: NLL within 0.005).",
        ),
    ] = Kind.HOST,
    max_mean: Annotated[
        float | None,
        typer.Option(help="Another limit for the mean |difference|, in nats.", show_default=False),
    ] = None,
    max_abs: Annotated[
        float | None,
        typer.Option(help="Another limit for the largest |difference|, in nats.", show_default=False),
    ] = None,
    max_nll: Annotated[
        float | None,
        typer.Option(help="Another limit for the change of the mean NLL, in nats.", show_default=False),
    ] = None,
    times_noise: Annotated[
        float | None,
        typer.Option(
            help="Limits as so many times the reference's noise, instead of the published ones.",
            show_default=False,
        ),
    ] = None,
    without_layers: Annotated[
        bool,
        typer.Option(
            "--without-layers", help="Judge the kernel class although no blocks can be compared (a server)."
        ),
    ] = False,
    dtype: Annotated[
        EngineDtype | None,
        typer.Option(help="Arithmetic of the in-process engine; default: the reference's."),
    ] = None,
    server: ServerOption = None,
    api_key: KeyOption = None,
    json: JsonFlag = False,
    debug: DebugFlag = False,
) -> None:
    """Score again and compare with a reference file.

    Exits with 1 when a limit is exceeded, and names the worst prompt, token and block. Refuses (exit 2) a
    reference of another source model, tokenizer or prompt set; engine, kernels and weights may differ.
    """
    with session(json_mode=json, debug=debug) as console:
        from q38.measure.oracle import check as run

        with _engine(server, model, api_key) as engine:
            result = run(
                model,
                reference,
                ple=ple,
                prompts=prompts,
                kind=kind.value,
                max_mean=max_mean,
                max_abs=max_abs,
                max_nll=max_nll,
                times_noise=times_noise,
                without_layers=without_layers,
                dtype=dtype.value if dtype else None,
                engine=engine,
                progress=console.progress,
            )
        console.emit(result)
        _print_check(console, result)
        if not result["passed"]:
            console.fail()


def _print_check(console: Console, result: dict[str, Any]) -> None:
    console.table(
        ["prompt", "kind", "language", "tokens", "mean |d| nats", "max |d| nats"],
        [[p["id"], p["kind"], p["language"], p["tokens"], p["mean"], p["max"]] for p in result["prompts"]],
    )
    limits, worst, layers = result["limits"], result["worst"], result["layers"]
    console.table(
        ["", "value", "limit", "noise"],
        [[name, result[name], limits[name], result["noise"].get(name)] for name in ("mean", "max", "nll")],
    )
    if layers["compared"]:
        block = layers["worst"]
        limit = "" if layers["limit"] is None else f", limit {layers['limit']:.3g}"
        console.print(
            f"blocks on identical inputs: largest relative error {block['relative_error']:.3g} "
            f"in block {block['block']}{limit}"
        )
    console.print(
        f"worst: prompt {worst['prompt']}, token {worst['position']} {worst['token']!r}: "
        f"{worst['reference']:.4f} in the reference, now {worst['now']}"
    )
    if not result["weights_match"]:
        console.print("the weights are not those of the reference")
    for key, (before, after) in result["engine_changes"].items():
        console.print(f"engine {key}: {before} in the reference, now {after}")
    console.print("oracle: passed" if result["passed"] else "oracle: FAILED")


@contextmanager
def _engine(server: str | None, model: Path, api_key: str | None) -> Iterator[Engine | None]:
    """The engine behind --server; None: the one in this process."""
    if server is None:
        yield None
        return
    from q38.measure.oracle_sglang import SglangEngine

    with SglangEngine(server, model, api_key=api_key) as engine:
        yield engine


import q38.cli.oracle_kv  # noqa: E402, F401  # registers q38 oracle kv
