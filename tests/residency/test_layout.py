"""The merged expert row: sizes, alignment, and filling from checkpoint tensors."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from q38.base.errors import InputError
from q38.kernels import reference
from q38.residency.layout import ALIGNMENT, ExpertLayout, address_table


def test_the_row_of_the_release_has_its_known_size() -> None:
    layout = ExpertLayout(2560, 640)
    assert layout.row_bytes == 1_305_600
    assert (layout.w13_shape, layout.w2_shape) == ((160, 1280), (40, 2560))
    assert (layout.w13_scale_shape, layout.w2_scale_shape) == ((20, 1280), (5, 2560))


@given(st.sampled_from([16, 32, 64, 128]), st.integers(1, 12), st.integers(1, 12), st.sampled_from([2, 4, 8]))
def test_parts_are_aligned_and_do_not_overlap(group: int, k: int, n: int, bits: int) -> None:
    layout = ExpertLayout(group * k, group * n, group, bits)
    row = torch.zeros(layout.row_bytes, dtype=torch.uint8)
    views = layout.views(row, torch.float16)
    for part in views.values():
        part.view(torch.uint8).add_(1)
    assert int(row.max()) == 1  # no byte belongs to two parts
    starts = [part.data_ptr() - row.data_ptr() for part in views.values()]
    assert all(start % ALIGNMENT == 0 for start in (*starts, layout.row_bytes))


def test_a_filled_row_holds_the_checkpoints_matrices() -> None:
    layout = ExpertLayout(256, 128)
    words = lambda k, n: torch.randint(-(2**31), 2**31 - 1, (k // 16, n), dtype=torch.int32)  # noqa: E731
    scales = lambda k, n: torch.randn(k // 128, n).half()  # noqa: E731
    gate, up, down = (
        (words(256, 128), scales(256, 128)),
        (words(256, 128), scales(256, 128)),
        (words(128, 256), scales(128, 256)),
    )
    row = torch.empty(layout.row_bytes, dtype=torch.uint8)
    layout.fill(row, gate, up, down)
    w13, w2 = reference.dequantize_row(row, layout, torch.float16)
    both = [reference.dequantize_words(*m, 2) for m in (gate, up)]
    assert torch.equal(w13, torch.cat(both, dim=1))
    assert torch.equal(w2, reference.dequantize_words(*down, 2))


@pytest.mark.parametrize(
    ("sizes", "word"),
    [
        ((100, 128, 128, 2), "hidden size 100"),
        ((128, 96, 128, 2), "intermediate size 96"),
        ((0, 128, 128, 2), "hidden"),
        ((128, 128, 128, 3), "3 bits"),
    ],
)
def test_sizes_that_do_not_divide_are_refused(sizes: tuple[int, int, int, int], word: str) -> None:
    with pytest.raises(InputError, match=word):
        ExpertLayout(*sizes)


def test_a_row_off_the_16_byte_grid_is_refused() -> None:
    pool = torch.zeros(256, dtype=torch.uint8)
    offset = -pool.data_ptr() % 16
    assert address_table([pool[offset:]]).tolist() == [pool.data_ptr() + offset]
    with pytest.raises(InputError, match="row of expert 1"):
        address_table([pool[offset:], pool[offset + 8 :]])
