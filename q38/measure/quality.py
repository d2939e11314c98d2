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

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from q38.measure.checks import Check, Part, finite
from q38.measure.forward import Run, log_probabilities
from q38.measure.stats import Estimate, Floats, clustered_mean, perplexity

TOP = 5


@dataclass(frozen=True)
class Comparison:
    """Two runs over the same sequences, position by position.

    nll_reference, nll, kl, top1, top5: float64 [positions].
    sequence: int64 [positions], the sequence each position belongs to.
    layers: [layers] relative error of each block's output, ||x - x_ref|| / ||x_ref||.
    """

    nll_reference: Floats
    nll: Floats
    kl: Floats
    top1: Floats
    top5: Floats
    sequence: np.ndarray[Any, np.dtype[np.int64]]
    layers: list[float]

    def mean(self, values: Floats) -> Estimate:
        return clustered_mean(values, self.sequence)


def compare(reference: Run, run: Run, ids: torch.Tensor) -> Comparison:
    """Compare a run with the reference's. `ids` int64 [sequences, tokens] are the inputs of both."""
    targets = ids[:, 1:].reshape(-1, 1)  # [P, 1]
    columns: dict[str, list[torch.Tensor]] = {
        name: [] for name in ("nll_reference", "nll", "kl", "top1", "top5")
    }
    for piece, (p, q) in log_probabilities((reference, run)):
        best_p, best_q = p.topk(TOP).indices, q.topk(TOP).indices  # [n, 5]
        columns["nll_reference"].append(-p.gather(1, targets[piece])[:, 0])
        columns["nll"].append(-q.gather(1, targets[piece])[:, 0])
        columns["kl"].append((p.exp() * (p - q)).sum(-1))
        columns["top1"].append((p.argmax(-1) == q.argmax(-1)).double())
        columns["top5"].append((best_p[:, :, None] == best_q[:, None, :]).any(-1).double().mean(-1))
    values = {name: torch.cat(parts).numpy() for name, parts in columns.items()}
    sequence = np.repeat(np.arange(len(ids)), ids.shape[1] - 1)
    return Comparison(sequence=sequence, layers=layer_errors(reference, run), **values)


def layer_errors(reference: Run, run: Run) -> list[float]:
    """Relative error of each block's output over the traced sequences, both models fed the same text.

    Errors of earlier blocks are included: this is what the next block sees.
    """
    errors = []
    for ours, theirs in zip(run.blocks, reference.blocks, strict=True):
        wanted = theirs.double()
        errors.append(float((ours.double() - wanted).norm() / wanted.norm()))
    return errors


def quality_part(
    comparison: Comparison,
    floor: Comparison,
    *,
    floor_kind: str,
    max_kl: float | None = None,
    min_top1: float | None = None,
) -> Part:
    """The report: one check per metric, the floor and the per-layer errors.

    KL and NLL must be finite; KL and top-1 have a limit only where one is given.
    """
    c = comparison
    checks = [
        _measured("nll, source", c.mean(c.nll_reference), finite=True),
        _measured("nll", c.mean(c.nll), finite=True),
        _measured("nll difference", c.mean(c.nll - c.nll_reference)),
        _measured("perplexity, source", perplexity(c.mean(c.nll_reference))),
        _measured("perplexity", perplexity(c.mean(c.nll))),
        _measured("kl divergence", c.mean(c.kl), at_most=max_kl, finite=True),
        _measured("top-1 agreement", c.mean(c.top1), at_least=min_top1),
        _measured("top-5 agreement", c.mean(c.top5)),
    ]
    data = {
        "positions": int(c.kl.size),
        "sequences": int(c.sequence[-1]) + 1,
        "kl_quantiles": {str(q): finite(float(np.quantile(c.kl, q))) for q in (0.5, 0.9, 0.99, 1.0)},
        "floor": {
            "kind": floor_kind,
            "kl divergence": floor.mean(floor.kl).to_dict(),
            "nll difference": floor.mean(floor.nll - floor.nll_reference).to_dict(),
            "top-1 agreement": floor.mean(floor.top1).to_dict(),
            "top-5 agreement": floor.mean(floor.top5).to_dict(),
        },
        "layers": [
            {"layer": i, "relative_error": finite(ours), "floor": finite(noise)}
            for i, (ours, noise) in enumerate(zip(c.layers, floor.layers, strict=True))
        ],
    }
    return Part("quality", checks, data)


def _measured(
    name: str,
    estimate: Estimate,
    *,
    at_most: float | None = None,
    at_least: float | None = None,
    finite: bool = False,
) -> Check:
    value = estimate.value
    passed: bool | None = None
    note = "" if finite or at_most is not None or at_least is not None else "no limit"
    if finite and not np.isfinite(value):
        passed, note = False, "not finite"
    elif at_most is not None:
        passed, note = value <= at_most, "at most"
    elif at_least is not None:
        passed, note = value >= at_least, "at least"
    elif finite:
        passed, note = True, "finite"
    limit = at_most if at_most is not None else at_least
    return Check(name, passed, estimate.count, "positions", value, estimate.standard_error, limit, note)
