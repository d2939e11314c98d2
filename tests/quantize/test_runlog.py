"""AutoRound's records in a file, its losses in our report, its failures in one line."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path

import pytest

from q38.base.errors import CheckFailed, InputError, ResourceError
from q38.quantize.runlog import logged_to, named_in


def test_records_and_warnings_go_to_the_file_alone(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with logged_to(tmp_path / "log"):
        logging.getLogger("autoround").info("tuning a block")
        logging.getLogger("transformers").warning("a fallback")
        warnings.warn("something old", DeprecationWarning, stacklevel=1)
    text = (tmp_path / "log").read_text()
    assert "tuning a block" in text and "a fallback" in text and "something old" in text
    assert capfd.readouterr().err == ""


def test_loggers_are_as_before_afterwards(tmp_path: Path) -> None:
    logger = logging.getLogger("autoround")
    with logged_to(tmp_path / "first"):
        pass
    before = logger.handlers[:], logger.level, logger.propagate
    with pytest.raises(ZeroDivisionError), logged_to(tmp_path / "log"):
        raise ZeroDivisionError
    assert (logger.handlers[:], logger.level, logger.propagate) == before


def test_a_second_run_appends_to_the_log(tmp_path: Path) -> None:
    for text in ("first run", "second run"):
        with logged_to(tmp_path / "log"):
            logging.getLogger("autoround").info(text)
    assert "first run" in (tmp_path / "log").read_text()


def test_the_loss_of_a_block_is_taken_once(tmp_path: Path) -> None:
    with logged_to(tmp_path / "log") as log:
        assert log.take_loss() == {}
        logging.getLogger("autoround").info(
            "quantized 50/60 layers in the block, loss iter 0: 1.5e-03 -> iter 48: 5.0e-04"
        )
        assert log.take_loss() == {"loss_before": 1.5e-3, "loss_after": 5e-4, "best_iter": 48}
        assert log.take_loss() == {}


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (KeyError("name"), CheckFailed, r"log: AutoRound failed \(KeyError: 'name'\)"),
        (SystemExit(-1), CheckFailed, r"log: AutoRound gave up"),
        (MemoryError(), ResourceError, r"out of memory while tuning\. .*batch_size.* with --fresh"),
        (RuntimeError("CUDA out of memory. Tried to allocate"), ResourceError, "out of memory while tuning"),
        (InputError("a refusal of ours"), InputError, "^a refusal of ours"),
    ],
)
def test_a_failure_becomes_one_line(error: BaseException, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message), named_in(Path("log")):
        raise error
