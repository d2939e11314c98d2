"""Which slots of the KV cache a sparse-attention step reads, and where each row goes in the attention's scratch.

Two layouts of the scratch, as SGLang's decode kernels want them: runs of different length one after the other, or
runs of one stride. One launch reads on the device what the host must not wait for; the torch version is the reference.
"""

from __future__ import annotations

import torch


def selected_slots(
    table: torch.Tensor,
    requests: torch.Tensor,
    indices: torch.Tensor,
    lengths: torch.Tensor,
    starts: torch.Tensor,
    batch: int,
    columns: int,
) -> torch.Tensor:
    """Slot of each row of the scratch, -1 where it has none.

    Args:
        table: int32 [requests, context], slot of each position of each request.
        requests: [batch or more], row of the table of each query.
        indices: int32 [batch or more, topk], positions that each query selected, -1 for none; those at the front of a
            row that are below the query's length are its run.
        lengths: int32 [batch or more], positions of each query's request.
        starts: int32 [batch + 1], first row of each query's run, and the end of the last.
        columns: rows of the longest run; runs of one stride have `columns` rows each.

    Returns:
        int64 [batch * columns].
    """
    if table.device.type == "cuda":
        return launch(table, requests, indices, lengths, starts, batch, columns)
    column = torch.arange(columns, device=indices.device)[None, :]
    start = starts[:batch, None].long()
    run = starts[1 : batch + 1, None].long() - start
    wanted = torch.full((batch, columns), -1, dtype=torch.long, device=indices.device)
    wide = min(columns, indices.shape[1])
    wanted[:, :wide] = indices[:batch, :wide].long()
    valid = (column < run) & (wanted >= 0) & (wanted < lengths[:batch, None])
    slots = table[requests[:batch].long()[:, None], torch.where(valid, wanted, 0)].long()
    found = torch.full((batch * columns + 1,), -1, dtype=torch.long, device=indices.device)
    # What is not valid goes to a place of its own behind the last row.
    place = torch.where(valid, start + column, batch * columns)
    found.scatter_(0, place.reshape(-1), torch.where(valid, slots, -1).reshape(-1))
    return found[:-1]


def launch(
    table: torch.Tensor,
    requests: torch.Tensor,
    indices: torch.Tensor,
    lengths: torch.Tensor,
    starts: torch.Tensor,
    batch: int,
    columns: int,
) -> torch.Tensor:
    """`selected_slots` by one Triton kernel. Its shapes depend on `batch` and `columns` alone."""
    import triton

    from q38.kernels.kv_select_triton import select

    slots = torch.full((batch * columns,), -1, dtype=torch.int64, device=table.device)
    block = 128
    select[(batch, triton.cdiv(columns, block))](
        table, requests, indices, lengths, starts, slots, min(columns, indices.shape[1]),
        table.stride(0), indices.stride(0), BLOCK=block, num_warps=1,
    )  # fmt: skip
    return slots
