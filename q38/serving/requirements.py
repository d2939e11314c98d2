"""Which packages of q38's extras are installed, read from q38's own metadata so that no pin is written twice."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import metadata

from packaging.requirements import Requirement


@dataclass(frozen=True)
class Need:
    """One required package. `found` is its installed version, None when absent."""

    package: str
    specifier: str
    extra: str
    found: str | None

    @property
    def satisfied(self) -> bool:
        """Installed, in a version that q38 is tested against."""
        if self.found is None:
            return False
        return Requirement(f"x{self.specifier}").specifier.contains(self.found, prereleases=True)

    @property
    def remedy(self) -> str:
        """The command that installs it."""
        target = f"q38[{self.extra}]" if self.extra else "q38"
        return f'install it: pip install "{target}"'

    def __str__(self) -> str:
        if self.found is None:
            return f"{self.package} is not installed"
        return f"{self.package} {self.found} is installed, {self.package}{self.specifier} is needed"


def needs(extra: str = "") -> list[Need]:
    """The packages of one extra ("" = the core), in the order of pyproject.toml."""
    result = []
    for text in metadata.requires("q38") or []:
        requirement = Requirement(text)
        if not _belongs(requirement, extra):
            continue
        name = requirement.name
        result.append(Need(name, str(requirement.specifier), extra, installed(name)))
    return result


def lacking(extra: str = "") -> list[Need]:
    """The packages of one extra that are absent or in another version."""
    return [need for need in needs(extra) if not need.satisfied]


def installed(package: str) -> str | None:
    """Version of an installed distribution, without importing it."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _belongs(requirement: Requirement, extra: str) -> bool:
    if requirement.marker is None:
        return extra == ""
    if not requirement.marker.evaluate({"extra": extra}):
        return False
    # A marker without an extra (platform only) holds for every extra: it belongs to the core.
    return extra == "" or not requirement.marker.evaluate({"extra": ""})
