"""Refusals: one line, the right exit code, the same facts in JSON."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from q38.base.errors import CheckFailed, InputError, Q38Error, ResourceError


def test_the_line_says_where_what_and_the_remedy() -> None:
    error = InputError("the file is empty", where="a/b.safetensors", remedy="download it again")
    assert str(error) == "a/b.safetensors: the file is empty. Download it again."


@pytest.mark.parametrize(("kind", "code"), [(CheckFailed, 1), (InputError, 2), (ResourceError, 3)])
def test_each_kind_of_failure_has_its_exit_code(kind: type[Q38Error], code: int) -> None:
    assert kind("x").exit_code == code
    assert kind("x").to_dict()["error"]["exit_code"] == code  # type: ignore[index]


@given(st.text(), st.none() | st.text(), st.none() | st.text())
def test_a_refusal_is_always_one_line_and_json(what: str, where: str | None, remedy: str | None) -> None:
    error = InputError(what, where=where, remedy=remedy)
    assert len(str(error).splitlines()) <= 1
    assert json.loads(json.dumps(error.to_dict()))["error"]["what"] == what
