"""What a recipe leaves out and what an option leaves out are the same."""

from __future__ import annotations

import inspect

from q38.cli.verify import verify as command
from q38.measure.verify import verify
from q38.recipe.schema import Verify


def test_the_text_that_quality_is_measured_on() -> None:
    wanted = Verify().text
    assert [inspect.signature(call).parameters["text"].default for call in (verify, command)] == [wanted] * 2
