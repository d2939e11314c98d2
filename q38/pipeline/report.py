"""report.json and report.html: everything a run found, on one page that needs no network."""

from __future__ import annotations

import hashlib
import json
import platform
from pathlib import Path
from typing import Any

import psutil
import yaml

import q38
from q38.base import settings
from q38.checkpoint.index import read_json
from q38.checkpoint.job import MANIFEST
from q38.checkpoint.writer import atomic_file, write_json
from q38.measure.bench.plots import bench_plots
from q38.measure.bench.report import CAPTIONS
from q38.measure.bench.tables import cell_table, notes
from q38.measure.page import PAGE, render_page
from q38.model.names import Group
from q38.model.shape import ModelShape
from q38.pipeline.inventory import group_sizes
from q38.pipeline.setup import Setup
from q38.pipeline.state import RunState
from q38.pipeline.steps import left_out

SCHEMA = "q38.report/1"
_TEMPLATE = "report.html.jinja"


def write_report(setup: Setup, state: RunState) -> None:
    """Write both files, unless they already tell the present state of the run."""
    work = setup.work
    basis = _basis(setup, state)
    if work.page.exists() and work.report.exists() and read_json(work.report).get("basis") == basis:
        return
    document = collect(setup, state)
    page = render(document, _routing(setup))
    with atomic_file(work.page) as f:
        f.write(page.encode())
    write_json(work.report, {"schema": SCHEMA, "basis": basis, **document})


def collect(setup: Setup, state: RunState) -> dict[str, Any]:
    """The report as a JSON-able document. Parts whose step has not run are None."""
    work = setup.work
    results = {name: _result(setup, name) for name in state.steps}
    failed = next((name for name, record in state.steps.items() if not record.ok), None)
    source = setup.source or work.synth
    return {
        "q38": q38.__version__,
        "created": state.created,
        "passed": failed is None and len(state.steps) == len(setup.steps),
        "failed_step": failed,
        "left_out": left_out(setup.recipe),
        "recipe": state.recipe,
        "recipe_sha256": setup.recipe.sha256,
        "machine": _machine(),
        "versions": state.versions,
        "model": _model(source),
        "sizes": _sizes(source, setup),
        "verify": results.get("verify"),
        "placement": results.get("build-placement"),
        "serve": results.get("serve"),
        "bench": results.get("bench"),
        "oracle": results.get("oracle-check"),
        "steps": [
            {
                "step": r.name,
                "ok": r.ok,
                "started": r.started,
                "seconds": r.seconds,
                "bytes_in": r.bytes_in,
                "bytes_out": r.bytes_out,
                "peak_memory": r.peak_memory,
                "command": r.command,
            }
            for r in state.steps.values()
        ],
        "seconds": round(sum(r.seconds for r in state.steps.values()), 3),
        "peak_memory": state.peak_memory,
        "manifests": _manifests(setup),
    }


def render(document: dict[str, Any], mass: Any = None) -> str:
    """The page. `mass` float [layers, experts] is the routing of the placement profile, None without one."""
    return render_page(
        Path(__file__).with_name(_TEMPLATE), plots=_plots(document, mass), **document, **_views(document)
    )


def _routing(setup: Setup) -> Any:
    """float64 [layers, experts]: selections in the placement profile; None without one."""
    from q38.residency.profile import load

    return load(setup.work.placement).count.astype("float64") if setup.work.placement.exists() else None


def _views(document: dict[str, Any]) -> dict[str, Any]:
    """What the page shows that the document holds in another form."""
    quality = part(document["verify"], "quality") or {"checks": [], "floor": {}}
    checks = {check["name"]: check for check in quality["checks"]}
    bench = document["bench"]
    cells = bench["cells"] if bench else []
    return {
        "measures": {
            "kl": checks.get("kl divergence"),
            "top1": checks.get("top-1 agreement"),
            "decode": cells[0]["decode_tokens_per_s"] if cells else None,
        },
        "floors": {k: abs(v["value"]) for k, v in quality.get("floor", {}).items() if isinstance(v, dict)},
        "bench_table": cell_table(bench) if bench else None,
        "bench_notes": notes(bench) if bench else [],
        "bench_captions": CAPTIONS,
        "recipe_text": yaml.safe_dump(document["recipe"], sort_keys=False, allow_unicode=True),
    }


