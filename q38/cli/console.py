"""What every verb shares: options, progress on stderr, tables, JSON on stdout, errors and exit codes."""

from __future__ import annotations

import json
import sys
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Annotated, Any

import typer

from q38.base import settings
from q38.base.errors import Q38Error
from q38.base.progress import SILENT, Progress, Task
from q38.base.units import format_bytes, format_seconds

JsonFlag = Annotated[
    bool, typer.Option("--json", help="Print one JSON document on stdout; progress goes to stderr.")
]
DebugFlag = Annotated[bool, typer.Option("--debug", help="Show the traceback of a failure.")]
DryRunFlag = Annotated[
    bool, typer.Option("--dry-run", help="Say what would be read and written, and write nothing.")
]
FreshFlag = Annotated[
    bool, typer.Option("--fresh", help="Start over: remove what an earlier run of q38 wrote here.")
]


class InternalError(Q38Error):
    """A fault of q38 itself (exit code 1)."""

    def __init__(self, what: str) -> None:
        super().__init__(what, remedy="run again with --debug and report it")


class Console:
    """Output of one verb. Results go to stdout, everything else to stderr."""

    def __init__(self, *, json_mode: bool) -> None:
        self.json_mode = json_mode
        self.progress: Progress = TerminalProgress()
        self.exit_code = 0

    def emit(self, document: Mapping[str, Any]) -> None:
        """The verb's JSON document; printed only with --json. Call once."""
        if self.json_mode:
            sys.stdout.write(json.dumps(document, ensure_ascii=False) + "\n")
            sys.stdout.flush()  # a reader of a verb that goes on (serve) must not wait for the buffer

    def print(self, text: str = "") -> None:
        """A line for people; silent with --json."""
        if not self.json_mode:
            sys.stdout.write(text + "\n")
            sys.stdout.flush()

    def table(
        self, columns: Sequence[str], rows: Sequence[Sequence[object]], *, title: str | None = None
    ) -> None:
        """A table for people; numbers are right-aligned."""
        if self.json_mode:
            return
        cells = [[_cell(v) for v in row] for row in rows]
        widths = [max(len(r[i]) for r in [list(columns), *cells]) for i in range(len(columns))]
        right = [
            bool(rows) and all(isinstance(r[i], (int, float)) or r[i] is None for r in rows)
            for i in range(len(columns))
        ]
        if title:
            self.print(title)
        for line in [list(columns), ["-" * w for w in widths], *cells]:
            self.print(
                "  ".join(
                    c.rjust(w) if r else c.ljust(w) for c, w, r in zip(line, widths, right, strict=True)
                ).rstrip()
            )

    def fail(self, code: int = 1) -> None:
        """Let the verb end with this exit code after it has printed its report."""
        self.exit_code = code


@contextmanager
def session(*, json_mode: bool = False, debug: bool = False) -> Iterator[Console]:
    """Run the body of a verb: one-line refusals, exit codes 1/2/3, 130 on Ctrl-C."""
    console = Console(json_mode=json_mode)
    debug = debug or settings.load().debug
    try:
        yield console
    except Q38Error as error:
        if debug:
            traceback.print_exc()
        if json_mode:
            sys.stdout.write(json.dumps(error.to_dict(), ensure_ascii=False) + "\n")
        sys.stderr.write(f"q38: {error}\n")
        raise typer.Exit(error.exit_code) from None
    except KeyboardInterrupt:
        sys.stderr.write("q38: interrupted; a step that writes files resumes with the same command\n")
        raise typer.Exit(130) from None
    except BrokenPipeError:
        raise typer.Exit(0) from None
    except typer.Exit:
        raise
    except Exception as error:  # noqa: BLE001
        # A fault of ours: keep it one line, and say how to see more.
        if debug:
            traceback.print_exc()
        internal = InternalError(
            f"internal error: {type(error).__name__}: {' '.join(str(error).split())[:300]}"
        )
        if json_mode:
            sys.stdout.write(json.dumps(internal.to_dict(), ensure_ascii=False) + "\n")
        sys.stderr.write(f"q38: {internal}\n")
        raise typer.Exit(1) from None
    if console.exit_code:
        raise typer.Exit(console.exit_code)


class TerminalProgress:
    """Bars on a terminal; a line every few seconds elsewhere (logs, CI)."""

    @contextmanager
    def task(self, label: str, total: float | None, unit: str = "B", done: float = 0) -> Iterator[Task]:
        task = _LineTask(label, total, unit, done, live=sys.stderr.isatty())
        try:
            yield task
        finally:
            task.close()

    def say(self, text: str) -> None:
        sys.stderr.write(text + "\n")
        sys.stderr.flush()


class _LineTask:
    def __init__(self, label: str, total: float | None, unit: str, done: float, *, live: bool) -> None:
        self.label, self.total, self.unit, self.live = label, total, unit, live
        self.count, self.done, self.text, self.start = float(done), float(done), "", time.monotonic()
        self.drawn = self.start if not live else 0.0

    def advance(self, n: float) -> None:
        self.count += n
        self._draw()

    def note(self, text: str) -> None:
        self.text = text
        self._draw()

    def close(self) -> None:
        self._draw(last=True)

    def _draw(self, *, last: bool = False) -> None:
        now = time.monotonic()
        if not last and now - self.drawn < (0.1 if self.live else 5.0):
            return
        self.drawn = now
        elapsed = max(now - self.start, 1e-6)
        own = self.count - self.done
        rate = own / elapsed
        amount = format_bytes if self.unit == "B" else lambda n: f"{n:.0f}"
        parts = [f"{self.label}:", amount(self.count)]
        if self.total:
            parts.append(f"of {amount(self.total)} ({min(self.count / self.total, 1):.0%})")
        if self.unit != "B":
            parts.append(self.unit)
        if own and self.unit != "s":
            parts.append(f"{format_bytes(rate)}/s" if self.unit == "B" else f"{rate:.2f}/s")
        if last:
            parts.append(f"in {format_seconds(elapsed)}")
        elif self.total and own:
            parts.append(f"ETA {format_seconds((self.total - self.count) / rate)}")
        if self.text and not last:
            parts.append(self.text)
        line = " ".join(parts)
        sys.stderr.write(f"\r\x1b[2K{line}" + ("\n" if last else "") if self.live else line + "\n")
        sys.stderr.flush()


def quiet() -> Progress:
    """Progress that draws nothing (for verbs whose output is itself a stream)."""
    return SILENT


def _cell(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
