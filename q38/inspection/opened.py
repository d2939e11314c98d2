"""A checkpoint opened so that damage becomes findings and the rest can still be looked at."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from q38.base.errors import InputError
from q38.base.files import require_directory
from q38.checkpoint.header import Header, TensorInfo, read_header
from q38.checkpoint.index import INDEX, SINGLE, Checkpoint, read_json
from q38.checkpoint.packing import WIDTHS
from q38.inspection.findings import Findings
from q38.model.shape import ModelShape

_DOWNLOAD = "download it again"
_PREFIX, _VISION, _TEXT = "model.", "model.visual.", "model.language_model."


@dataclass
class Opened:
    """What can be known without tensor values.

    tensors: release names (a text-only checkpoint's `model.layers.N` spelled `model.language_model.layers.N`).
    files: name -> bytes of everything in the directory or repository, one level deep.
    checkpoint: for reading values; None for a repository on the hub.
    read_text: contents of a small file beside the shards, None where it is absent.
    """

    where: str
    config: dict[str, Any]
    shape: ModelShape
    tensors: dict[str, TensorInfo]
    files: dict[str, int]
    read_text: Callable[[str], str | None] = field(repr=False)
    checkpoint: Checkpoint | None = None
    _known: dict[str, bool] = field(default_factory=dict, init=False, repr=False)

    @cached_property
    def quantization(self) -> Mapping[str, Any]:
        """quantization_config of config.json, empty where there is none."""
        value = self.config.get("quantization_config")
        return value if isinstance(value, Mapping) else {}

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.tensors.values())

    @cached_property
    def has_packed(self) -> bool:
        return bool(self.widths)

    def has(self, prefix: str) -> bool:
        """Whether a tensor of this prefix is there."""
        if prefix not in self._known:
            self._known[prefix] = any(name.startswith(prefix) for name in self.tensors)
        return self._known[prefix]

    @cached_property
    def widths(self) -> dict[str, int]:
        """Module -> bits of each packed matrix by its own three tensors; 0 where they fit no width."""
        suffix = ".qweight"
        modules = (name[: -len(suffix)] for name in self.tensors if name.endswith(suffix))
        return {module: self._width(module) for module in modules}

    def _width(self, module: str) -> int:
        zeros, scales = self.tensors.get(f"{module}.qzeros"), self.tensors.get(f"{module}.scales")
        if zeros is None or scales is None or len(zeros.shape) != 2 or len(scales.shape) != 2:
            return 0
        if not scales.shape[1]:
            return 0
        width, rest = divmod(zeros.shape[1] * 32, scales.shape[1])
        return width if not rest and width in WIDTHS else 0

    def json(self, name: str) -> dict[str, Any] | None:
        """A JSON object beside the shards; None where absent or broken."""
        try:
            value = json.loads(self.read_text(name) or "null")
        except ValueError:
            return None
        return value if isinstance(value, dict) else None


def open_directory(root: Path, findings: Findings) -> Opened:
    """Open a local checkpoint.

    Raises:
        InputError: no such directory, or config.json is absent, broken, or of another model.
    """
    require_directory(root, remedy="give a checkpoint directory, or a hub id like Qwen/NAME")
    config = read_json(root / "config.json")
    shape = ModelShape.from_config(config, where=str(root / "config.json"))
    files = {p.name: p.stat().st_size for p in sorted(root.iterdir()) if p.is_file()}
    weight_map = _weight_map(root, files, findings)
    headers: dict[str, Header] = {}
    tensors: dict[str, TensorInfo] = {}
    for name in _shards(files, weight_map, findings):
        try:
            headers[name] = read_header(root / name)
        except InputError as error:
            findings.add("shard-broken", error.what, error.remedy or _DOWNLOAD, file=name)
            continue
        for info in headers[name].tensors.values():
            _keep(tensors, info, findings)
    if weight_map is not None:
        check_index(weight_map, tensors, headers.keys(), findings)

    def read_text(name: str) -> str | None:
        try:
            return (root / name).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            return None

    checkpoint = Checkpoint(root, config, headers, tensors)
    return Opened(str(root), config, shape, release_names(tensors), files, read_text, checkpoint)


def release_names(tensors: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
    """Names as the release spells them: a text-only export leaves `language_model` out."""
    if not any(name.startswith("model.layers.") for name in tensors):
        return dict(tensors)
    return {
        (_TEXT + name.removeprefix(_PREFIX))
        if name.startswith(_PREFIX) and not name.startswith((_VISION, _TEXT))
        else name: info
        for name, info in tensors.items()
    }


def check_index(
    weight_map: Mapping[str, str], tensors: Mapping[str, TensorInfo], read: Any, findings: Findings
) -> None:
    """Index and headers must tell the same story (for the files whose header could be read)."""
    for name, file in weight_map.items():
        if file in read and (name not in tensors or tensors[name].file.name != file):
            place = f", it is in {tensors[name].file.name}" if name in tensors else ""
            findings.add(
                "index-tensor-absent",
                f"places the tensor in {file}, which does not hold it{place}",
                f"download {INDEX} and {file} again",
                file=INDEX,
                tensor=name,
            )
    for name, info in tensors.items():
        if name not in weight_map:
            findings.add(
                "index-unlisted",
                "is not in the index",
                f"download {INDEX} again",
                file=info.file.name,
                tensor=name,
            )


def _keep(tensors: dict[str, TensorInfo], info: TensorInfo, findings: Findings) -> None:
    if info.name in tensors:
        findings.add(
            "duplicate-tensor",
            f"is also in {tensors[info.name].file.name}",
            "remove one of the two files, or download the checkpoint again",
            file=info.file.name,
            tensor=info.name,
        )
        return
    tensors[info.name] = info


def _weight_map(root: Path, files: Mapping[str, int], findings: Findings) -> dict[str, str] | None:
    if INDEX not in files:
        if SINGLE not in files and any(name.endswith(".safetensors") for name in files):
            findings.add("index-missing", "the index is missing", f"download {INDEX}", file=INDEX)
        return None
    try:
        index = read_json(root / INDEX)
    except InputError as error:
        findings.add("index-broken", error.what, f"download {INDEX} again", file=INDEX)
        return None
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
        findings.add(
            "index-broken", "has no weight_map from names to files", f"download {INDEX} again", file=INDEX
        )
        return None
    return weight_map


def _shards(files: Mapping[str, int], weight_map: Mapping[str, str] | None, findings: Findings) -> list[str]:
    on_disk = [name for name in files if name.endswith(".safetensors")]
    if not on_disk:
        raise InputError("holds no safetensors files", remedy="give the directory of a checkpoint")
    if weight_map is None:
        return on_disk
    named = sorted(set(weight_map.values()))
    for name in named:
        if name not in files:
            findings.add(
                "index-file-absent", f"names {name}, which is absent", f"download {name}", file=INDEX
            )
    for name in on_disk:
        if name not in named:
            findings.add(
                "stray-file", "is not named by the index", "remove it, or download the index again", file=name
            )
    return [name for name in named if name in files]
