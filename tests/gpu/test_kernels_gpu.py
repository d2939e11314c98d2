"""The kernels on a real GPU, at real sizes: precision, equal bits, graphs that replay after the table changed."""

from __future__ import annotations

import pytest
import torch

from q38.kernels import reference

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU"),
]
if torch.cuda.is_available():
    from q38.kernels import kv_cache, moe_prefill_cuda, nvrtc
    from q38.kernels.gemv_int8 import GemvInt8, Int8Config
    from q38.kernels.kv_formats import dequantize_reference, quantize_reference
    from q38.kernels.moe_decode import DecodeConfig, MoeDecode
    from q38.kernels.moe_prefill import moe_prefill
    from q38.kernels.moe_sort import sort_slots, sort_slots_torch
    from q38.kernels.row_mover import RowMover, gather_addresses
    from q38.kernels.samples import random_rows, row_addresses, uniform_routing
    from q38.model.kv_format import INT4_G32, INT8_G64
    from q38.residency.layout import ExpertLayout

HIDDEN, INTER, EXPERTS, TOP_K = 2560, 640, 512, 10


@pytest.fixture(scope="module")
def layer() -> tuple[ExpertLayout, torch.Tensor, torch.Tensor]:
    """Layout, all rows of one layer, and their table."""
    layout = ExpertLayout(HIDDEN, INTER)
    rows = random_rows(layout, EXPERTS)
    return layout, rows, row_addresses(rows).cuda()


