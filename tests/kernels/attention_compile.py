"""Compiles the attention kernels for a compute capability and prints the shared memory of each. Needs no GPU."""

from __future__ import annotations

import json
import sys
from typing import Any

FORMATS: dict[str, tuple[str, str, int, int, int]] = {  # payload, scales, bits, group, ring
    "int8": ("*i8", "*fp16", 8, 64, 0),
    "int4": ("*u8", "*fp16", 4, 32, 0),
    "int8ring_int4": ("*u8", "*fp16", 4, 32, 8192),
    "bf16": ("*bf16", "*bf16", 0, 256, 0),
    "fp8": ("*fp8e4nv", "*fp8e4nv", 0, 256, 0),
}


def compile_one(kernel: Any, types: dict[str, str], constants: dict[str, Any], capability: int) -> int:
    """Bytes of shared memory of one program of eight warps."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = kernel.arg_names
    signature = {name: types.get(name, "constexpr") for name in names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if signature[n].startswith("*")}
    source = ASTSource(
        kernel, signature, constexprs={(names.index(n),): v for n, v in constants.items()}, attrs=aligned
    )
    options = {"num_warps": 8, "num_stages": 1}
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    assert len(made.asm["cubin"]) > 0
    return int(made.metadata.shared)


def main(capability: int) -> None:
    from q38.kernels.kv_attention_triton import attend_split, merge_splits

    numbers = dict.fromkeys(("topk", "q_row", "q_head", "table_row", "index_row", "splits"), "i32")
    floats = dict.fromkeys(("partial", "peaks", "sums"), "*fp32")
    found = {}
    for name, (payload, scales, bits, group, ring) in FORMATS.items():
        wide, narrow = ("*i8", "*fp16") if ring else (payload, scales)
        types = {
            "q": "*bf16", "keys": payload, "key_scales": scales, "key_ring": wide, "key_ring_scales": narrow,
            "values": payload, "value_scales": scales, "value_ring": wide, "value_ring_scales": narrow,
            "owner": "*i32", "table": "*i32", "requests": "*i64", "indices": "*i32", "lengths": "*i32", "scale": "fp32",
            **floats, **numbers,
        }  # fmt: skip
        constants = {
            "RING": ring, "HEADS": 2, "QUERIES": 12, "PADDED": 16, "DIM": 256, "BITS": bits, "GROUP": group,
            "RING_GROUP": 64, "BLOCK": 64, "EACH": 1, "COMPILED": True,
        }  # fmt: skip
        found[name] = compile_one(attend_split, types, constants, capability)
    found["merge"] = compile_one(
        merge_splits,
        {"out": "*bf16", **floats, **numbers},
        {"DIM": 256, "SPLITS": 64, "CHANNELS": 64},
        capability,
    )
    print(json.dumps(found))


if __name__ == "__main__":
    main(int(sys.argv[1]))
