"""What an expert's result depends on beside its weights and its tokens."""

from __future__ import annotations

from dataclasses import dataclass

from q38.recipe.schema import Experts

EVALUATIONS = 10  # of the held-out error, evenly over the steps, beside the one at the start
HELD_OUT = 1 / 8


@dataclass(frozen=True)
class Settings:
    """One run's choices for the experts; see the recipe's keys of the same names.

    search: tuning starts from searched scales instead of those of plain rounding.
    rate: first rate of SignRound, times the number of steps.
    """

    method: str
    bits: int
    group_size: int
    steps: int
    rows: int
    min_tokens: int
    most_tokens: int
    damp: float
    seed: int
    search: bool = True
    rate: float = 2.0

    @classmethod
    def of(cls, experts: Experts, *, bits: int, group_size: int, seed: int) -> Settings:
        """From a recipe's quantize.experts."""
        return cls(
            method=experts.method,
            bits=bits,
            group_size=group_size,
            steps=experts.steps if experts.method in ("expert-local", "expert-local-gsq") else 0,
            rows=experts.rows,
            min_tokens=experts.min_tokens,
            most_tokens=experts.max_tokens,
            damp=experts.damp,
            seed=seed,
        )
