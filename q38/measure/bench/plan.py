"""What a benchmark measures: its cells, and what cannot be measured."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from q38.base.errors import InputError

COLD, WARM = "cold", "warm"
MOST_CLIENTS = 100  # connections that the HTTP client opens; more requests would wait here, not in the server


@dataclass(frozen=True)
class Cell:
    """One line of the result: prompt length in tokens, requests at once, and what the prefix cache holds."""

    depth: int
    concurrency: int
    prefix: str

    def __str__(self) -> str:
        return cell_name(self.depth, self.concurrency, self.prefix)


@dataclass(frozen=True)
class Plan:
    """The settings of a benchmark.

    depths: prompt lengths in tokens, chat template included. Met approximately; the exact ones are in the result.
    concurrency: requests sent at the same moment.
    prefixes: COLD (a prompt that the server has never seen) and WARM (the same text with another question).
        Warm rounds follow the cold ones of the lowest concurrency.
    max_tokens: tokens to generate per request. repeats: measured rounds per cell.
    max_warmup: rounds that are dropped at most, until two in a row agree.
    """

    depths: tuple[int, ...]
    concurrency: tuple[int, ...] = (1,)
    prefixes: tuple[str, ...] = (COLD, WARM)
    max_tokens: int = 64
    repeats: int = 3
    max_warmup: int = 4
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse what cannot be measured. Raises InputError."""
        for option, values, example in (
            ("--depths", self.depths, "128,2k"),
            ("--concurrency", self.concurrency, "1,4"),
        ):
            if not values or min(values) < 1 or len(set(values)) < len(values):
                raise InputError(
                    "different numbers from 1 on are needed", where=option, remedy=f"write {example}"
                )
        if max(self.concurrency) > MOST_CLIENTS:
            raise InputError(f"at most {MOST_CLIENTS} requests at once", where="--concurrency")
        if not self.prefixes or set(self.prefixes) - {COLD, WARM}:
            raise InputError(
                f"'{','.join(self.prefixes)}' is neither cold nor warm",
                where="--prefix",
                remedy="write cold, warm or cold,warm",
            )
        for option, number, least, why in (
            ("--max-tokens", self.max_tokens, 2, "there is no time between the tokens of a shorter answer"),
            ("--repeats", self.repeats, 1, "that measures nothing"),
            ("--max-warmup", self.max_warmup, 1, "the first round after a start is never typical"),
        ):
            if number < least:
                raise InputError(f"{number}: {why}", where=option, remedy=f"use at least {least}")

    def require_spread(self) -> None:
        """Refuse to compare what is measured once. Raises InputError."""
        if self.repeats < 2:
            raise InputError(
                "one round has no spread to compare with", where="--repeats", remedy="use at least 2"
            )

    def groups(self) -> Iterator[tuple[Cell, ...]]:
        """Cells that are measured in the same rounds."""
        for depth in self.depths:
            for n in self.concurrency:
                warm = n == min(self.concurrency) and WARM in self.prefixes
                prefixes = [COLD] * (COLD in self.prefixes) + [WARM] * warm
                if prefixes:
                    yield tuple(Cell(depth, n, prefix) for prefix in prefixes)

    @property
    def most_rounds(self) -> int:
        """Rounds sent at most, cold and warm ones apart."""
        each = self.max_warmup + self.repeats
        return sum(each * (2 if group[-1].prefix == WARM else 1) for group in self.groups())


def check_gate(gate: float) -> None:
    """Refuse what no ratio of speeds can be. Raises InputError."""
    if not gate > 0:
        raise InputError(f"{gate:g} is no ratio of speeds", where="--gate", remedy="write 0.98")


def cell_name(depth: int, concurrency: int, prefix: str) -> str:
    """As messages and tables say it."""
    together = f", {concurrency} at once" if concurrency > 1 else ""
    return f"depth {depth:,}{together}, {prefix} prefix"


def parse_numbers(text: str, *, where: str) -> tuple[int, ...]:
    """`128,2k,10k` -> (128, 2048, 10240); k counts 1,024.

    Raises:
        InputError: it is something else.
    """
    numbers = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)\s*(k?)\s*", part.lower())
        if not match:
            raise InputError(f"'{text}' is not a list of numbers", where=where, remedy="write 128,2k")
        numbers.append(int(match[1]) * (1024 if match[2] else 1))
    return tuple(numbers)


def parse_prefixes(text: str) -> tuple[str, ...]:
    """`cold,warm` -> ("cold", "warm"); checked by Plan."""
    return tuple(part.strip() for part in text.split(","))


def command_line(url: str, plan: Plan, options: Sequence[tuple[str, object]]) -> str:
    """The command that makes this benchmark again; options that are None are left out."""
    parts = ["q38 bench serve", f"--url {url}", f"--depths {','.join(map(str, plan.depths))}"]
    parts += [
        f"--concurrency {','.join(map(str, plan.concurrency))}",
        f"--prefix {','.join(plan.prefixes)}",
    ]
    parts += [f"--max-tokens {plan.max_tokens}", f"--repeats {plan.repeats}"]
    parts += [f"--max-warmup {plan.max_warmup}", f"--seed {plan.seed}"]
    return " ".join(parts + [f"{name} {value}" for name, value in options if value is not None])
