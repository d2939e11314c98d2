"""The model card: README.md with the hub's front matter, every number from a report of the release and with its command."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from q38.base.errors import InputError
from q38.base.files import holds
from q38.base.units import format_bytes
from q38.checkpoint.index import Checkpoint, read_json
from q38.measure.bench.compare import SCHEMA as BENCH
from q38.measure.bench.tables import cell_table, markdown, notes
from q38.measure.matrices import find_matrices
from q38.model.names import PACKED_SUFFIXES, Group, classify, module_of
from q38.release.layout import PLE, RECORDS, RELEASE, SUMS, TOOLS
from q38.release.seal import read_seal

_TEMPLATE = "card.md.jinja"
_HIGH = 16
_LIBRARY = "q38"
_PACKAGES = ("q38", "torch", "transformers", "auto-round", "sglang", "safetensors", "tokenizers")


def card(root: Path) -> str:
    """The card of a sealed release, made from its own reports.

    Raises:
        InputError: no release.
        BrokenSeal: RELEASE.json was changed.
    """
    return make_card(root, read_seal(root).document)


def make_card(root: Path, facts: Mapping[str, Any]) -> str:
    """The card of a release whose files are in place. `facts` is RELEASE.json, with or without its files."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
        autoescape=False,  # Markdown; the hub cleans what it shows
    )
    environment.filters.update(bytes=format_bytes, cell=_cell)
    groups = _groups(Checkpoint.open(root))
    reports = facts["reports"]
    body = environment.get_template(_TEMPLATE).render(
        facts=facts,
        intro=_intro(facts, groups, _table_bytes(root)),
        groups=groups,
        table_bytes=_table_bytes(root),
        quality=_quality(read_json(root / reports["quality"]), facts) if "quality" in reports else None,
        speed=_speed(read_json(root / reports["speed"])) if "speed" in reports else None,
        behaviour=_behaviour(read_json(root / reports["behaviour"])) if "behaviour" in reports else None,
        versions={k: v for k, v in facts["packages"].items() if k in _PACKAGES},
        has={name: (root / name).exists() for name in (f"{TOOLS}/recipe.yaml", f"{TOOLS}/oracle.json")},
        release=RELEASE,
        sums=SUMS,
        records=RECORDS,
    )
    text = f"---\n{_front_matter(root, facts, groups)}\n---\n\n{body}"
    parse_card(text, where=root)
    return text


def read_card(file: Path) -> str:
    """A card that the user wrote. Raises InputError where the hub could not read its front matter."""
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot be read ({error})", where=file, remedy="give a Markdown file") from None
    if not parse_card(text, where=file):
        raise InputError(
            "has no front matter", where=file, remedy="begin it with a YAML block between two lines of ---"
        )
    return text


def refuse_other(file: Path) -> None:
    """Refuse to write a card over a file that is none of q38.

    Raises:
        InputError: as said.
    """
    holds(
        file,
        "model card of q38",
        lambda f: parse_card(f.read_text(encoding="utf-8"), where=f).get("library_name") == _LIBRARY,
    )


def parse_card(text: str, *, where: Path) -> dict[str, Any]:
    """The front matter as the hub's own client reads it. Raises InputError."""
    from huggingface_hub import ModelCard

    try:
        content: Any = ModelCard(text).data
    except (ValueError, TypeError, yaml.YAMLError) as error:
        raise InputError(
            f"its front matter is not valid ({' '.join(str(error).split())})",
            where=where,
            remedy="correct the YAML block at its start",
        ) from None
    return dict(content.to_dict())


def _front_matter(root: Path, facts: Mapping[str, Any], groups: list[dict[str, Any]]) -> str:
    from huggingface_hub import ModelCardData

    config = read_json(root / "config.json")
    widths = sorted({bits for row in groups for bits in row["bits"] if bits < _HIGH})
    method = (config.get("quantization_config") or {}).get("quant_method")
    tags = [
        config.get("model_type"),
        "quantized",
        method,
        *(f"{bits}-bit" for bits in widths),
        "mixture-of-experts",
        "q38",
    ]
    licence = facts["licence"]
    base = facts["base_model"]
    data = ModelCardData(
        base_model=base,
        base_model_relation="quantized" if base else None,
        library_name=_LIBRARY,
        license=licence["license"],
        license_name=licence["license_name"],
        license_link=licence["license_link"],
        pipeline_tag="text-generation",
        tags=[tag for tag in tags if tag],
    )
    return str(data.to_yaml()).strip()


