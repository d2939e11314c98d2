"""The pins of pyproject.toml, read back from the installed metadata."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from q38.serving import requirements
from q38.serving.requirements import lacking, needs

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]


@pytest.mark.parametrize("extra", ["", "quant", "serve", "dev"])
def test_the_needs_are_those_of_the_project_file(extra: str) -> None:
    written = PROJECT["optional-dependencies"][extra] if extra else PROJECT["dependencies"]
    # An environment keeps the metadata of its installation: packages moved to the core since are still there.
    assert {n.package for n in needs(extra)} & {Requirement(t).name for t in written}
    for need in needs(extra):
        assert need.extra == extra
        assert "pip install" in need.remedy


def test_a_package_in_another_version_is_lacking(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requirements, "installed", lambda p: "0.0.1" if p == "typer" else "999")
    lacks = {n.package: str(n) for n in lacking()}
    assert lacks["typer"].startswith("typer 0.0.1 is installed, typer>=")


def test_an_absent_package_is_lacking(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requirements, "installed", lambda p: None)
    assert {n.package for n in lacking()} == {n.package for n in needs()}
    assert "is not installed" in str(lacking()[0])
