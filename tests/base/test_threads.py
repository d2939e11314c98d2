"""One thread inside torch while whole matrices are spread over threads."""

from __future__ import annotations

import pytest
import torch

from q38.base.threads import one_torch_thread


def test_the_number_of_threads_is_restored_after_a_failure() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with pytest.raises(KeyError), one_torch_thread():
            assert torch.get_num_threads() == 1
            raise KeyError
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
