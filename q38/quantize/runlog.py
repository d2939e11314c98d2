"""Keeps AutoRound's own output off the terminal: its log lines go to a file, its failures become one line."""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from q38.base.errors import CheckFailed, Q38Error, ResourceError

LOGGERS = ("autoround", "auto_round", "transformers", "accelerate", "py.warnings")
_LOSS = re.compile(r"loss iter 0: (\S+) -> iter (\d+): (\S+)")


class RunLog(logging.Handler):
    """Writes every record to a file and remembers the last loss that AutoRound reported."""

    def __init__(self, file: TextIO) -> None:
        super().__init__()
        self._file = file
        self._loss: dict[str, float] | None = None
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        message = self.format(record)
        self._file.write(message + "\n")
        self._file.flush()
        if match := _LOSS.search(message):
            self._loss = {
                "loss_before": float(match[1]),
                "loss_after": float(match[3]),
                "best_iter": int(match[2]),
            }

    def take_loss(self) -> dict[str, float]:
        """The loss of the block just tuned ({} if AutoRound reported none); forgotten on reading."""
        loss, self._loss = self._loss, None
        return loss or {}


@contextmanager
def logged_to(path: Path) -> Iterator[RunLog]:
    """Send the records of AutoRound, transformers and accelerate, and Python warnings, to `path`."""
    import auto_round.logger  # noqa: F401  adds its own handler when it is imported

    with path.open("a", encoding="utf-8") as file, warnings.catch_warnings():
        warnings.simplefilter("default")
        handler = RunLog(file)
        saved: list[tuple[logging.Logger, list[Any], bool, int]] = []
        for name in LOGGERS:
            logger = logging.getLogger(name)
            saved.append((logger, logger.handlers[:], logger.propagate, logger.level))
            logger.handlers[:], logger.propagate = [handler], False
            logger.setLevel(logging.INFO)
        logging.captureWarnings(True)
        try:
            yield handler
        finally:
            logging.captureWarnings(False)
            for logger, handlers, propagate, level in saved:
                logger.handlers[:], logger.propagate = handlers, propagate
                logger.setLevel(level)


@contextmanager
def named_in(log: Path) -> Iterator[None]:
    """Turn a failure inside AutoRound into one line that names its log.

    Raises:
        ResourceError: out of memory.
        CheckFailed: anything else, but our own refusals as they are.
    """
    try:
        yield
    except Q38Error:
        raise
    except SystemExit as error:
        raise CheckFailed(
            f"AutoRound gave up (exit {error.code})", where=log, remedy="read the end of this log"
        ) from error
    except Exception as error:
        # AutoRound, transformers, safetensors and torch raise families of their own.
        if isinstance(error, MemoryError) or "out of memory" in str(error).lower():
            raise ResourceError(
                "out of memory while tuning",
                where=log,
                remedy="end other programs there and run again, or lower quantize.experts.batch_size or"
                " calibration.samples and start over with --fresh",
            ) from error
        message = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise CheckFailed(
            f"AutoRound failed ({message})",
            where=log,
            remedy="read the end of this log; the same command resumes",
        ) from error
