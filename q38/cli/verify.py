"""q38 verify: is this checkpoint whole and close to its source; does this server behave?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from q38.base.errors import InputError
from q38.cli import verify_server
from q38.cli.app import app
from q38.cli.console import Console, DebugFlag, FreshFlag, JsonFlag, session

KL, TOP1 = "kl divergence", "top-1 agreement"
SHOWN = 10  # faults per check; the JSON document has more


@app.command("verify")
def verify(
    model: Annotated[
        Path | None,
        typer.Argument(
            metavar="MODEL", help="Directory of the checkpoint; not with --server.", show_default=False
        ),
    ] = None,
    source: Annotated[
        Path | None,
        typer.Option(help="Checkpoint that MODEL was made from (bf16 or FP8).", show_default=False),
    ] = None,
    ple: Annotated[
        Path | None,
        typer.Option(
            help="Directory of the split n-gram table; default: MODEL/ple or beside MODEL.",
            show_default=False,
        ),
    ] = None,
    parts: Annotated[
        str | None,
        typer.Option(
            help="Parts to run, separated by commas: structure, numbers, quality. Default: all, quality only"
            " with --source.",
            show_default=False,
        ),
    ] = None,
    text: Annotated[
        str,
        typer.Option(
            help="Text, of which the held-out part is used: 'multilingual', 'stdlib', a JSONL file or a hub file;"
            " see docs/quality.md."
        ),
    ] = "multilingual",
    tokens: Annotated[
        int, typer.Option(help="Tokens of text that quality, or the NLL on a server, is measured on.")
    ] = 4096,
    seqlen: Annotated[int, typer.Option(help="Tokens per sequence; errors are clustered by sequence.")] = 256,
    max_kl: Annotated[
        float | None,
        typer.Option(help="Fail above this mean KL divergence from the source, in nats.", show_default=False),
    ] = None,
    min_top1: Annotated[
        float | None,
        typer.Option(
            help="Fail below this share of positions where both choose the same token.", show_default=False
        ),
    ] = None,
    dtype: Annotated[
        str,
        typer.Option(help="Arithmetic of the quality part: bfloat16 (as served) or float32 (less noise)."),
    ] = "bfloat16",
    device: Annotated[
        str, typer.Option(help="Where the quality part computes: auto, cpu, cuda or cuda:N.")
    ] = "auto",
    memory: Annotated[
        str | None,
        typer.Option(
            help="Host memory the quality part may take, for example 28GiB; default: what is available.",
            show_default=False,
        ),
    ] = None,
    report: Annotated[
        Path | None,
        typer.Option(
            help="Directory for the quality report (Markdown, JSON, plots) and the state that a killed run resumes from.",
            show_default=False,
        ),
    ] = None,
    server: Annotated[
        str | None,
        typer.Option(
            help="Check a server instead: its address, or a model directory to serve meanwhile.",
            show_default=False,
        ),
    ] = None,
    only: Annotated[
        str | None,
        typer.Option(
            help="Server checks to run, separated by commas; default: all. Names: docs/verify.md.",
            show_default=False,
        ),
    ] = None,
    skip: Annotated[
        str | None,
        typer.Option(help="Server checks to leave out, separated by commas.", show_default=False),
    ] = None,
    capability: Annotated[
        bool | None,
        typer.Option(
            "--capability/--no-capability",
            help="Judge what the model can do; default: unless the model is known to be tiny.",
            show_default=False,
        ),
    ] = None,
    needles: Annotated[
        str | None,
        typer.Option(help="Lengths of needle tests in tokens, for example 2k,8k.", show_default=False),
    ] = None,
    depths: Annotated[
        str, typer.Option(help="Depths of the needles as shares of the text.")
    ] = "0.1,0.3,0.5,0.7,0.9",
    long_prompt: Annotated[
        str | None,
        typer.Option(
            help="Tokens of the prompt over several chunks; default: three and a half chunks of the server.",
            show_default=False,
        ),
    ] = None,
    context: Annotated[
        str | None,
        typer.Option(
            help="Tokens of prompt and answer that the server holds; default: what it says.",
            show_default=False,
        ),
    ] = None,
    answer_tokens: Annotated[
        int, typer.Option(help="Most tokens of an answer that a server check reads.")
    ] = 256,
    max_nll: Annotated[
        float | None,
        typer.Option(help="Fail above this NLL of held-out text on the server, in nats.", show_default=False),
    ] = None,
    evaluation: Annotated[
        str | None,
        typer.Option(
            "--eval",
            help="Standard evaluations by lm-eval on the server, separated by commas, for example gsm8k.",
            show_default=False,
        ),
    ] = None,
    eval_limit: Annotated[
        int | None, typer.Option(help="Questions of each evaluation; default: all.", show_default=False)
    ] = None,
    served_model: Annotated[
        str | None,
        typer.Option(help="Model name on the server; default: the first that it lists.", show_default=False),
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(envvar="Q38_API_KEY", help="The server's API key.", show_default=False)
    ] = None,
    stall_timeout: Annotated[
        float, typer.Option(min=0.1, help="Seconds of silence after which a request has failed.")
    ] = 600.0,
    engine: Annotated[
        str, typer.Option(help="Engine of a server that is started here: sglang, transformers or auto.")
    ] = "auto",
    serve_device: Annotated[
        str | None,
        typer.Option(
            help="Device of a server that is started here, as --device of q38 serve.", show_default=False
        ),
    ] = None,
    fresh: FreshFlag = False,
    json: JsonFlag = False,
    debug: DebugFlag = False,
) -> None:
    """Check structure and numbers of a checkpoint, and measure its quality against the source.

    Structure compares files, tensors, config and tokenizer. Numbers looks for values that are not
    finite, unused codes and weights far from the source's. Quality is NLL, full-vocabulary KL
    divergence and top-1 agreement on held-out text, with standard errors and the noise floor; it
    needs neither model whole in memory.

    With --server it checks a running server, or one that it starts on a model directory and stops: the
    behaviour that every model must show (protocol) and what the model can do (capability).
    Exits with 1 if any check fails.
    """
    with session(json_mode=json, debug=debug) as console:
        if server is not None:
            verify_server.refuse_checkpoint_options(
                MODEL=model, source=source, report=report, max_kl=max_kl, min_top1=min_top1, memory=memory
            )
            verify_server.run(
                console,
                server,
                model=served_model,
                api_key=api_key,
                context=context,
                answer_tokens=answer_tokens,
                capability=capability,
                stall_s=stall_timeout,
                engine=engine,
                device=serve_device,
                ple=ple,
                only=only,
                skip=skip,
                needles=needles,
                depths=depths,
                long_prompt=long_prompt,
                text=text,
                tokens=tokens,
                max_nll=max_nll,
                tasks=evaluation,
                eval_limit=eval_limit,
            )
            return
        if model is None:
            raise InputError("nothing to check", where="MODEL", remedy="give MODEL, or --server")
        from q38.base.units import parse_bytes
        from q38.measure.evaluate import resolve_device
        from q38.measure.verify import verify as run

        if device != "auto":  # before the long parts that come first
            resolve_device(device)
        document = run(
            model,
            source=source,
            ple=ple,
            parts=None if parts is None else [part.strip() for part in parts.split(",") if part.strip()],
            text=text,
            tokens=tokens,
            seqlen=seqlen,
            max_kl=max_kl,
            min_top1=min_top1,
            dtype=dtype,  # type: ignore[arg-type]  # checked there
            device=device,
            memory=parse_bytes(memory, where="--memory") if memory else None,
            report=report,
            fresh=fresh,
            progress=console.progress,
        )
        console.emit(document)
        for part in document["parts"]:
            _print_part(console, part)
        console.print("verify: passed" if document["passed"] else "verify: FAILED")
        if not document["passed"]:
            console.fail()


def _print_part(console: Console, part: dict[str, Any]) -> None:
    floor = part.get("floor", {})
    measured = any(check["value"] is not None for check in part["checks"])
    columns = ["check", "result", "over", "unit"]
    columns += ["value", "standard error", "noise floor", "limit"] if measured else ["note"]
    rows = []
    for check in part["checks"]:
        row = [check["name"], verify_server.verdict(check), check["checked"], check["unit"]]
        noise = floor.get(check["name"], {}).get("value")
        row += (
            [check["value"], check["standard_error"], noise, check["limit"]] if measured else [check["note"]]
        )
        rows.append(row)
    console.table(columns, rows, title=part["name"])
    for check in part["checks"]:
        for fault in check["faults"][:SHOWN]:
            tensor = f" {fault['tensor']}" if fault["tensor"] else ""
            console.print(f"  {check['name']}: {fault['file']}{tensor}: {fault['what']}")
        if check["fault_count"] > SHOWN:
            console.print(f"  {check['name']}: {check['fault_count'] - SHOWN} more")
    if groups := part.get("groups"):
        console.table(
            ["group", "bits", "matrices", "levels used", "relative error", "worst", "limit", "worst matrix"],
            [
                [g["name"], g["bits"], g["matrices"], g["levels_used"], g["relative_error"],
                 g["worst_relative_error"], g["limit"], g["worst_matrix"]]
                for g in groups
            ],
        )  # fmt: skip
    if layers := part.get("layers"):
        console.table(
            ["block", "relative error of the output", "standard error", "noise floor", "of the block alone"],
            [
                [row["layer"], row["relative_error"], row["standard_error"], row["floor"], row["own"]]
                for row in layers
            ],
        )
    for kind, rows in part.get("by", {}).items():
        console.table(
            [kind, "positions", "nll, source", "nll", KL, "standard error", "noise floor", TOP1],
            [
                [r["name"], r["positions"], r["nll, source"]["value"], r["nll"]["value"], r[KL]["value"],
                 r[KL]["standard_error"], r["floor"]["value"], r[TOP1]["value"]]
                for r in rows
            ],
        )  # fmt: skip
    console.print()
