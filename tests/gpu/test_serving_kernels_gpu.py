"""The small kernels of a server on a real GPU: counting, and INT8 matrices for any number of tokens."""

from __future__ import annotations

import pytest
import torch

from q38.kernels.reference import gemv_int8, relative_error

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU"),
]
if torch.cuda.is_available():
    from q38.kernels.expert_counter import ExpertCounter
    from q38.kernels.int8_matmul import SCRATCH, Int8Matrix


@pytest.mark.parametrize("tokens", [1, 3, 16, 17, 2048])
def test_choices_are_counted_in_a_graph_too(tokens: int) -> None:
    ids = torch.randint(-1, 512, (tokens, 10), dtype=torch.int32, device="cuda")
    counter = ExpertCounter(3, 512, "cuda")
    counter.add(1, ids)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        counter.add(1, ids)
    graph.replay()
    selections, reads = counter.read()
    flat = ids.flatten()
    wanted = torch.bincount(flat[flat >= 0], minlength=512).cpu()
    assert (torch.from_numpy(selections[1].astype("int64")) == 2 * wanted).all()
    assert (torch.from_numpy(reads[1].astype("int64")) == 2 * (wanted > 0)).all()
    assert not selections[[0, 2]].any()


@pytest.mark.parametrize("tokens", [1, 16, 17, 300])
@pytest.mark.parametrize(("k", "n"), [(2560, 640), (640, 2560), (2560, 16_384)])
def test_a_matrix_multiplies_few_and_many_tokens(tokens: int, k: int, n: int) -> None:
    random = torch.Generator("cuda").manual_seed(0)
    words = torch.randint(
        -(2**31), 2**31, (k // 4, n), dtype=torch.int64, device="cuda", generator=random
    ).to(torch.int32)
    scales = (torch.rand(k // 128, n, device="cuda", generator=random) * 1e-3).half()
    x = torch.randn(tokens, k, device="cuda", generator=random).bfloat16()
    assert relative_error(Int8Matrix(words, scales)(x), gemv_int8(x, words, scales)) < 5e-3
    assert k * n > SCRATCH or n < 16_384  # the widest takes two blocks of columns
