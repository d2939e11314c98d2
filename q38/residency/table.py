"""The address table: one int64 per expert and layer, read by kernels and by captured graphs.

The table is allocated once; a move rewrites its content. It is uploaded on the stream that the
kernels run on, so no kernel ever sees it half written, and kernels enqueued earlier see the old one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from q38.residency.driver import Addresses, CudaError, Driver
from q38.residency.pool import HostPool, Index

if TYPE_CHECKING:
    import torch

ENTRY = 8  # bytes


class AddressTable:
    """int64 [layers, experts] of absolute row addresses in device memory.

    Args:
        pool: lends the pinned memory that uploads start from.
    """

    def __init__(self, driver: Driver, pool: HostPool, layers: int, experts: int) -> None:
        self._driver = driver
        self.layers, self.experts = layers, experts
        self.nbytes = layers * experts * ENTRY
        self.current: Addresses = np.zeros(
            layers * experts, np.int64
        )  # what the device has, or will once the stream gets there
        staging, self._staging_address = pool.take_scratch(self.nbytes)
        self._staging: Addresses = staging.view(np.int64)
        self.address = driver.allocate(self.nbytes)

    def rewrite(self, rows: Index, addresses: Addresses, stream: int) -> None:
        """Point `rows` (layer * experts + expert) at `addresses`, in stream order.

        The previous upload must have finished: uploads share one staging buffer.

        Raises:
            CudaError: nothing was enqueued; the table is unchanged.
        """
        self._staging[rows] = addresses
        try:
            self._driver.copy(
                np.array([self.address]), np.array([self._staging_address]), self.nbytes, stream
            )
        except CudaError:
            self._staging[:] = self.current
            raise
        self.current[rows] = addresses

    def tensor(self) -> torch.Tensor:
        """int64 [layers, experts]: the device's table itself. Row l is what layer l's kernels take."""
        import torch

        return (
            self._driver.tensor(self.address, self.nbytes).view(torch.int64).view(self.layers, self.experts)
        )

    def close(self) -> None:
        """Free the device's table. No kernel may still use it."""
        self._driver.deallocate(self.address)
