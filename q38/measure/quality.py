"""Quality of a model against its source on held-out text, with standard errors and the noise floor.

Per position t, with p the source's and q the model's distribution over the whole vocabulary:

    NLL      -log q(token[t+1])                       nats
    KL       sum_v p(v) (log p(v) - log q(v))         nats
    top-1    1 where argmax p = argmax q
    top-5    share of the source's five likeliest tokens that are among the model's five

The floor is the source compared with itself under another experts implementation and batch size:
the same weights, another order of summation. A difference near the floor is no difference.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from q38.base.progress import SILENT, Progress
from q38.measure.checks import Check, Part, finite
from q38.measure.forward import Run, log_probabilities
from q38.measure.stats import Estimate, Floats, clustered_mean, perplexity

TOP = 5
KL, TOP1 = "kl divergence", "top-1 agreement"


@dataclass(frozen=True)
class Comparison:
    """Two runs over the same sequences, position by position.

    nll_reference, nll, kl, top1, top5: float64 [positions].
    sequence: int64 [positions], the sequence each position belongs to.
    """

    nll_reference: Floats
    nll: Floats
    kl: Floats
    top1: Floats
    top5: Floats
    sequence: np.ndarray[Any, np.dtype[np.int64]]

    def mean(self, values: Floats, where: np.ndarray[Any, np.dtype[np.bool_]] | None = None) -> Estimate:
        """Mean over the positions that `where` marks (bool [positions]; None: all)."""
        if where is None:
            return clustered_mean(values, self.sequence)
        return clustered_mean(values[where], self.sequence[where])


def compare(
    reference: Run, runs: Sequence[Run], ids: torch.Tensor, *, progress: Progress = SILENT
) -> list[Comparison]:
    """Compare runs with the reference. `ids` int64 [sequences, tokens] are the inputs of all of them."""
    targets = ids[:, 1:].reshape(-1, 1)  # [P, 1]
    columns: list[dict[str, list[torch.Tensor]]] = [{} for _ in runs]
    with progress.task("quality: vocabulary", len(targets), "positions") as task:
        for piece, (p, *others) in log_probabilities((reference, *runs)):
            wanted = targets[piece].to(p.device)
            best_p = p.topk(TOP).indices  # [n, 5]
            for column, q in zip(columns, others, strict=True):
                best_q = q.topk(TOP).indices
                values = {
                    "nll_reference": -p.gather(1, wanted)[:, 0],
                    "nll": -q.gather(1, wanted)[:, 0],
                    "kl": (p.exp() * (p - q)).sum(-1),
                    "top1": (p.argmax(-1) == q.argmax(-1)).double(),
                    "top5": (best_p[:, :, None] == best_q[:, None, :]).any(-1).double().mean(-1),
                }
                for name, value in values.items():
                    column.setdefault(name, []).append(value.cpu())
            task.advance(len(wanted))
    sequence = np.repeat(np.arange(len(ids)), ids.shape[1] - 1)
    return [
        Comparison(sequence=sequence, **{name: torch.cat(parts).numpy() for name, parts in column.items()})
        for column in columns
    ]


def quality_part(
    comparison: Comparison,
    floor: Comparison,
    *,
    floor_kind: str,
    layers: Sequence[Mapping[str, Any]] = (),
    labels: Mapping[str, np.ndarray[Any, Any]] | None = None,
) -> Part:
    """The report: one check per metric, the floor, the errors of the layers, and the metrics by label.

    KL and NLL must be finite; `with_limits` adds limits.

    Args:
        layers: see `q38.measure.streamed.Outcome`.
        labels: for example {"language": str [positions], "token class": str [positions]}.
    """
    c = comparison
    checks = [
        _measured("nll, source", c.mean(c.nll_reference), finite=True),
        _measured("nll", c.mean(c.nll), finite=True),
        _measured("nll difference", c.mean(c.nll - c.nll_reference)),
        _measured("perplexity, source", perplexity(c.mean(c.nll_reference))),
        _measured("perplexity", perplexity(c.mean(c.nll))),
        _measured(KL, c.mean(c.kl), finite=True),
        _measured(TOP1, c.mean(c.top1)),
        _measured("top-5 agreement", c.mean(c.top5)),
    ]
    data = {
        "positions": int(c.kl.size),
        "sequences": int(c.sequence[-1]) + 1,
        "kl_quantiles": {str(q): finite(float(np.quantile(c.kl, q))) for q in (0.5, 0.9, 0.99, 1.0)},
        "floor": {
            "kind": floor_kind,
            KL: _row(floor.mean(floor.kl)),
            "nll difference": _row(floor.mean(floor.nll - floor.nll_reference)),
            TOP1: _row(floor.mean(floor.top1)),
            "top-5 agreement": _row(floor.mean(floor.top5)),
        },
        "layers": [dict(row) for row in layers],
        "by": {kind: _by_label(c, floor, values) for kind, values in (labels or {}).items()},
    }
    return Part("quality", checks, data)


def _by_label(c: Comparison, floor: Comparison, labels: np.ndarray[Any, Any]) -> list[dict[str, Any]]:
    """The metrics of each label, most positions first."""
    names, counts = np.unique(labels, return_counts=True)
    rows = []
    for name in names[np.argsort(-counts, kind="stable")]:
        own = labels == name
        rows.append(
            {
                "name": str(name),
                "positions": int(own.sum()),
                "sequences": len(np.unique(c.sequence[own])),
                "nll, source": _row(c.mean(c.nll_reference, own)),
                "nll": _row(c.mean(c.nll, own)),
                KL: _row(c.mean(c.kl, own)),
                TOP1: _row(c.mean(c.top1, own)),
                "top-5 agreement": _row(c.mean(c.top5, own)),
                "floor": _row(floor.mean(floor.kl, own)),
            }
        )
    return rows


def _row(estimate: Estimate) -> dict[str, Any]:
    """An estimate as JSON, which has no number for NaN."""
    return {
        **estimate.to_dict(),
        "value": finite(estimate.value),
        "standard_error": finite(estimate.standard_error),
    }


def with_limits(part: Part, *, max_kl: float | None, min_top1: float | None) -> Part:
    """The part judged by limits on mean KL divergence (nats) and top-1 agreement."""
    for check in part.checks:
        value = math.nan if check.value is None else check.value
        if check.name == KL and max_kl is not None and check.passed is not False:
            check.passed, check.limit, check.note = value <= max_kl, max_kl, "at most"
        if check.name == TOP1 and min_top1 is not None:
            check.passed, check.limit, check.note = value >= min_top1, min_top1, "at least"
    return part


def read_part(document: Mapping[str, Any]) -> Part:
    """A part from its own `to_dict`; its checks have no faults."""
    left_out = ("faults", "fault_count")
    checks = [Check(**{k: v for k, v in row.items() if k not in left_out}) for row in document["checks"]]
    data = {key: value for key, value in document.items() if key not in ("name", "passed", "checks")}
    return Part(str(document["name"]), checks, data)


def _measured(name: str, estimate: Estimate, *, finite: bool = False) -> Check:
    value = estimate.value
    passed, note = (True, "finite") if finite else (None, "no limit")
    if finite and not np.isfinite(value):
        passed, note = False, "not finite"
    return Check(name, passed, estimate.count, "positions", value, estimate.standard_error, None, note)
