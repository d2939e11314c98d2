"""Every kernel once over small sizes, for ncu and compute-sanitizer.

    ncu --set full --clock-control none -k regex:'gate_up|down' python benchmarks/kernels_profile.py "1,1,1,2,2,2,5,1 16"

Each word of the argument is a decode layer: TOKENS or TOKENS,TILES13,TILES2,CTAS13,CTAS2,DEPTH13,DEPTH2,BATCH.
Prefill, INT8 and the KV gathers follow.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from q38.kernels.gemv_int8 import GemvInt8, Int8Config
from q38.kernels.kv_cache import KvTiers, gather_rows, gather_rows_tiered
from q38.kernels.moe_decode import DecodeConfig, MoeDecode
from q38.kernels.moe_prefill import moe_prefill
from q38.kernels.samples import random_rows, row_addresses, uniform_routing
from q38.model.kv_format import INT4_G32, INT8_G64
from q38.residency.layout import ExpertLayout

HIDDEN, INTER, EXPERTS, TOP_K = 2560, 640, 64, 10

layout = ExpertLayout(HIDDEN, INTER)
rows = random_rows(layout, EXPERTS)
table = row_addresses(rows).cuda()
for spec in sys.argv[1].split():
    tokens, *numbers = (int(v) for v in spec.split(","))
    moe = MoeDecode(
        layout, TOP_K, configs={tokens: DecodeConfig(*numbers)} if numbers else None, backend="cuda"
    )
    ids, weights = uniform_routing(tokens, EXPERTS, TOP_K)
    moe(torch.randn(tokens, HIDDEN, device="cuda").bfloat16(), table, ids, weights)
ids, weights = uniform_routing(20, EXPERTS, TOP_K)
moe_prefill(torch.randn(20, HIDDEN, device="cuda").bfloat16(), table, ids, weights, layout)
for k, n, group, config in (
    (2560, 512, 128, Int8Config(5, 4)), (320, 1024, 64, Int8Config(5, 1)), (2560, 64, 128, Int8Config(5, 2)),
):  # fmt: skip
    words = torch.randint(-(2**31), 2**31 - 1, (k // 4, n), dtype=torch.int32, device="cuda")
    gemv = GemvInt8(words, torch.ones(k // group, n, device="cuda").half(), config=config)
    for tokens in (1, 16):
        gemv(torch.randn(tokens, k, device="cuda").bfloat16())
slots, out = torch.arange(50, device="cuda"), torch.empty(50, 2, 256, device="cuda").bfloat16()
for kv in (INT8_G64, INT4_G32):
    gather_rows(slots, kv.payload(64, 2, 256, "cuda"), kv.scales(64, 2, 256, "cuda"), kv, out)
gather_rows_tiered(slots, KvTiers(64, 2, 256, 8), out)
torch.cuda.synchronize()
