"""Findings: each problem has a code, a severity, a place and a remedy."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any


class Severity(StrEnum):
    """ERROR: a later step fails or gives a wrong model. WARNING: it works, but look. NOTE: worth knowing."""

    ERROR = "error"
    WARNING = "warning"
    NOTE = "note"


_E, _W, _N = Severity.ERROR, Severity.WARNING, Severity.NOTE

# code -> (severity, meaning). The documentation prints this table.
CODES: dict[str, tuple[Severity, str]] = {
    "index-missing": (_E, "Several safetensors files and no model.safetensors.index.json."),
    "index-broken": (_E, "The index is not JSON or has no weight_map."),
    "index-file-absent": (_E, "The index names a file that is not there."),
    "index-tensor-absent": (_E, "The index places a tensor in a file that does not hold it."),
    "index-unlisted": (_E, "A file holds a tensor that the index does not list."),
    "index-size": (_W, "metadata.total_size of the index is not the sum of the tensors."),
    "stray-file": (_W, "A safetensors file that the index does not name."),
    "shard-broken": (_E, "A safetensors file is empty, truncated, over-long, or its header does not describe it."),
    "duplicate-tensor": (_E, "A tensor is in two files."),
    "layout-unknown": (_E, "Neither bf16, FP8 nor packed: the tensors fit no layout that q38 knows."),
    "layout-config": (_E, "config.json announces another layout than the tensors have."),
    "experts-mixed-layout": (_E, "Some experts are fused in 3-D tensors, others are one matrix each."),
    "tensor-missing": (_E, "A tensor that config.json asks for is not there."),
    "tensor-unexpected": (_E, "A tensor that config.json does not ask for."),
    "shape-wrong": (_E, "A tensor has another shape than config.json gives."),
    "dtype-wrong": (_E, "A tensor has a dtype that this layout does not use there."),
    "scale-missing": (_E, "An fp8 matrix without its block scales; its codes would be read as values."),
    "ple-absent": (_E, "config.json has an n-gram layer; the source holds no table and none was split off."),
    "ple-not-beside": (_W, "A packed checkpoint with no n-gram table in ple/ or beside it: give --ple to each verb."),
    "ple-elsewhere": (_N, "The n-gram table is not in the checkpoint but in a ple directory."),
    "ple-dir-broken": (_E, "The split n-gram table cannot be used."),
    "ple-shards": (_E, "The shards of the n-gram table are not 0..n-1, or mix dtypes or widths."),
    "ple-parts": (_W, "The number of shards is not split_ngram_parts of config.json."),
    "ple-rows": (_E, "The n-gram table has another number of rows than config.json gives."),
    "ple-scale": (_E, "The n-gram table is fp8 and its weight_scale is missing or unusable."),
    "ple-constants": (_E, "An n-gram constant is not the one rebuilt from config.json and its seed."),
    "ple-layer-kind": (_E, "An n-gram layer is not a linear-attention layer."),
    "ple-eos": (_E, "The n-gram hash needs eos_token_id, and config.json has none."),
    "bits-width": (_E, "The packed words of a matrix fit no width of 2, 3, 4 or 8 bits."),
    "bits-config": (_E, "An engine would read a matrix at another width or group size than it is stored."),
    "bits-asymmetric": (_E, "quantization_config is not symmetric; q38 and its kernels are."),
    "bits-packing": (_E, "A packing format other than auto_round:auto_gptq."),
    "rule-unmatched": (_W, "A key of extra_config matches no module."),
    "rule-shadowed": (_W, "A pattern of extra_config never decides: other keys come first wherever it matches."),
    "rule-broken": (_E, "A key of extra_config is not a valid pattern."),
    "fused-mixed": (_E, "Members of a module that the server fuses have different widths."),
    "experts-mixed": (_E, "Experts of one layer have different widths; the server takes one per layer."),
    "quantization-stale": (_W, "quantization_config.json differs from the one in config.json."),
    "vision-absent": (_E, "config.json describes a vision tower, its tensors are not there."),
    "vision-dropped": (_N, "The vision tower was dropped on purpose (language_model_only)."),
    "mtp-absent": (_N, "config.json describes multi-token prediction, its tensors are not there."),
    "tokenizer-absent": (_W, "No tokenizer.json: text cannot be encoded."),
    "chat-template-absent": (_W, "No chat template: the chat API cannot be served."),
    "generation-config-absent": (_W, "No generation_config.json: stop tokens and sampling fall to defaults."),
    "values-not-finite": (_E, "A tensor holds NaN or infinity."),
    "values-zero": (_W, "A sampled block of a matrix is all zero."),
    "scale-zero": (_W, "A scale is zero, and so are all weights of its group."),
    "zeros-asymmetric": (_E, "Packed zero points are not the symmetric constant."),
    "hash-wrong": (_E, "A file is not the one that MANIFEST.json records."),
    "values-unread": (_N, "Values were not read: only metadata is at hand."),
}  # fmt: skip


@dataclass(frozen=True)
class Finding:
    """One problem. `file` and `tensor` are names, None where they do not apply."""

    code: str
    what: str
    remedy: str
    file: str | None = None
    tensor: str | None = None

    @property
    def severity(self) -> Severity:
        return CODES[self.code][0]

    def to_dict(self) -> dict[str, Any]:
        return {"severity": self.severity.value, **asdict(self)}


@dataclass
class Findings:
    """Collects findings; keeps the first `limit` of each code and counts the rest."""

    limit: int = 20
    kept: list[Finding] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)

    def add(
        self, code: str, what: str, remedy: str, *, file: str | None = None, tensor: str | None = None
    ) -> None:
        finding = Finding(code, what, remedy, file, tensor)
        self.counts[code] += 1
        if self.counts[code] <= self.limit:
            self.kept.append(finding)

    def count(self, severity: Severity) -> int:
        return sum(n for code, n in self.counts.items() if CODES[code][0] is severity)

    def ordered(self) -> list[Finding]:
        """Errors first, otherwise in the order found."""
        rank = list(Severity)
        return sorted(self.kept, key=lambda f: rank.index(f.severity))


def codes_table() -> list[tuple[str, str, str]]:
    """(code, severity, meaning) of every finding, for the documentation."""
    return [(code, severity.value, meaning) for code, (severity, meaning) in CODES.items()]
