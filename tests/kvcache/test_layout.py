"""What a token takes in each format: the published figures, from the config of the release."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from q38.base.errors import InputError
from q38.data import data_path
from q38.kvcache.addressing import Paging, chunks_of
from q38.kvcache.layout import ROWS, TIERED, KvLayout
from q38.model.kv import kv_bytes_per_token
from q38.model.shape import ModelShape

REAL = ModelShape.from_config(
    json.loads(data_path("assets", "models", "qwen3.8-flash-next.json").read_text())
)
INDEX = 12 * 128 * 2 / 4  # indexer keys, the same in every format


@pytest.mark.parametrize(
    ("name", "slot", "token"),
    [("fp8", 12_288, 12_288), ("int8", 12_672, 12_672), ("int4", 6_912, 6_912), (TIERED, 6_912, 7_308)],
)
def test_a_token_takes_what_was_published(name: str, slot: int, token: int) -> None:
    layout = KvLayout.of(REAL, name)
    assert layout.bytes_per_slot == slot
    assert layout.bytes_per_token(262_144) == token


def test_the_ring_and_its_owners_take_104_megabytes() -> None:
    layout = KvLayout.of(REAL, TIERED)
    assert layout.ring_bytes == 12_672 * 8_192
    assert layout.owner_bytes == 12 * 8_192 * 4


@given(name=st.sampled_from(list(ROWS)), context=st.integers(8_192, 300_000))
def test_the_pool_takes_what_the_plan_counts(name: str, context: int) -> None:
    planned = kv_bytes_per_token(REAL, name, context=context)
    assert KvLayout.of(REAL, name).bytes_per_token(context) == pytest.approx(planned - INDEX)


def test_every_layer_has_keys_and_values_with_a_payload_and_scales() -> None:
    parts = KvLayout.of(REAL, "int4").parts()
    assert len(parts) == len(set(parts)) == 12 * 2 * 2
    assert {(p.what, p.row_bytes) for p in parts} == {("payload", 256), ("scales", 32)}
    assert all(p.what == "payload" for p in KvLayout.of(REAL, "fp8").parts())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("int5", 1, 1, 64), "Known: fp8, int8"),
        (("int8", 1, 1, 96), "groups of 64"),
        ((TIERED, 1, 1, 32, 8), "groups of 64"),
        ((TIERED, 1, 1, 64), "ring of 0"),
        (("int4", 1, 1, 64, 8), "ring of 8"),
    ],
)
def test_a_layout_that_cannot_be_is_refused(arguments: tuple[str, int, int, int], said: str) -> None:
    with pytest.raises(InputError, match=said):
        KvLayout(*arguments)


@given(pages=st.integers(1, 300), size=st.integers(1, 80))
def test_every_slot_is_on_one_page(pages: int, size: int) -> None:
    paging = Paging(pages * size, size)
    assert paging.slots == (pages + 1) * size
    for page in (0, 1, pages):
        assert {paging.page_of(slot) for slot in paging.slots_of(page)} == {page}
    assert paging.pages_for(1) == 1
    assert paging.pages_for(size) == 1
    assert paging.pages_for(size + 1) == 2


@pytest.mark.parametrize(("tokens", "size"), [(0, 1), (65, 64), (64, 0), (-64, 64)])
def test_tokens_are_whole_pages(tokens: int, size: int) -> None:
    with pytest.raises(ValueError, match="pages of"):
        Paging(tokens, size)


@given(page=st.integers(0, 500), page_bytes=st.integers(1, 5000), chunk=st.integers(1, 5000))
def test_the_chunks_of_a_page_cover_its_bytes_and_no_chunk_besides(
    page: int, page_bytes: int, chunk: int
) -> None:
    first, end = page * page_bytes, (page + 1) * page_bytes
    touched = chunks_of(page, page_bytes, chunk)
    assert touched.start * chunk <= first < (touched.start + 1) * chunk
    assert (touched.stop - 1) * chunk < end <= touched.stop * chunk
