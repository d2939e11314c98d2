"""What a checkpoint directory holds, opened so that damage becomes rows of a report instead of a refusal."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from q38.base.errors import InputError
from q38.base.files import require_directory
from q38.checkpoint.header import Header, TensorInfo, read_header
from q38.checkpoint.index import INDEX, SINGLE, Checkpoint, read_json
from q38.checkpoint.packing import WIDTHS, WORD
from q38.measure.checks import Fault
from q38.model.expected import Expected, Layout, mtp_tensors, text_tensors, unfuse
from q38.model.names import Group, classify
from q38.model.shape import ModelShape
from q38.recipe.resolve import HIGH

_METHODS: Mapping[str, Layout] = {"": "bf16", "fp8": "fp8", "auto-round": "quantized"}


@dataclass(frozen=True)
class Stored:
    """A checkpoint as it is on disk.

    checkpoint: the readable shards only.
    faults: what is wrong with the index and the shards.
    """

    checkpoint: Checkpoint
    faults: list[Fault]
    shape: ModelShape

    @classmethod
    def open(cls, root: Path) -> Stored:
        """Open a directory, whatever the state of its shards.

        Raises:
            InputError: no such directory, or config.json is absent, unreadable or of another model.
        """
        require_directory(root, remedy="give a directory that holds a checkpoint")
        config = read_json(root / "config.json")
        shape = ModelShape.from_config(config, where=str(root / "config.json"))
        faults: list[Fault] = []
        weight_map = _weight_map(root, faults)
        headers = _headers(root, set(weight_map.values()) or {SINGLE}, faults)
        tensors: dict[str, TensorInfo] = {}
        for header in headers.values():
            for info in header.tensors.values():
                if info.name in tensors:
                    faults.append(
                        Fault(info.file.name, info.name, f"is also in {tensors[info.name].file.name}")
                    )
                tensors[info.name] = info
        faults += _index_faults(weight_map, headers, tensors)
        return cls(Checkpoint(root, config, headers, tensors), faults, shape)

    @property
    def root(self) -> Path:
        return self.checkpoint.path

    @property
    def tensors(self) -> dict[str, TensorInfo]:
        return self.checkpoint.tensors

    @cached_property
    def quantization(self) -> Mapping[str, Any]:
        """quantization_config of config.json, empty where there is none."""
        value = self.checkpoint.config.get("quantization_config")
        return value if isinstance(value, Mapping) else {}

    @cached_property
    def layout(self) -> Layout:
        """The layout that config.json announces.

        Raises:
            InputError: a quantization method that q38 does not know.
        """
        method = str(self.quantization.get("quant_method", ""))
        if method not in _METHODS:
            raise InputError(
                f"quant_method is '{method}'",
                where=self.root / "config.json",
                remedy=f"known: {', '.join(m for m in _METHODS if m)}, or none",
            )
        return _METHODS[method]

    def has(self, prefix: str) -> bool:
        return any(name.startswith(prefix) for name in self.tensors)

    @cached_property
    def matrices(self) -> dict[str, tuple[int, int]]:
        """Module -> [N out, K in] of every matrix of the model that could be packed, by config.json alone."""
        sources = list(text_tensors(self.shape))
        if self.has("mtp."):
            sources += mtp_tensors(self.shape)
        found: dict[str, tuple[int, int]] = {}
        for tensor in (t for source in sources for t in unfuse(source)):
            if _is_matrix(tensor):
                found[tensor.name.removesuffix(".weight")] = (tensor.shape[0], tensor.shape[1])
        return found

    @cached_property
    def bits(self) -> dict[str, int]:
        """Module -> width as its tensors say; 16 where it is stored unpacked, 0 where the words fit no width."""
        return {
            module: self._width(module, k) for module, (_, k) in self.matrices.items() if self._holds(module)
        }

    def _holds(self, module: str) -> bool:
        return f"{module}.qweight" in self.tensors or f"{module}.weight" in self.tensors

    def _width(self, module: str, k: int) -> int:
        words = self.tensors.get(f"{module}.qweight")
        if words is None:
            return HIGH
        width, rest = divmod(words.shape[0] * WORD, k) if words.shape else (0, 1)
        return width if width in WIDTHS and rest == 0 else 0


def file_of(tensors: Mapping[str, TensorInfo], name: str) -> str:
    """The file of a tensor or of any tensor of a module; a dash where nothing of it is stored."""
    for probe in (name, f"{name}.qweight", f"{name}.scales", f"{name}.qzeros", f"{name}.weight"):
        if probe in tensors:
            return tensors[probe].file.name
    return "-"


def _is_matrix(tensor: Expected) -> bool:
    return (
        len(tensor.shape) == 2
        and tensor.name.endswith(".weight")
        and classify(tensor.name) is not Group.EMBED
    )


def _weight_map(root: Path, faults: list[Fault]) -> dict[str, str]:
    path = root / INDEX
    if not path.exists():
        if not (root / SINGLE).exists():
            faults.append(Fault(INDEX, None, "is missing"))
        return {}
    try:
        weight_map = read_json(path).get("weight_map")
    except InputError as error:
        faults.append(Fault(INDEX, None, error.what))
        return {}
    if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
        faults.append(Fault(INDEX, None, "has no weight_map from names to files"))
        return {}
    return weight_map


def _headers(root: Path, names: set[str], faults: list[Fault]) -> dict[str, Header]:
    headers = {}
    for name in sorted(names):
        if Path(name).name != name:
            faults.append(Fault(INDEX, None, f"names the file '{name}' outside the directory"))
            continue
        try:
            headers[name] = read_header(root / name)
        except InputError as error:
            faults.append(Fault(name, None, error.what))
    return headers


def _index_faults(
    weight_map: Mapping[str, str], headers: Mapping[str, Header], tensors: Mapping[str, TensorInfo]
) -> list[Fault]:
    """Names that the index and the readable shards place differently."""
    faults = []
    for name, file in weight_map.items():
        if file in headers and name not in headers[file].tensors:
            faults.append(Fault(INDEX, name, f"is placed in {file}, which does not hold it"))
    if weight_map:
        faults += [
            Fault(info.file.name, name, f"is not in {INDEX}")
            for name, info in tensors.items()
            if name not in weight_map
        ]
    return faults
