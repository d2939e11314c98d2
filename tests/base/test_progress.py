"""Progress that is drawn nowhere."""

from q38.base.progress import SILENT


def test_silent_progress_takes_every_call_and_prints_nothing(capfd: object) -> None:
    with SILENT.task("x", None) as task:
        task.advance(3)
        task.note("y")
    SILENT.say("z")
    out, err = capfd.readouterr()  # type: ignore[attr-defined]
    assert (out, err) == ("", "")
