"""Decode MoE (at most 16 tokens) over merged 2-bit rows: CUDA where NVRTC is there, else Triton.

Both take the rows through the int64 table of absolute addresses, so a row may lie in device or in
pinned host memory and may move between two replays of a captured graph. Both are deterministic and
independent of the batch: a token's bits do not depend on the tokens beside it (within one backend).
Reference: q38.kernels.reference.moe.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

import torch

from q38.base.errors import InputError, ResourceError
from q38.kernels import nvrtc
from q38.kernels.rows import RowLayout

MAX_TOKENS = 16
SOURCE = Path(__file__).with_name("moe_decode.cu")
STAGE13, STAGE2 = 2176, 1088  # bytes of one group of one warp, words and scales, as in the source
COLUMNS = 32  # output columns of one warp
SMALLEST_SHARED = 96 * 1024  # dynamic shared memory that a block can have on any card since Ampere
Backend = Literal["auto", "cuda", "triton"]


@dataclass(frozen=True)
class DecodeConfig:
    """Launch geometry of the CUDA kernels, for one token count.

    tiles13, tiles2: tiles of 32 columns that one block of gate_up and of down works through; a
        larger number packs the activations less often and leaves fewer blocks.
    ctas13, ctas2: blocks per multiprocessor that the register budget must allow.
    depth13, depth2: groups that each warp has on their way in shared memory.
    batch: tokens of one expert that a block of gate_up takes at a time, at most 4.
    registers: bring words through registers instead of asynchronous copies (tiles13 = tiles2 = 1,
        depth13 = 2, depth2 = all groups): the better way for rows in host memory.
    dependent: programmatic dependent launch (compute capability 9.0 and later).
    """

    tiles13: int = 1
    tiles2: int = 1
    ctas13: int = 2
    ctas2: int = 2
    depth13: int = 2
    depth2: int = 5
    batch: int = 2
    registers: bool = False
    dependent: bool = True


def default_config(layout: RowLayout, tokens: int, *, host_rows: bool = False) -> DecodeConfig:
    """A geometry that suits any card: more tiles a block as more tokens make more blocks.

    With host_rows the link is what a layer waits for, whatever the token count: registers feed it best, and as many
    tokens as fit share one reading of a row.
    """
    groups = max(1, layout.intermediate // 128)
    if host_rows:
        config = DecodeConfig(depth2=groups, batch=1, registers=True)
        fits = [n for n in range(1, min(tokens, 4) + 1) if _shared13(layout, config, n) <= SMALLEST_SHARED]
        return replace(config, batch=max(fits, default=1))
    wanted = 1 if tokens <= 2 else 2 if tokens <= 8 else 5
    return DecodeConfig(
        tiles13=_divisor(layout.intermediate // COLUMNS, wanted),
        tiles2=_divisor(layout.hidden // COLUMNS, wanted),
        depth2=min(5, groups),
        batch=1 if tokens == 1 else 2,
    )


def _divisor(n: int, limit: int) -> int:
    return max((d for d in range(1, limit + 1) if n % d == 0), default=1)


class MoeDecode:
    """The two launches of one layer shape; buffers are made once, so calls can be captured.

    A token count's kernels are compiled at its first call: call once before capturing a graph.

    Args:
        layout: the row layout; 2-bit.
        top_k: experts per token.
        dtype: float16 or bfloat16, of activations and result.
        scale_dtype: float16 or bfloat16, of the scales in the rows.
        configs: launch geometry of the CUDA backend by token count; a count that is not there takes the
            nearest one. Absent: default_config.
        host_rows: some rows are in host memory; chooses the default geometry, not what can be read.
        backend: "auto" takes CUDA where it can run this shape.
        device: where activations live.

    Raises:
        InputError: a shape or dtype that no backend takes.
        ResourceError: the requested backend cannot run here.
    """

    def __init__(
        self,
        layout: RowLayout,
        top_k: int,
        *,
        dtype: torch.dtype = torch.bfloat16,
        scale_dtype: torch.dtype = torch.float16,
        configs: Mapping[int, DecodeConfig] | None = None,
        host_rows: bool = False,
        backend: Backend = "auto",
        device: torch.device | str = "cuda",
    ) -> None:
        if layout.bits != 2:
            raise InputError(
                f"experts packed at {layout.bits} bits", where="decode kernel", remedy="use 2-bit experts"
            )
        for name, value in (("activations", dtype), ("scales", scale_dtype)):
            if value not in (torch.float16, torch.bfloat16):
                raise InputError(
                    f"{name} of {value}", where="decode kernel", remedy="use float16 or bfloat16"
                )
        self.layout, self.top_k, self.dtype, self.scale_dtype = layout, top_k, dtype, scale_dtype
        self.device = torch.device(device)
        self.configs, self.host_rows = dict(configs or {}), host_rows
        self.backend = self._choose(backend)
        self.hidden_state = torch.empty(
            MAX_TOKENS * top_k, layout.intermediate, dtype=torch.float32, device=self.device
        )
        self._launches: dict[int, DecodeLaunch] = {}
        if self.backend == "triton":
            self.partial = torch.empty(
                MAX_TOKENS * top_k, layout.hidden, dtype=torch.float32, device=self.device
            )

    def __call__(
        self,
        x: torch.Tensor,
        table: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """One layer.

        Args:
            x: [M, hidden], M at most 16, contiguous.
            table: int64 [experts], row addresses, multiples of 16.
            ids: int32 [M, top_k]; a negative id is skipped.
            weights: float32 [M, top_k].
            out: where to write, [M, hidden]; made if absent.

        Returns:
            [M, hidden] of x's dtype.

        Raises:
            InputError: a shape or dtype differs from the above.
        """
        m = x.shape[0]
        expected = (
            ("x", x, (m, self.layout.hidden), self.dtype),
            ("table", table, (table.numel(),), torch.int64),
            ("ids", ids, (m, self.top_k), torch.int32),
            ("weights", weights, (m, self.top_k), torch.float32),
        )
        for name, tensor, shape, dtype in expected:
            if tuple(tensor.shape) != shape or tensor.dtype != dtype or not tensor.is_contiguous():
                raise InputError(
                    f"{name} is {tensor.dtype} {list(tensor.shape)}, not contiguous {dtype} {list(shape)}",
                    where="decode kernel",
                    remedy="pass it as documented",
                )
        if not 1 <= m <= MAX_TOKENS:
            raise InputError(
                f"{m} tokens", where="decode kernel", remedy=f"use the prefill kernel above {MAX_TOKENS}"
            )
        if out is None:
            out = torch.empty_like(x)
        if self.backend == "cuda":
            launch = self.launch_for(m)
            launch.gate_up(x, table, ids, self.hidden_state)
            launch.down(self.hidden_state, table, ids, weights, out)
        else:
            from q38.kernels.moe_decode_triton import launch as launch_triton

            launch_triton(self, x, table, ids, weights, out)
        return out

    def launch_for(self, tokens: int) -> DecodeLaunch:
        """The compiled pair for a token count."""
        if tokens not in self._launches:
            nearest = min(self.configs, key=lambda t: (abs(math.log(t / tokens)), t), default=None)
            config = self._default(tokens) if nearest is None else self.configs[nearest]
            self._launches[tokens] = DecodeLaunch(
                self.layout, self.top_k, config, self.dtype, self.scale_dtype, self.device
            )
        return self._launches[tokens]

    def _default(self, tokens: int) -> DecodeConfig:
        return default_config(self.layout, tokens, host_rows=self.host_rows)

    def _choose(self, backend: Backend) -> str:
        if backend == "triton":
            return "triton"
        configs = list(self.configs.values()) or [self._default(t) for t in (1, 4, MAX_TOKENS)]
        missing = next((m for c in configs if (m := unsupported(self.layout, self.top_k, c))), None)
        if missing is None and self.device.type != "cuda":
            missing = "no CUDA device"
        missing = missing or nvrtc.available()
        if missing is None:
            return "cuda"
        if backend == "cuda":
            raise ResourceError(missing, where="decode kernel", remedy="use the Triton backend")
        return "triton"


class DecodeLaunch:
    """Both CUDA kernels, compiled for one geometry."""

    def __init__(
        self,
        layout: RowLayout,
        top_k: int,
        config: DecodeConfig,
        dtype: torch.dtype,
        scale_dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.layout, self.top_k, self.config, self.device = layout, top_k, config, device
        self._gate_up, self._down = nvrtc.load_kernels(
            SOURCE, defines(layout, top_k, config, dtype, scale_dtype), ("gate_up", "down")
        )
        self._warps = _warps13(layout)
        self._shared2 = top_k * config.depth2 * STAGE2
        self._gate_up.allow_shared(_shared13(layout, config, config.batch))
        self._down.allow_shared(self._shared2)
        self._dependent = config.dependent and nvrtc.takes_dependent(device)

    @property
    def registers(self) -> tuple[int, int]:
        """Registers a thread of gate_up and of down."""
        return self._gate_up.registers, self._down.registers

    def gate_up(
        self, x: torch.Tensor, table: torch.Tensor, ids: torch.Tensor, hidden_state: torch.Tensor
    ) -> None:
        """First launch: hidden_state[slot] = silu(gate) * up, fp32 [slots, intermediate]."""
        slots, room = ids.numel(), min(x.shape[0], self.config.batch)
        self._gate_up.launch(
            (self.layout.intermediate // COLUMNS // self.config.tiles13, slots),
            32 * self._warps,
            (x, table, ids, hidden_state, slots, room),
            stream=torch.cuda.current_stream(self.device).cuda_stream,
            shared_bytes=_shared13(self.layout, self.config, room),
            dependent=self._dependent,
        )

    def down(
        self,
        hidden_state: torch.Tensor,
        table: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """Second launch: out = the weighted sum over the experts of each token."""
        self._down.launch(
            (ids.shape[0], self.layout.hidden // COLUMNS // self.config.tiles2),
            32 * self.top_k,
            (hidden_state, table, ids, weights, out),
            stream=torch.cuda.current_stream(self.device).cuda_stream,
            shared_bytes=self._shared2,
            dependent=self._dependent,
        )


def _warps13(layout: RowLayout) -> int:
    return -(-layout.hidden // 256)


def _shared13(layout: RowLayout, config: DecodeConfig, tokens: int) -> int:
    """Dynamic shared memory of gate_up: word stages, packed activations and two sets of partial sums."""
    packed = (layout.hidden // 16 * 8 + 4) * 4
    warps = _warps13(layout)
    return warps * config.depth13 * STAGE13 + tokens * (packed + 2 * warps * 2 * COLUMNS * 4)


def defines(
    layout: RowLayout, top_k: int, config: DecodeConfig, dtype: torch.dtype, scale_dtype: torch.dtype
) -> dict[str, int]:
    """The source's compile-time constants."""
    return {
        "HIDDEN": layout.hidden,
        "INTER": layout.intermediate,
        "TOP_K": top_k,
        "TILES13": config.tiles13,
        "TILES2": config.tiles2,
        "DEPTH13": config.depth13,
        "DEPTH2": config.depth2,
        "REGISTERS": int(config.registers),
        "MIN_CTAS13": config.ctas13,
        "MIN_CTAS2": config.ctas2,
        "SCALE_BF16": int(scale_dtype == torch.bfloat16),
        "ACT_BF16": int(dtype == torch.bfloat16),
        "W2_OFFSET": layout.w2_offset,
        "S13_OFFSET": layout.w13_scale_offset,
        "S2_OFFSET": layout.w2_scale_offset,
    }


def unsupported(layout: RowLayout, top_k: int, config: DecodeConfig) -> str | None:
    """Why the CUDA kernels cannot take a shape, or None."""
    if layout.group != 128:
        return f"groups of {layout.group}, not 128"
    if layout.intermediate > 1024 or layout.hidden > 8192 or top_k > 16:
        return "an expert wider than 1024, a model wider than 8192, or more than 16 experts a token"
    if layout.intermediate % (COLUMNS * config.tiles13) or layout.hidden % (COLUMNS * config.tiles2):
        return f"{asdict(config)} does not divide the columns"
    plain = (config.tiles13, config.tiles2, config.depth13, config.depth2) == (
        1,
        1,
        2,
        layout.intermediate // 128,
    )
    if config.registers and not plain:
        return "loads through registers with several tiles a block"
    if not 1 <= config.batch <= 4 or config.depth13 < 1 or config.depth2 < 1:
        return f"{asdict(config)} is out of range"
    return None
