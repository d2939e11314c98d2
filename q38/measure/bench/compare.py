"""Whether a server became slower: ratios of speeds between two runs, with intervals, against a gate."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from q38.base.errors import InputError
from q38.base.files import has_schema, holds
from q38.measure.bench.plan import Cell, cell_name
from q38.measure.ratios import LogRatio, independent, paired, pooled

SCHEMA = "q38.bench/2"
GATE = 0.98
CONFIDENCE = 0.95  # that no row's interval misses its ratio
SLOWER, NOT_SLOWER, UNDECIDED = "slower", "not slower", "undecided"
SOURCE = "20 % trimmed t on log ratios, one value a round (Yuen 1974); Bonferroni over the rows (q38.measure.ratios)"
# Speeds of a round, each the larger the better. Means over the round, so that a shift of every token and a few long
# stalls both count; a median would miss the stalls, and a busy machine's jitter moves it more.
_SPEEDS: dict[str, Callable[[Mapping[str, Any]], float | None]] = {
    "first token": lambda r: 1 / r["first_token_s"],
    "decode": lambda r: r["decode_tokens_per_s"],
    "all output": lambda r: r["output_tokens_per_s"] if len(r["requests"]) > 1 else None,
}
_MACHINE = ("cpu", "cores", "gpus")


def compare(
    new: Sequence[Mapping[str, Any]],
    old: Sequence[Mapping[str, Any]],
    *,
    gate: float = GATE,
    in_pairs: bool = False,
) -> dict[str, Any]:
    """Compare the cells that both runs have.

    A ratio is new speed / old speed. A row is "slower" where its whole interval lies below the gate, "not slower" where
    it lies at or above it, and "undecided" where the gate is inside.

    Args:
        new, old: cells of a result.
        in_pairs: rounds of the same number were made in turns.

    Returns:
        {"gate", "confidence", "paired", "source", "rows", "verdict"}: the verdict is "slower" if any row is, else
        "undecided" if any row is.

    Raises:
        InputError: no common cell, or fewer than two rounds in one.
    """
    before = {_key(cell): cell for cell in old}
    ratios: list[tuple[str, str, LogRatio, float, float]] = []
    by_speed: dict[str, list[LogRatio]] = {}
    for cell in new:
        other = before.get(_key(cell))
        if other is None:
            continue
        for name, speed in _SPEEDS.items():
            a, b = _values(cell, speed), _values(other, speed)
            if a is None or b is None:
                continue
            if min(len(a), len(b)) < 2:
                raise _single_round()
            ratio = (paired if in_pairs else independent)(a, b)
            ratios.append((cell_name(*_key(cell)), name, ratio, statistics.median(a), statistics.median(b)))
            by_speed.setdefault(name, []).append(ratio)
    if not ratios:
        raise _nothing_in_common()
    together = [(name, pooled(parts)) for name, parts in by_speed.items() if len(parts) > 1]
    confidence = 1 - (1 - CONFIDENCE) / (len(ratios) + len(together))
    rows = [_row("all cells", name, ratio, confidence, gate) for name, ratio in together]
    for cell_label, name, ratio, a_median, b_median in ratios:
        row = _row(cell_label, name, ratio, confidence, gate)
        rows.append({**row, "new": a_median, "old": b_median})
    verdicts = {row["verdict"] for row in rows}
    return {
        "gate": gate,
        "confidence": CONFIDENCE,
        "paired": in_pairs,
        "source": SOURCE,
        "verdict": next((v for v in (SLOWER, UNDECIDED) if v in verdicts), NOT_SLOWER),
        "rows": rows,
    }


def compare_results(
    new: Mapping[str, Any],
    old: Mapping[str, Any],
    *,
    gate: float = GATE,
    allow_different: bool = False,
    where: str = "--against",
) -> dict[str, Any]:
    """The comparison of two stored results, as `compare`, with "against" and "differences" (those that were allowed).

    Raises:
        InputError: they measure different things, or as `compare`.
    """
    changed = require_same(new, old, where=where, allow=allow_different)
    return {**_about(old, changed), **compare(new["cells"], old["cells"], gate=gate)}


def compare_rivals(result: Mapping[str, Any], changed: list[str], *, gate: float) -> dict[str, Any]:
    """As `compare_results`, of a result whose "rival" was measured in turns."""
    rival = {**result["rival"], "when": result["when"]}
    return {
        **_about(rival, changed),
        **compare(result["cells"], rival["cells"], gate=gate, in_pairs=True),
    }


def require_common(cells: Sequence[Cell], old: Mapping[str, Any]) -> None:
    """Refuse a comparison before the measurement that it would be made of.

    Raises:
        InputError: the stored result has none of the cells, or a single round of one.
    """
    wanted = {(c.depth, c.concurrency, c.prefix) for c in cells}
    common = [len(cell["rounds"]) for cell in old["cells"] if _key(cell) in wanted]
    if not common:
        raise _nothing_in_common()
    if min(common) < 2:
        raise _single_round()


def differences(new: Mapping[str, Any], old: Mapping[str, Any]) -> list[str]:
    """What makes two runs no measurement of the same thing: model, files, text, settings, machine.

    Versions of the software are not among them: those are what one compares.
    """
    found = []
    pairs: list[tuple[str, Any, Any]] = [("model", new["server"]["model"], old["server"]["model"])]
    files, other = new["server"].get("files"), old["server"].get("files")
    if files and other:
        pairs.append(("model files", files, other))
    pairs.append(("text", new["text"]["sha256"][:12], old["text"]["sha256"][:12]))
    pairs += [
        (name, new["settings"].get(name), old["settings"].get(name))
        for name in ("depths", "concurrency", "prefixes", "max_tokens", "seed", "ignore_eos")
    ]
    here, there = new["machine"], old["machine"]
    pairs.append(("server on this machine", here["runs_the_server"], there["runs_the_server"]))
    pairs += [(name, _hardware(here, name), _hardware(there, name)) for name in _MACHINE]
    for name, a, b in pairs:
        if a != b:
            found.append(f"{name}: {_told(a)}, was {_told(b)}" if name != "model files" else f"{name} differ")
    return found


def require_same(new: Mapping[str, Any], old: Mapping[str, Any], *, where: str, allow: bool) -> list[str]:
    """The differences, where `allow` permits any.

    Raises:
        InputError: there are some and they are not allowed.
    """
    found = differences(new, old)
    if found and not allow:
        raise InputError(
            f"not the same measurement ({'; '.join(found)})",
            where=where,
            remedy="measure the same thing, or compare all the same with --allow-different",
        )
    return found


def read_result(file: Path) -> dict[str, Any]:
    """A finished result of `q38 bench serve`.

    Raises:
        InputError: the file is missing, is no such result, or is of a run that did not end.
    """
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(
            f"cannot be read ({error})", where=file, remedy="give a result of q38 bench serve -o"
        ) from None
    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        raise InputError(
            f"is not a result of this version's q38 bench serve ({SCHEMA})",
            where=file,
            remedy="measure it again",
        )
    if not document.get("complete"):
        raise InputError("is of a run that did not end", where=file, remedy="measure it again")
    return document


def refuse_finished(file: Path, *, fresh: bool) -> None:
    """Refuse to write a result over a finished one, which a later comparison may need; one that did not end is replaced.

    Args:
        fresh: replace a finished one too.

    Raises:
        InputError: as said, or the file holds something else.
    """
    there = holds(file, "result of q38 bench serve", has_schema(SCHEMA))
    if there and not fresh and json.loads(file.read_text(encoding="utf-8")).get("complete"):
        raise InputError(
            "holds a finished result", where=file, remedy="choose another file, or replace it with --fresh"
        )


def _about(old: Mapping[str, Any], changed: list[str]) -> dict[str, Any]:
    return {"against": {"server": old["server"], "when": old["when"]}, "differences": changed}


def _nothing_in_common() -> InputError:
    return InputError(
        "the two runs have no cell in common", where="--against", remedy="measure the same --depths"
    )


def _single_round() -> InputError:
    return InputError("one round has no spread to compare with", where="--repeats", remedy="use at least 2")


def _key(cell: Mapping[str, Any]) -> tuple[int, int, str]:
    return cell["depth"], cell["concurrency"], cell["prefix"]


def _values(
    cell: Mapping[str, Any], speed: Callable[[Mapping[str, Any]], float | None]
) -> list[float] | None:
    values = [speed(played) for played in cell["rounds"]]
    return None if None in values else [v for v in values if v is not None]


def _row(cell: str, name: str, ratio: LogRatio, confidence: float, gate: float) -> dict[str, Any]:
    interval = ratio.interval(confidence)
    verdict = SLOWER if interval.high < gate else NOT_SLOWER if interval.low >= gate else UNDECIDED
    return {
        "cell": cell,
        "speed": name,
        "ratio": interval.value,
        "low": interval.low,
        "high": interval.high,
        "verdict": verdict,
    }


def _hardware(machine: Mapping[str, Any], name: str) -> Any:
    value = machine.get(name)
    return [gpu["name"] for gpu in value] if name == "gpus" and value is not None else value


def _told(value: Any) -> str:
    if isinstance(value, list):
        return ",".join(map(str, value)) or "none"
    return str(value)
