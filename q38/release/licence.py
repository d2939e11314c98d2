"""The licence that comes with a checkpoint: its LICENSE files, and the front matter of its model card."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from q38.release.layout import CARD

_FILES = ("LICENSE", "LICENSE.md", "LICENSE.txt", "NOTICE", "NOTICE.md", "NOTICE.txt")


@dataclass(frozen=True)
class Licence:
    """`identifier`, `name` and `link` as the hub's front matter has them: license, license_name, license_link."""

    identifier: str | None = None
    name: str | None = None
    link: str | None = None
    files: tuple[Path, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        return {
            "license": self.identifier,
            "license_name": self.name,
            "license_link": self.link,
            "files": [path.name for path in self.files],
            "given": False,  # by the user, not by the source
        }


def find_licence(source: Path | None) -> Licence:
    """The licence of a checkpoint directory; nothing is assumed where it names none.

    A licence file without front matter becomes `license: other` with a link to the file.
    """
    if source is None or not source.is_dir():
        return Licence()
    files = tuple(source / name for name in _FILES if (source / name).is_file())
    card = _front_matter(source / CARD)
    identifier = card.get("license")
    if isinstance(identifier, str):
        return Licence(identifier, card.get("license_name"), card.get("license_link"), files)
    text = next((f.name for f in files if f.name.startswith("LICENSE")), None)
    return Licence("other", None, text, files) if text else Licence(files=files)


def _front_matter(card: Path) -> dict[str, Any]:
    """The YAML block of a model card; empty where there is none that can be read."""
    if not card.is_file():
        return {}
    from huggingface_hub.repocard import metadata_load

    try:
        return metadata_load(card) or {}
    except (ValueError, OSError, yaml.YAMLError):
        return {}
