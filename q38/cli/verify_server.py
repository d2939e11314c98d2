"""The part of `q38 verify` that checks a server: its options as they are written, and its table."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from q38.base.errors import InputError
from q38.cli.console import Console

SHOWN = 5  # faults of a row; the JSON document has more


def refuse_checkpoint_options(**given: object) -> None:
    """Options of the other half of the verb contradict --server. Raises InputError."""
    for name, value in given.items():
        if value is not None:
            option = name if name.isupper() else f"--{name.replace('_', '-')}"
            raise InputError(
                "is for a checkpoint, not for a server", where=option, remedy="leave it out, or --server"
            )


def run(
    console: Console,
    server: str,
    *,
    model: str | None,
    api_key: str | None,
    context: str | None,
    answer_tokens: int,
    capability: bool | None,
    stall_s: float,
    engine: str,
    device: str | None,
    ple: Path | None,
    only: str | None,
    skip: str | None,
    needles: str | None,
    depths: str,
    long_prompt: str | None,
    text: str,
    tokens: int,
    max_nll: float | None,
    tasks: str | None,
    eval_limit: int | None,
) -> None:
    """Check a server, print the rows, and let the verb end with 1 where one failed."""
    from q38.measure.behaviour.registry import Options
    from q38.measure.verify_server import Evaluations, ServerOptions, verify_server

    checks = Options(
        long_prompt=None if long_prompt is None else count(long_prompt, "--long-prompt"),
        needles=[count(part, "--needles") for part in words(needles)],
        depths=[_share(part) for part in words(depths)],
        text=text,
        tokens=tokens,
        max_nll=max_nll,
        only=words(only),
        skip=words(skip),
    )
    options = ServerOptions(
        model=model,
        api_key=api_key,
        context=None if context is None else count(context, "--context"),
        answer_tokens=answer_tokens,
        capability=capability,
        stall_s=stall_s,
        engine=engine,
        device=device,
        ple=ple,
    )
    evaluations = Evaluations(words(tasks), eval_limit)
    document = verify_server(
        server, options=options, checks=checks, evaluations=evaluations, progress=console.progress
    )
    console.emit(document)
    print_document(console, document)
    if not document["passed"]:
        console.fail()


def print_document(console: Console, document: dict[str, Any]) -> None:
    """The rows for people, and the verdict."""
    about = document["server"]
    console.print(f"{about['model']} at {about['url']}, context {about['context'] or 'not reported'}\n")
    for part in document["parts"]:
        rows = [
            [
                check["name"],
                verdict(check),
                check["checked"] or None,
                check["unit"],
                check["value"],
                check["standard_error"],
                check["limit"],
                _clip(check["note"]),
            ]
            for check in part["checks"]
        ]
        console.table(
            ["check", "result", "over", "unit", "value", "standard error", "limit", "note"],
            rows,
            title=part["name"],
        )
        for check in part["checks"]:
            for fault in check["faults"][:SHOWN]:
                console.print(f"  {check['name']}: {fault['what']}")
            if check["fault_count"] > SHOWN:
                console.print(f"  {check['name']}: {check['fault_count'] - SHOWN} more")
        console.print()
    failed, unjudged = document["failed"], document["unjudged"]
    if not document["passed"] and about["log"]:
        console.print(f"the server's log: {about['log']}")
    if document["passed"]:
        console.print(f"verify: passed ({unjudged} rows without a verdict)")
    elif failed:
        console.print(f"verify: FAILED ({failed} rows failed, {unjudged} without a verdict)")
    else:
        console.print("verify: FAILED (no row could be judged)")


def verdict(check: dict[str, Any]) -> str:
    """One word for the table."""
    if check["passed"] is None:
        return "-"
    return "passed" if check["passed"] else "FAILED"


def _clip(text: str, most: int = 90) -> str:
    return text if len(text) <= most else text[:most].rstrip() + "..."


def words(text: str | None) -> list[str]:
    """The parts of a list written with commas."""
    return [part.strip() for part in (text or "").split(",") if part.strip()]


def count(text: str, option: str) -> int:
    """`8192` or `8k` (8,192) -> tokens. Raises InputError."""
    match = re.fullmatch(r"(\d+)(k?)", text.strip().lower())
    if not match or int(match[1]) == 0:
        raise InputError(f"'{text}' is no number of tokens", where=option, remedy="write it like 8192 or 8k")
    return int(match[1]) * (1024 if match[2] else 1)


def _share(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise InputError(f"'{text}' is no share", where="--depths", remedy="write 0.1,0.5,0.9") from None
