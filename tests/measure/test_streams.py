"""Residual streams in memory and in files."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from q38.measure.streams import Stream

SHAPE = (5, 3, 4)


@pytest.fixture(params=["memory", "files"])
def stream(request: pytest.FixtureRequest, tmp_path: Path) -> Stream:
    return Stream("s", SHAPE, torch.bfloat16, directory=tmp_path if request.param == "files" else None)


def fill(stream: Stream, values: torch.Tensor) -> None:
    for start in range(0, len(values), 2):
        stream.write(start, values[start : start + 2])
    stream.advance()


def test_what_is_written_is_read_after_the_step(stream: Stream) -> None:
    first, second = torch.randn(SHAPE).bfloat16(), torch.randn(SHAPE).bfloat16()
    fill(stream, first)
    assert torch.equal(stream.read(0, 5), first)
    assert torch.equal(stream.read(3, 5), first[3:])
    fill(stream, second)
    assert torch.equal(stream.read(1, 4), second[1:4])


def test_a_step_that_was_not_finished_leaves_the_one_before_it(tmp_path: Path) -> None:
    stream = Stream("s", SHAPE, torch.bfloat16, directory=tmp_path)
    first = torch.randn(SHAPE).bfloat16()
    fill(stream, first)
    stream.write(0, torch.zeros(2, 3, 4, dtype=torch.bfloat16))  # killed here
    again = Stream("s", SHAPE, torch.bfloat16, directory=tmp_path, step=1)
    assert torch.equal(again.read(0, 5), first)
    second = torch.randn(SHAPE).bfloat16()
    fill(again, second)
    assert torch.equal(again.read(0, 5), second)


def test_old_steps_go_when_they_are_dropped_and_others_files_stay(tmp_path: Path) -> None:
    stream, other = (Stream(n, SHAPE, torch.bfloat16, directory=tmp_path) for n in ("s", "t"))
    for _ in range(3):
        fill(stream, torch.zeros(SHAPE).bfloat16())
    fill(other, torch.zeros(SHAPE).bfloat16())
    assert len(list(tmp_path.iterdir())) == 4
    stream.drop_old()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["s-3.bin", "t-1.bin"]
    assert (tmp_path / "s-3.bin").stat().st_size == 5 * 3 * 4 * 2
