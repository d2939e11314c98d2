"""The address table on the device."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from q38.residency.driver import OutOfMemory
from q38.residency.pool import HostLimits, HostPool
from q38.residency.table import AddressTable
from tests.residency.fake_driver import FakeDriver


def make_table(driver: FakeDriver) -> AddressTable:
    pool = HostPool(driver, 8, 1, scratch=2 * 3 * 8, limits=HostLimits(2**40, None), threads=1)
    return AddressTable(driver, pool, 2, 3)


def test_a_rewrite_reaches_the_device_in_stream_order_and_only_its_rows_change() -> None:
    driver = FakeDriver()
    table = make_table(driver)
    table.rewrite(np.arange(6), np.arange(100, 106), 0)
    table_tensor = table.tensor()
    assert not table_tensor.any(), "the stream has not got there"
    driver.advance(0)
    table.rewrite(np.array([4, 1]), np.array([7, 8]), 0)
    driver.advance(0)
    assert table_tensor.dtype == torch.int64
    assert table_tensor.tolist() == [[100, 8, 102], [103, 7, 105]]
    assert table.current.tolist() == table_tensor.flatten().tolist()


def test_the_tensor_is_the_table_and_its_address_never_changes() -> None:
    driver = FakeDriver()
    table = make_table(driver)
    first = table.tensor().data_ptr()
    table.rewrite(np.arange(6), np.arange(6), 0)
    driver.advance(0)
    assert table.tensor().data_ptr() == first == table.address


def test_a_failed_upload_changes_neither_this_nor_the_next() -> None:
    driver = FakeDriver()
    table = make_table(driver)
    table.rewrite(np.arange(6), np.arange(6), 0)
    driver.advance(0)
    driver.fail_at = 0
    with pytest.raises(OutOfMemory):
        table.rewrite(np.array([0]), np.array([99]), 0)
    table.rewrite(np.array([1]), np.array([50]), 0)
    driver.advance(0)
    assert table.tensor().tolist() == [[0, 50, 2], [3, 4, 5]]


def test_closing_frees_the_table() -> None:
    driver = FakeDriver()
    table = make_table(driver)
    table.close()
    assert not driver.allocations
