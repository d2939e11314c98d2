"""Files that ship with q38: recipes and assets (links into the top folders of the repository)."""

from importlib import resources
from pathlib import Path


def data_path(*parts: str) -> Path:
    """Path of a shipped file, for example `data_path("recipes", "tiny.yaml")`."""
    return Path(str(resources.files(__name__).joinpath(*parts)))