def _plots(document: dict[str, Any], mass: Any) -> dict[str, Any]:
    from q38.pipeline import plots

    drawn: dict[str, str] = {}
    quality = part(document["verify"], "quality")
    if quality and quality.get("layers") and document["model"]:
        drawn["layers"] = plots.layer_error_plot(quality["layers"], document["model"]["layer_types"])
    if mass is not None:
        drawn |= {"coverage": plots.coverage_plot(mass), "routing": plots.routing_map(mass)}
    if document["bench"]:
        drawn |= {f"bench {name}": svg for name, svg in bench_plots(document["bench"]).items()}
    return drawn


def part(verify: dict[str, Any] | None, name: str) -> dict[str, Any] | None:
    """One part (structure, numbers, quality) of a verify document."""
    return next((p for p in (verify or {}).get("parts", []) if p["name"] == name), None)


def _basis(setup: Setup, state: RunState) -> str:
    """Hash of all that the report is made from: the records, the page and this program."""
    files = [setup.work.state, Path(__file__), Path(__file__).with_name(_TEMPLATE), PAGE]
    return hashlib.sha256(b"".join(f.read_bytes() for f in files)).hexdigest()


def _result(setup: Setup, step: str) -> dict[str, Any] | None:
    file = setup.work.result(step)
    value = json.loads(file.read_text(encoding="utf-8")) if file.exists() else None
    return value if isinstance(value, dict) and "error" not in value else None


def _model(source: Path) -> dict[str, Any] | None:
    if not (source / "config.json").exists():
        return None
    shape = ModelShape.from_config(read_json(source / "config.json"))
    return {
        "path": str(source),
        "layer_types": list(shape.layer_types),
        "layers": shape.num_layers,
        "attention_layers": len(shape.attention_layers),
        "hidden_size": shape.hidden_size,
        "vocab_size": shape.vocab_size,
        "experts": shape.num_experts,
        "experts_per_token": shape.num_experts_per_tok,
        "expert_width": shape.moe_intermediate_size,
        "ngram_layers": list(shape.ngram.layer_ids) if shape.ngram else [],
    }


def _sizes(source: Path, setup: Setup) -> dict[str, Any] | None:
    """Bytes per group in the source and in the finished model, from the headers of both."""
    model = setup.work.model
    if not (model / "config.json").exists() or not (source / "config.json").exists():
        return None
    before = {row["group"]: row for row in group_sizes(source)}
    after = {row["group"]: row for row in group_sizes(model)}
    table = sum(p.stat().st_size for p in setup.work.ple.glob("*") if p.is_file())
    rows = []
    for name in sorted(before | after, key=lambda g: -before.get(g, after.get(g, {}))["bytes"]):
        ngram = name == Group.NGRAM and name not in after
        rows.append(
            {
                "group": name,
                "parameters": before[name]["parameters"] if name in before else after[name]["parameters"],
                "source_bits": before[name]["bits"] if name in before else [],
                "source_bytes": before[name]["bytes"] if name in before else 0,
                "bits": after[name]["bits"] if name in after else [],
                "bytes": after[name]["bytes"] if name in after else table if ngram else 0,
                "note": "in ple/" if ngram else "left out" if name not in after else "",
            }
        )
    model_bytes = sum(r["bytes"] for r in after.values())
    parameters = sum(r["parameters"] for r in after.values())
    return {
        "groups": rows,
        "source_bytes": sum(r["bytes"] for r in before.values()),
        "model_bytes": model_bytes,
        "ngram_bytes": table,
        "parameters": parameters,
        "bits_per_weight": 8 * model_bytes / parameters,
    }


def _machine() -> dict[str, Any]:
    return {
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "processor": _processor(),
        "cores": settings.cpu_count(),
        "memory": psutil.virtual_memory().total,
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next(
        (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine()
    )


def _manifests(setup: Setup) -> dict[str, str]:
    """Name inside the directory of the run -> sha256, for each manifest and single file that a step wrote."""
    work = setup.work
    files = [path / MANIFEST if path.is_dir() else path for path in work.outputs()]
    return {
        str(f.relative_to(work.root)): hashlib.sha256(f.read_bytes()).hexdigest()
        for f in files
        if f.is_file()
    }
