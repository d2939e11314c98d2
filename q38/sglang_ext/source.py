"""Source text of dotted names in an SGLang tree, read without importing it."""

from __future__ import annotations

import ast
import hashlib
import importlib.util
from functools import lru_cache
from pathlib import Path

from q38.base.errors import InputError, ResourceError

_Node = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef | ast.Assign | ast.AnnAssign


def installed_tree() -> Path:
    """The directory that holds the installed `sglang` package, found without importing it.

    Raises:
        ResourceError: SGLang is not installed.
    """
    spec = importlib.util.find_spec("sglang")
    if spec is None or not spec.submodule_search_locations:
        raise ResourceError(
            "SGLang is not installed in this environment", remedy='install it: pip install "q38[sglang]"'
        )
    return Path(next(iter(spec.submodule_search_locations))).parent


def release(tree: Path) -> str:
    """The SGLang release of a tree, from its version file.

    Raises:
        InputError: the tree holds no SGLang, or one without a version.
    """
    for file in (tree / "sglang" / "_version.py", tree / "sglang" / "version.py"):
        if file.is_file():
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.Constant) and isinstance(node.value, str) and _is_version(node.value):
                    return node.value
    raise InputError("holds no sglang package with a version", where=tree, remedy="give its parent directory")


def _is_version(text: str) -> bool:
    return text[:1].isdigit() and "." in text


def module_file(tree: Path, target: str) -> tuple[Path, list[str]] | None:
    """The file of the longest module in a dotted name, and the names that are left; None if there is none."""
    parts = target.split(".")
    for count in range(len(parts), 0, -1):
        path = tree.joinpath(*parts[:count])
        for file in (path.with_suffix(".py"), path / "__init__.py"):
            if file.is_file():
                return file, parts[count:]
    return None


def source_of(tree: Path, target: str) -> str | None:
    """Source text of a function, method, class or assignment, decorators included; None where it is absent."""
    found = module_file(tree, target)
    if found is None:
        return None
    file, names = found
    text, body = _parsed(file)
    node: _Node | None = None
    for name in names:
        node = next((n for n in body if name in _names(n)), None)  # type: ignore[assignment]
        if node is None:
            return None
        body = getattr(node, "body", [])
    if node is None:
        return text
    decorators = getattr(node, "decorator_list", [])
    first = min([node.lineno, *(d.lineno for d in decorators)])
    return "\n".join(text.splitlines()[first - 1 : node.end_lineno])


def digest(source: str) -> str:
    """SHA-256 of a source text."""
    return hashlib.sha256(source.encode()).hexdigest()


@lru_cache(maxsize=64)
def _parsed(file: Path) -> tuple[str, list[ast.stmt]]:
    text = file.read_text(encoding="utf-8")
    return text, ast.parse(text).body


def _names(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return [node.name]
    if isinstance(node, ast.Assign):
        return [t.id for t in node.targets if isinstance(t, ast.Name)]
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        return [node.target.id]
    return []