def exact(layer: tuple, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return reference.moe(x, list(layer[1]), ids, weights, layer[0], torch.float16)


@pytest.mark.parametrize("backend", ["cuda", "triton"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tokens", [1, 2, 5, 16])
def test_decode_is_within_half_a_percent_of_float64_and_repeats_its_bits(
    layer, backend, dtype, tokens
) -> None:
    moe = MoeDecode(layer[0], TOP_K, dtype=dtype, backend=backend)
    ids, weights = uniform_routing(tokens, 40, TOP_K, seed=tokens)  # experts shared by several tokens
    ids[-1, 3] = -1
    x = torch.randn(tokens, HIDDEN, device="cuda").to(dtype)
    out = moe(x, layer[2], ids, weights, torch.full_like(x, float("nan")))
    assert reference.relative_error(out, exact(layer, x, ids, weights)) < 5e-3
    for _ in range(20):
        assert torch.equal(moe(x, layer[2], ids, weights), out)


@pytest.mark.parametrize("tokens", [1, 7, 16])
def test_every_geometry_gives_the_same_bits_per_token(layer, tokens) -> None:
    ids, weights = uniform_routing(tokens, 12, TOP_K)  # up to 16 tokens an expert: several passes
    x = torch.randn(tokens, HIDDEN, device="cuda").bfloat16()
    configs = [
        DecodeConfig(), DecodeConfig(2, 4, 3, 3, 2, 3, 1), DecodeConfig(5, 5, 2, 2, 3, 4, 4), DecodeConfig(10, 8, 2, 2, 2, 5, 2),
        DecodeConfig(registers=True), DecodeConfig(dependent=False),
    ]  # fmt: skip
    outs = [
        MoeDecode(layer[0], TOP_K, configs={1: c}, backend="cuda")(x, layer[2], ids, weights) for c in configs
    ]
    assert all(torch.equal(o, outs[0]) for o in outs[1:])
    moe = MoeDecode(layer[0], TOP_K, backend="cuda")
    alone = torch.cat(
        [
            moe(x[i : i + 1], layer[2], ids[i : i + 1].contiguous(), weights[i : i + 1].contiguous())
            for i in range(tokens)
        ]
    )
    assert torch.equal(alone, outs[0])


@pytest.mark.parametrize("scale", [1e-30, 1e-6, 1.0, 1e4])
def test_decode_holds_over_the_range_of_bfloat16(layer, scale) -> None:
    ids, weights = uniform_routing(2, EXPERTS, TOP_K)
    x = (torch.randn(2, HIDDEN, device="cuda") * scale).bfloat16()
    x[0, 7] = 200 * scale  # an outlier
    out = MoeDecode(layer[0], TOP_K, backend="cuda")(x, layer[2], ids, weights)
    assert reference.relative_error(out.float(), exact(layer, x, ids, weights)) < 5e-3 or scale < 1e-20


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_an_input_that_is_not_finite_spoils_its_own_token_alone(layer, value) -> None:
    ids, weights = uniform_routing(3, 12, TOP_K)  # experts shared by the tokens
    x = torch.randn(3, HIDDEN, device="cuda").bfloat16()
    moe = MoeDecode(layer[0], TOP_K, backend="cuda")
    clean = moe(x, layer[2], ids, weights)
    x[1, 77] = value
    out = moe(x, layer[2], ids, weights)
    assert out[1].isnan().all()
    assert torch.equal(out[[0, 2]], clean[[0, 2]])


def test_other_shapes_take_the_cuda_backend_too() -> None:
    for hidden, inter, top_k, dtype in (
        (384, 384, 3, torch.bfloat16),
        (2048, 768, 8, torch.float16),
        (256, 128, 2, torch.bfloat16),
    ):
        layout = ExpertLayout(hidden, inter)
        rows = random_rows(layout, 16, scale_dtype=torch.bfloat16)
        for tokens in (1, 4, 13):
            ids, weights = uniform_routing(tokens, 16, top_k)
            x = torch.randn(tokens, hidden, device="cuda").to(dtype)
            moe = MoeDecode(layout, top_k, dtype=dtype, scale_dtype=torch.bfloat16, backend="cuda")
            out = moe(x, row_addresses(rows).cuda(), ids, weights)
            want = reference.moe(x, list(rows), ids, weights, layout, torch.bfloat16)
            assert reference.relative_error(out, want) < 5e-3


def test_a_graph_replays_the_same_bits_after_rows_moved_to_the_host_and_back(layer) -> None:
    layout, rows, table = layer[0], layer[1], layer[2].clone()
    ids, weights = uniform_routing(4, EXPERTS, TOP_K)
    x = torch.randn(4, HIDDEN, device="cuda").bfloat16()
    out = torch.empty_like(x)
    moe = MoeDecode(layout, TOP_K, backend="cuda")
    moe(x, table, ids, weights, out)
    before = out.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        moe(x, table, ids, weights, out)
    moved = ids.unique().tolist()[::2]
    host = torch.empty(len(moved), layout.row_bytes, dtype=torch.uint8, pin_memory=True)
    for place, expert in enumerate(moved):
        host[place].copy_(rows[expert])
    for addresses in (row_addresses(host), layer[2][moved]):
        table[moved] = addresses.cuda()
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, before)


@pytest.mark.parametrize("tokens", [17, 300, 4096])
def test_prefill_is_within_half_a_percent_of_float64(layer, tokens) -> None:
    ids, weights = uniform_routing(tokens, 64, TOP_K)
    x = torch.randn(tokens, HIDDEN, device="cuda").bfloat16()
    out = moe_prefill(x, layer[2], ids, weights, layer[0])
    some = slice(0, 64)
    assert reference.relative_error(out[some], exact(layer, x[some], ids[some], weights[some])) < 5e-3
    assert torch.equal(moe_prefill(x, layer[2], ids, weights, layer[0]), out)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_both_prefill_sources_agree_with_float64_at_every_block_size(layer, dtype) -> None:
    configs = [moe_prefill_cuda.MmaConfig()]
    if torch.cuda.get_device_capability() == (9, 0):
        hopper = moe_prefill_cuda.HopperConfig
        configs += [hopper(), hopper(80, 2, 2, 1, 2, 3), hopper(96, 2, 1, 1, 1, 4), hopper(64, 1, 2, 5, 3)]
    experts = 8
    ids = torch.full((200, TOP_K), -1, dtype=torch.int32, device="cuda")
    for expert in range(experts):  # 3, 19, 35, .. 115 tokens: the last block has 3 to 64 of 64
        ids[: 3 + 16 * expert, expert] = expert
    weights = torch.rand(200, TOP_K, device="cuda")
    x = torch.randn(200, HIDDEN, device="cuda").to(dtype)
    want = exact(layer, x, ids, weights)
    for config in configs:
        outs = [
            moe_prefill_cuda.run(x, layer[2], ids, weights, layer[0], torch.float16, config)
            for _ in range(10)
        ]
        assert reference.relative_error(outs[0][:115], want[:115]) < 5e-3
        assert not outs[0][115:].any()
        assert all(torch.equal(out, outs[0]) for out in outs)


def test_other_shapes_take_the_prefill_kernels_too() -> None:
    for hidden, inter, top_k, dtype, scale_dtype in (
        (384, 384, 3, torch.bfloat16, torch.bfloat16),
        (2048, 768, 8, torch.float16, torch.float16),
        (256, 128, 2, torch.bfloat16, torch.float16),
    ):
        layout = ExpertLayout(hidden, inter)
        rows = random_rows(layout, 16, scale_dtype=scale_dtype)
        for tokens in (17, 150):
            ids, weights = uniform_routing(tokens, 16, top_k)
            x = torch.randn(tokens, hidden, device="cuda").to(dtype)
            table = row_addresses(rows).cuda()
            out = moe_prefill(x, table, ids, weights, layout, scale_dtype=scale_dtype, backend="cuda")
            want = reference.moe(x, list(rows), ids, weights, layout, scale_dtype)
            assert reference.relative_error(out, want) < 5e-3


@pytest.mark.parametrize(
    ("tokens", "experts", "block"), [(1, 3, 64), (17, 512, 64), (300, 700, 96), (5000, 1024, 64)]
)
def test_slots_are_sorted_as_torch_sorts_them(tokens, experts, block) -> None:
    ids, _ = uniform_routing(tokens, experts, min(TOP_K, experts), seed=tokens)
    ids[torch.rand(ids.shape, device="cuda") < 0.1] = -1
    for positions in (None, torch.randperm(experts, device="cuda").int()):
        found, want = (sort(ids, experts, block, positions) for sort in (sort_slots, sort_slots_torch))
        blocks = int((want.block_expert >= 0).sum())
        slots = int(want.block_live[:blocks].sum())
        for name in ("block_expert", "first_slot", "first_block"):
            assert torch.equal(getattr(found, name), getattr(want, name))
        for name, count in (("order", slots), ("block_start", blocks), ("block_live", blocks)):
            assert torch.equal(getattr(found, name)[:count], getattr(want, name)[:count])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("k", "n", "group"), [(10240, 320, 128), (320, 10240, 64), (2560, 512, 128)])
def test_int8_is_within_half_a_percent_of_float64_and_repeats_its_bits(k, n, group, dtype) -> None:
    words = torch.randint(-(2**31), 2**31 - 1, (k // 4, n), dtype=torch.int32, device="cuda")
    scales = (torch.randn(k // group, n, device="cuda") * 0.01).half()
    for gemv in (
        GemvInt8(words, scales, backend="cuda"),
        GemvInt8(words, scales, config=Int8Config(4, 3)),
        GemvInt8(words, scales, backend="triton"),
    ):
        x = torch.randn(16, k, device="cuda").to(dtype)
        whole = gemv(x)
        for tokens in (1, 9, 16):
            out = gemv(x[:tokens], torch.full_like(whole[:tokens], float("nan")))
            assert reference.relative_error(out, reference.gemv_int8(x[:tokens], words, scales)) < 5e-3
            assert torch.equal(out, whole[:tokens])  # a token's bits do not depend on those beside it
            assert all(torch.equal(gemv(x[:tokens]), out) for _ in range(20))


@pytest.mark.parametrize("backend", ["cuda", "triton"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_kv_rows_match_their_references_bit_for_bit(backend, dtype) -> None:
    rows = (torch.randn(3000, 2, 256, device="cuda") * 3).bfloat16()
    slots = torch.randperm(10000, device="cuda")[:3000]
    for kv in (INT8_G64, INT4_G32):
        payload, scales = kv.payload(10000, 2, 256, "cuda"), kv.scales(10000, 2, 256, "cuda")
        kv_cache.write_rows(rows, slots, payload, scales, kv)
        want = quantize_reference(rows, kv)
        assert torch.equal(payload[slots], want[0])
        assert torch.equal(scales[slots], want[1])
        out = torch.full(rows.shape, 7.0, dtype=dtype, device="cuda")
        at = slots.to(torch.int32 if dtype == torch.float16 else torch.int64, copy=True)
        at[5] = -1
        kv_cache.gather_rows(at, payload, scales, kv, out, backend=backend)
        expected = dequantize_reference(*want, kv, dtype)
        expected[5] = 7
        assert torch.equal(out, expected)


@pytest.mark.parametrize("backend", ["cuda", "triton"])
def test_tiered_rows_read_int8_exactly_where_they_own_their_place(backend) -> None:
    tiers = kv_cache.KvTiers(10000, 2, 256, 4096)
    rows = (torch.randn(3000, 2, 256, device="cuda") * 3).bfloat16()
    slots = torch.randperm(10000, device="cuda")[:3000]
    kv_cache.write_rows_tiered(rows, slots, tiers)
    out = kv_cache.gather_rows_tiered(slots, tiers, torch.empty_like(rows), backend=backend)
    hot = tiers.owner[slots % 4096] == slots
    both = [
        dequantize_reference(*quantize_reference(rows, kv), kv, torch.bfloat16) for kv in (INT8_G64, INT4_G32)
    ]
    assert torch.equal(out, torch.where(hot[:, None, None], *both))
    assert len((slots % 4096).unique()) == int(hot.sum())


@pytest.mark.parametrize("batched", [True, False])
def test_moved_rows_arrive_whole(batched) -> None:
    source = torch.randint(0, 255, (64, 65536), dtype=torch.uint8).pin_memory()
    target = torch.zeros(32, 65536, dtype=torch.uint8, device="cuda")
    picked = torch.randperm(64)[:32].tolist()
    event = RowMover(batched=batched).copy(source, picked, target, list(range(32)))
    torch.cuda.current_stream().wait_event(event)
    assert torch.equal(target.cpu(), source[picked])
    target.zero_()
    gather_addresses(row_addresses(source)[picked].cuda(), target)
    assert torch.equal(target.cpu(), source[picked])


def test_the_machine_can_run_the_cuda_backend() -> None:
    assert nvrtc.available() is None
