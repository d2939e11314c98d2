"""GPTQ for a batch of experts (Frantar et al., arXiv 2210.17323), without reordering of columns.

Columns are rounded one after the other; the error of each is spread over the later ones by the
inverse Hessian of the route-weighted squared output error, H = sum of w^2 x x^T.
"""

from __future__ import annotations

import torch

from q38.quantize.local.grid import limits


class Indefinite(Exception):
    """Hessians that have no Cholesky factor. `which`: their indices in the batch."""

    def __init__(self, which: list[int]) -> None:
        super().__init__(f"no Cholesky factor of {which}")
        self.which = which


def hessian(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """H float32 [K, K] of inputs x [n, K] with route weights [n]."""
    rows = x.float() * weight.unsqueeze(-1)
    return rows.T @ rows


def gptq(
    weight: torch.Tensor, hessians: torch.Tensor, scale: torch.Tensor, *, bits: int, damp: float
) -> torch.Tensor:
    """Levels of a batch of matrices.

    Args:
        weight: [E, N, K].
        hessians: float32 [E, K, K]; overwritten.
        scale: float32 [E, N, G], fixed.
        damp: share of the mean diagonal that is added to the diagonal.

    Returns:
        int8 [E, N, K].

    Raises:
        Indefinite: `damp` is too small for these inputs, or one of them is infinite or not a number.
    """
    low, high = limits(bits)
    work = weight.float().clone()
    k, group = work.shape[-1], work.shape[-1] // scale.shape[-1]
    diagonal = hessians.diagonal(dim1=-2, dim2=-1)
    # An expert that saw only zeros has no Hessian: plain rounding then.
    diagonal += damp * diagonal.mean(-1, keepdim=True) + 1e-8
    inverse = torch.cholesky_inverse(_factor(hessians))
    factor = _factor(inverse, upper=True)  # [E, K, K]
    del inverse
    levels = torch.empty(work.shape, dtype=torch.int8, device=work.device)
    for start in range(0, k, group):
        stop = start + group
        columns, own = work[..., start:stop], factor[:, start:stop, start:stop]
        step = scale[..., start // group]  # [E, N]
        errors = torch.empty_like(columns)
        for i in range(group):
            column = columns[..., i]
            level = torch.round(column / step).clamp_(low, high)
            levels[..., start + i] = level.to(torch.int8)
            error = (column - level * step) / own[:, i, i, None]
            errors[..., i] = error
            if i + 1 < group:
                columns[..., i + 1 :] -= error.unsqueeze(-1) * own[:, i, None, i + 1 :]
        if stop < k:
            work[..., stop:] -= torch.bmm(errors, factor[:, start:stop, stop:])
    return levels


def _factor(matrices: torch.Tensor, *, upper: bool = False) -> torch.Tensor:
    """Cholesky factors of [E, K, K]."""
    factor: torch.Tensor
    factor, info = torch.linalg.cholesky_ex(matrices, upper=upper)
    if bool(info.any()):
        raise Indefinite(info.nonzero().flatten().tolist())
    return factor
