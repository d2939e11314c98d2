"""Moving rows: copies and the gather by address."""

from __future__ import annotations

import pytest
import torch

from q38.base.errors import InputError

pytest.importorskip("triton", reason="Triton is not installed (pip install 'q38[kernels]')")
from q38.kernels.row_mover import RowMover, gather_addresses


def test_copied_rows_arrive_at_their_places() -> None:
    source, target = (
        torch.randint(0, 255, (6, 272), dtype=torch.uint8),
        torch.zeros(4, 272, dtype=torch.uint8),
    )
    assert RowMover("cpu").copy(source, [5, 1], target, [0, 3]) is None
    assert torch.equal(target[[0, 3]], source[[5, 1]])
    assert not target[[1, 2]].any()


@pytest.mark.parametrize(("rows", "places"), [([0], [0, 1]), ([6], [0]), ([0], [4]), ([-1], [0])])
def test_lists_that_do_not_fit_the_pools_are_refused(rows: list[int], places: list[int]) -> None:
    with pytest.raises(InputError):
        RowMover("cpu").copy(
            torch.zeros(6, 32, dtype=torch.uint8), rows, torch.zeros(4, 32, dtype=torch.uint8), places
        )


def test_rows_are_gathered_from_any_address(device: str) -> None:
    pools = [torch.randint(0, 255, (3, 272), dtype=torch.uint8).to(device) for _ in range(2)]
    rows = [pools[1][2], pools[0][0], pools[1][0]]
    addresses = torch.tensor([r.data_ptr() for r in rows], device=device)
    out = torch.zeros(3, 272, dtype=torch.uint8, device=device)
    assert torch.equal(gather_addresses(addresses, out, block=16), torch.stack(rows))


def test_rows_that_are_no_multiple_of_16_bytes_are_refused() -> None:
    with pytest.raises(InputError, match="multiple of 16"):
        gather_addresses(torch.zeros(1, dtype=torch.int64), torch.zeros(1, 24, dtype=torch.uint8))