def _intro(facts: Mapping[str, Any], groups: list[dict[str, Any]], table: int) -> str:
    base, recipe = facts["base_model"], facts["recipe"]
    parameters, nbytes = (sum(row[key] for row in groups) for key in ("parameters", "bytes"))
    what = f"[{base}](https://huggingface.co/{base})" if base else "A Qwen4-Exp checkpoint"
    how = f" by the recipe `{recipe['name']}`" if recipe else ""
    beside = f", beside an n-gram table of {format_bytes(table)} that stays on disk" if table else ""
    return (
        f"{what}, quantized with q38{how}: {parameters:,} parameters in {format_bytes(nbytes)}, "
        f"{8 * nbytes / parameters:.3f} bits per weight{beside}."
    )


def _groups(checkpoint: Checkpoint) -> list[dict[str, Any]]:
    """Per parameter group, largest first: parameters, bytes, and the widths of its matrices, from the headers."""
    packed = {matrix.module: matrix for matrix in find_matrices(checkpoint)}
    rows: dict[Group, dict[str, Any]] = defaultdict(lambda: {"parameters": 0, "bytes": 0, "bits": set()})
    for name, info in checkpoint.tensors.items():
        matrix = packed.get(module_of(name))
        row = rows[classify(name)]
        row["bytes"] += info.nbytes
        if matrix is None:
            row["parameters"] += info.numel
            row["bits"].add(info.nbytes * 8 // max(info.numel, 1))
        elif name.endswith(PACKED_SUFFIXES[0]):
            row["parameters"] += matrix.n * matrix.k
            row["bits"].add(matrix.bits)
    return [
        {"group": str(group), **row, "bits": sorted(row["bits"])}
        for group, row in sorted(rows.items(), key=lambda item: -item[1]["bytes"])
    ]


def _table_bytes(root: Path) -> int:
    table = root / PLE
    return sum(p.stat().st_size for p in table.glob("*.bin")) if table.is_dir() else 0


def _quality(document: Mapping[str, Any], facts: Mapping[str, Any]) -> dict[str, Any] | None:
    """The measured rows of a verify document; None where it has no quality part."""
    part = next((p for p in document.get("parts", []) if p["name"] == "quality"), None)
    if part is None or "text" not in part:
        return None
    floor = part.get("floor", {})
    command = next((s["command"] for s in facts["steps"] if s["step"] == "verify"), None)
    return {
        "rows": [
            {**check, "floor": (floor.get(check["name"]) or {}).get("value")}
            for check in part["checks"]
            if check["value"] is not None
        ],
        "checks": [p for p in document["parts"] if p["name"] != "quality"],
        "part": part,
        "command": command or _verify_command(part),
    }


def _verify_command(part: Mapping[str, Any]) -> str:
    tokens = part["sequences"] * part["seqlen"]
    return (
        f"q38 verify MODEL --source SOURCE --text {part['text']['source']} --tokens {tokens}"
        f" --seqlen {part['seqlen']} --dtype {part['dtype']}"
    )


def _speed(document: Mapping[str, Any]) -> dict[str, Any] | None:
    """A bench document as a table, with what a reader must know of it; None for another version of it."""
    if document.get("schema") != BENCH:
        return None
    return {"table": markdown(cell_table(document)), "notes": notes(document), **document}


def _behaviour(document: Mapping[str, Any]) -> dict[str, Any]:
    """The rows of a verify --server document."""
    checks = [check for part in document["parts"] for check in part["checks"]]
    words = {True: "passed", False: "FAILED", None: "no verdict"}
    return {"rows": [(c["name"], words[c["passed"]], c["note"]) for c in checks], **document}


def _cell(value: Any) -> str:
    """A value as a cell of a Markdown table."""
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else str(value).replace("|", "\\|")
