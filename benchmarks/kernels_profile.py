"""One decode layer per token count over a small layer, for ncu and compute-sanitizer.

    ncu --set full --clock-control none -k regex:'gate_up|down' python benchmarks/kernels_profile.py "1,1,1,2,2,2,5,1 16"

Each word of the argument is TOKENS or TOKENS,TILES13,TILES2,CTAS13,CTAS2,DEPTH13,DEPTH2,BATCH.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from q38.kernels.moe_decode import DecodeConfig, MoeDecode
from q38.kernels.moe_prefill import moe_prefill
from q38.kernels.samples import random_rows, row_addresses, uniform_routing
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
torch.cuda.synchronize()
