"""Tables, progress and errors of the terminal."""

from __future__ import annotations

import pytest
import typer

from q38.base.errors import ResourceError
from q38.cli.console import Console, TerminalProgress, session


def test_numbers_are_right_aligned_and_absent_values_are_dashes(capsys: pytest.CaptureFixture[str]) -> None:
    Console(json_mode=False).table(("name", "n"), [("a", 1), ("long", 1000), ("b", None)])
    assert capsys.readouterr().out.splitlines() == [
        "name      n",
        "----  -----",
        "a         1",
        "long  1,000",
        "b         -",
    ]


def test_json_mode_prints_the_document_alone(capsys: pytest.CaptureFixture[str]) -> None:
    console = Console(json_mode=True)
    console.print("text")
    console.table(("a",), [(1,)])
    console.emit({"ü": 1})
    assert capsys.readouterr().out == '{"ü": 1}\n'


def test_a_shortage_ends_with_3_and_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit) as ended, session():
        raise ResourceError("2 GiB short", where="GPU", remedy="buy more")
    assert ended.value.exit_code == 3
    assert capsys.readouterr().err == "q38: GPU: 2 GiB short. Buy more.\n"


def test_ctrl_c_ends_with_130(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit) as ended, session():
        raise KeyboardInterrupt
    assert ended.value.exit_code == 130
    assert "resumes" in capsys.readouterr().err


def test_a_check_that_fails_ends_with_1_after_its_report(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit) as ended, session() as console:
        console.fail()
        console.print("report")
    assert ended.value.exit_code == 1
    assert capsys.readouterr().out == "report\n"


def test_progress_in_a_log_is_whole_lines(capsys: pytest.CaptureFixture[str]) -> None:
    with TerminalProgress().task("write", 2**20) as task:
        task.advance(2**20)
    err = capsys.readouterr().err
    assert err.startswith("write: 1.0 MiB of 1.0 MiB (100%)")
    assert "\r" not in err
