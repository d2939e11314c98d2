"""Count on the device which experts are chosen, without waiting for it; the launches may be captured in a graph."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from q38.kernels import nvrtc

SOURCE = Path(__file__).with_name("count_experts.cu")
_LARGEST = 12_288  # experts whose counts fit in 48 KiB of shared memory


class ExpertCounter:
    """Counts since start, wrapping around at 2^32.

    Args:
        device: where the ids are. Without NVRTC, or with more experts than fit, torch counts.

    Attributes:
        counts: int32 [2, layers, experts]: selections, and steps in which the expert was selected at all (its row is
            read once then, however many tokens chose it).
    """

    def __init__(self, layers: int, experts: int, device: torch.device | str) -> None:
        self.counts = torch.zeros(2, layers, experts, dtype=torch.int32, device=device)
        self._fused = self.counts.device.type == "cuda" and experts <= _LARGEST and nvrtc.available() is None

    def add(self, layer: int, ids: torch.Tensor) -> None:
        """Count one step of one layer. ids: int32, contiguous, any shape; negative ones are skipped."""
        selections, reads = self.counts[0, layer], self.counts[1, layer]
        if not self._fused:
            chosen = torch.zeros_like(selections).index_add_(
                0, ids.reshape(-1).clamp(min=0), (ids.reshape(-1) >= 0).to(torch.int32)
            )
            selections += chosen
            reads += (chosen > 0).to(torch.int32)
            return
        constants = {"EXPERTS": self.counts.shape[2], "ACT_BF16": 0, "SCALE_BF16": 0}
        (count,) = nvrtc.load_kernels(SOURCE, constants, ("count_experts",))
        threads = 256 if ids.numel() <= 256 else 1024
        arguments = (ids, ids.numel(), selections, reads)
        count.launch((1, 1), threads, arguments, **nvrtc.in_order(ids.device))

    def read(self) -> NDArray[np.uint32]:
        """uint32 [2, layers, experts] on the host. Waits for the device."""
        if self.counts.device.type == "cuda":
            torch.cuda.synchronize(self.counts.device)
        return self.counts.cpu().numpy().view(np.uint32)
