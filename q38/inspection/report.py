"""`inspect`: everything that headers tell about a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from q38.base.progress import SILENT, Progress
from q38.inspection.findings import Findings, Severity
from q38.inspection.groups import GroupCount, count_groups
from q38.inspection.layout import check_tensors, detect_layout, experts_form
from q38.inspection.ngram import check_ngram
from q38.inspection.opened import Opened, open_directory
from q38.inspection.parts import check_parts


@dataclass(frozen=True)
class Inspection:
    """The result. `layout` is "bf16", "fp8", "quantized" or "unknown"."""

    source: str
    layout: str
    experts: str
    opened: Opened
    groups: list[GroupCount]
    ngram: dict[str, Any] | None
    bits: dict[str, Any]
    parts: dict[str, Any]
    findings: Findings

    @property
    def ok(self) -> bool:
        """No finding is an error."""
        return self.findings.count(Severity.ERROR) == 0

    def to_dict(self) -> dict[str, Any]:
        shape = self.opened.shape
        return {
            "source": self.source,
            "ok": self.ok,
            "layout": self.layout,
            "experts": self.experts,
            "tensors": len(self.opened.tensors),
            "bytes": self.opened.nbytes,
            "parameters": sum(g.parameters for g in self.groups),
            "shards": len({t.file for t in self.opened.tensors.values()}),
            "layers": {
                "linear_attention": shape.num_layers - len(shape.attention_layers),
                "full_attention": len(shape.attention_layers),
            },
            "groups": [g.to_dict() for g in self.groups],
            "ngram": self.ngram,
            "bits": self.bits,
            "parts": self.parts,
            "counts": {s.value: self.findings.count(s) for s in Severity},
            "finding_counts": dict(self.findings.counts),
            "findings": [f.to_dict() for f in self.findings.ordered()],
        }


def inspect(
    source: str | Path, *, deep: bool = False, endpoint: str | None = None, progress: Progress = SILENT
) -> Inspection:
    """Inspect a checkpoint directory, or a hub repository by its metadata.

    Args:
        source: directory, or `owner/name` on the hub.
        deep: also read values: hashes against MANIFEST.json, NaN, zero blocks, zero points.
        endpoint: address of the hub, default huggingface_hub's.

    Raises:
        InputError: there is nothing to inspect: no directory, no config.json, another model, no safetensors.
    """
    from q38.inspection.hub import is_hub_id, open_hub

    findings = Findings()
    name = str(source)
    opened = (
        open_hub(name, findings, endpoint=endpoint)
        if is_hub_id(name)
        else open_directory(Path(source), findings)
    )
    layout = detect_layout(opened, findings)
    experts = experts_form(opened, findings)
    if layout is not None:
        check_tensors(opened, layout, experts, findings)
    ngram = check_ngram(opened, findings)
    bits: dict[str, Any] = {}
    if layout == "quantized":
        from q38.inspection.bits import check_bits

        bits = check_bits(opened, findings)
    parts = check_parts(opened, findings)
    if deep:
        from q38.inspection.deep import check_values

        check_values(opened, findings, progress)
    return Inspection(
        name, layout or "unknown", experts, opened, count_groups(opened), ngram, bits, parts, findings
    )
