"""Tables, progress and errors of the terminal."""

from __future__ import annotations

import time

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


@pytest.mark.parametrize("unit", ["B", "blocks"])
def test_work_of_an_earlier_process_counts_but_not_for_the_rate(
    unit: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = iter([0.0, 1.0, 10.0, 10.0])  # opened; drawn at once; after ten seconds; closed
    monkeypatch.setattr(time, "monotonic", lambda: next(now))
    with TerminalProgress().task("tune", 100 * 2**20, unit, done=80 * 2**20) as task:
        task.note("first")
        task.advance(10 * 2**20)
    line = capsys.readouterr().err.splitlines()[0]
    assert "(90%)" in line
    assert ("1.0 MiB/s" if unit == "B" else f"{2**20:.2f}/s") in line
    assert line.endswith("ETA 10.0 s first")


def test_before_anything_is_done_here_there_is_no_rate(capsys: pytest.CaptureFixture[str]) -> None:
    with TerminalProgress().task("tune", 48, "blocks", done=40):
        pass
    err = capsys.readouterr().err
    assert err.startswith("tune: 40 of 48 (83%) blocks in ")
    assert "/s" not in err


def test_progress_in_a_log_is_whole_lines(capsys: pytest.CaptureFixture[str]) -> None:
    with TerminalProgress().task("write", 2**20) as task:
        task.advance(2**20)
    err = capsys.readouterr().err
    assert err.startswith("write: 1.0 MiB of 1.0 MiB (100%)")
    assert "\r" not in err
