"""The Python packages of this environment."""

from __future__ import annotations

from importlib import metadata


def installed_packages() -> dict[str, str]:
    """Name -> version of every installed distribution, by name."""
    found = {d.metadata["Name"]: d.version for d in metadata.distributions() if d.metadata["Name"]}
    return dict(sorted(found.items(), key=lambda item: item[0].lower()))
