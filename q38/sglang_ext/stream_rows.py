"""The n-gram rows of a decode step, fetched inside it: overlap scheduling and full CUDA graphs both stay on.

The row numbers are hashed on the device, where the last step left its token. From there on everything is in the order
of a side stream: numbers to pinned memory, a C function that reads the rows (ple.fetch), rows to the device. It runs
beside the layers before the one that adds the rows. A graph captures all of it, the call of the function as a host node.
"""

from __future__ import annotations

import torch

from q38.base.errors import InputError
from q38.ple.cast import dequantize
from q38.ple.fetch import RowFetcher, RowRequest
from q38.residency.driver import Cuda


class StreamRows:
    """Buffers at fixed addresses, and what is enqueued to fill them.

    Args:
        heads: rows of a token.
        tokens: the most of one step.
        device: where ids come from and rows go; on a CPU the function is simply called.
    """

    def __init__(self, fetcher: RowFetcher, heads: int, tokens: int, device: torch.device) -> None:
        table, on_gpu = fetcher.table, device.type == "cuda"
        self.fetcher, self.tokens, self._heads, self._scale = fetcher, tokens, heads, table.scale
        # SGLang builds the model with the GPU as the default device.
        self._ids = torch.zeros(tokens * heads, dtype=torch.int64, device="cpu", pin_memory=on_gpu)
        self._read = torch.zeros(
            tokens * heads, table.row_bytes, dtype=torch.uint8, device="cpu", pin_memory=on_gpu
        )
        self._stored = torch.zeros_like(self._read, device=device) if on_gpu else self._read
        self._values = torch.zeros(tokens, heads * table.dim, dtype=torch.bfloat16, device=device)
        self._requests: dict[int, RowRequest] = {}  # graphs hold their addresses
        self._started: torch.Tensor | None = None  # ids that the side stream may still read
        self._driver = Cuda(device.index or 0) if on_gpu else None
        self._side = torch.cuda.Stream(device) if on_gpu else None  # type: ignore[no-untyped-call]

    @property
    def started(self) -> bool:
        """Whether `take` is due."""
        return self._started is not None

    def start(self, ids: torch.Tensor) -> None:
        """Fetch rows beside what the current stream does next.

        Args:
            ids: int64 [tokens, heads] on the device.

        Raises:
            InputError: more tokens than the buffers hold.
        """
        if len(ids) > self.tokens:
            raise InputError(
                f"{len(ids)} tokens decoded at once, the n-gram buffer holds {self.tokens}",
                where="n-gram rows",
                remedy=f"pass --requests {self.tokens} or fewer",
            )
        self._started = ids
        if self._side is None:
            self._fetch(ids)
            return
        self._side.wait_stream(torch.cuda.current_stream(ids.device))
        with torch.cuda.stream(self._side):
            self._fetch(ids)

    def take(self) -> torch.Tensor:
        """bf16 [tokens, embed_dim]: the rows that `start` asked for; the current stream waits for them."""
        assert self._started is not None
        tokens = len(self._started)
        if self._side is not None:
            torch.cuda.current_stream(self._started.device).wait_stream(self._side)
        self._started = None
        return self._values[:tokens]

    def _fetch(self, ids: torch.Tensor) -> None:
        count = ids.numel()
        self._ids[:count].copy_(ids.reshape(-1), non_blocking=True)
        request = self._request(count)
        if self._driver is None or self._side is None:
            self.fetcher(request)
        else:
            self._driver.call_host(self._side.cuda_stream, self.fetcher.function, request.address)
            self._stored[:count].copy_(self._read[:count], non_blocking=True)
        rows = self._stored[:count]
        values = (
            rows.view(torch.bfloat16)
            if self._scale is None
            else dequantize(rows.view(torch.float8_e4m3fn), self._scale)
        )
        self._values[: len(ids)].copy_(values.view(len(ids), -1))

    def _request(self, count: int) -> RowRequest:
        if count not in self._requests:
            self._requests[count] = RowRequest(self.fetcher, self._ids[:count], self._read[:count])
        return self._requests[count]
