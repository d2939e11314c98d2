"""SGLang's own pool, allocator and gather sites over q38's formats: written rounded, read only where it is undone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.sglang_ext.conftest import Child

FORMATS = ("fp8", "int8", "int8ring_int4", "int4")
EVERY = pytest.mark.parametrize("name", FORMATS)


@pytest.fixture(scope="module")
def child(sglang_child: Child) -> Child:
    sglang_child.run("import kv_checks\nresult = None")
    return sglang_child


def ask(child: Child, call: str) -> Any:
    return child.run(f"result = kv_checks.{call}")


def test_the_formats_order_by_their_error_in_the_attention(child: Child) -> None:
    error = {name: ask(child, f"attention_error({name!r})") for name in (None, *FORMATS)}
    assert error[None] == 0.0
    assert 0 < error["int8"] < error["int8ring_int4"] < error["int4"] < 0.2
    assert error["int8"] < error["fp8"] < error["int4"]


@EVERY
def test_prefixes_are_packed_as_sglangs_kernel_packs_plain_rows(child: Child, name: str) -> None:
    assert ask(child, f"packs_as_sglang({name!r})")


@EVERY
@pytest.mark.parametrize("strided", [False, True])
def test_selected_rows_are_compacted_as_sglangs_kernel_does(child: Child, name: str, strided: bool) -> None:
    assert ask(child, f"compacts_as_sglang({name!r}, strided={strided})")


@EVERY
def test_every_other_reader_is_refused_with_the_reason(child: Child, name: str) -> None:
    said = ask(child, f"refusals({name!r})")
    assert len(said) == 9
    for line in said:
        assert "InputError" in line, line
        assert "does not undo the rounding" in line or "scales of the checkpoint" in line, line


@pytest.mark.parametrize(
    ("changed", "option"),
    [
        ("enable_hierarchical_cache=True", "--enable-hierarchical-cache"),
        ("disaggregation_mode='prefill'", "--disaggregation-mode"),
        ("enable_memory_saver=True", "--enable-memory-saver"),
        ("speculative_algorithm='NGRAM'", "--speculative-algorithm"),
        ("tp_size=2", "--tp"),
    ],
)
def test_options_that_read_or_move_the_cache_by_themselves_are_refused(
    child: Child, changed: str, option: str
) -> None:
    assert ask(child, "conflict()") == "accepted"
    told = ask(child, f"conflict({changed})")
    assert told.startswith(option) and "contradicts --kv int4" in told


def test_sglang_counts_the_bytes_of_the_format_and_sees_the_shape_of_the_rows(child: Child) -> None:
    slots, layers, values = 256 + 64, 2, 2 * 2 * 64
    bits = {None: 16, "fp8": 8, "int8": 8 + 16 / 64, "int4": 4 + 16 / 32, "int8ring_int4": 4 + 16 / 32}
    for name, per_value in bits.items():
        nbytes, *shape = ask(child, f"sizes({name!r})")
        assert nbytes == slots * layers * values * per_value / 8, name
        assert shape == [slots, 2, 64]


@EVERY
def test_memory_follows_the_pages_that_the_allocator_hands_out(child: Child, name: str) -> None:
    life = ask(child, f"lazy_life({name!r})")
    floor, one, two, idle = life["committed"]
    assert floor < one
    assert idle == floor <= two
    assert life["held"] == [0, 1, 2, 3, 4]
    assert life["kept"]
    assert life["free"] == 256


def test_a_prompt_that_memory_can_never_hold_is_refused_with_400_and_what_would_fit(child: Child) -> None:
    (what, who, reason), reached = ask(child, "prefill(1, waiting=200)")
    assert (what, who, reached) == ("abort", "waiting", False)
    assert reason["status_code"] == 400
    assert "200 tokens of KV cache do not fit" in reason["message"]
    assert "tokens would fit" in reason["message"]


def test_a_prompt_that_fits_goes_on_to_sglang(child: Child) -> None:
    assert ask(child, "prefill(8, waiting=200)") == [True]


def test_pages_of_a_request_that_just_ended_count_for_the_next(child: Child) -> None:
    assert ask(child, "prefill(3, waiting=190, first=3, freed=True)") == [True]
    (what, _, reason), reached = ask(child, "prefill(3, waiting=200, first=3, freed=True)")
    assert (what, reached, reason["status_code"]) == ("abort", False, 400)
    assert "; 192 tokens would fit" in reason["message"]


def test_a_prompt_waits_while_others_run(child: Child) -> None:
    assert ask(child, "prefill(1, waiting=200, others=1)") == [False]


def test_nothing_is_done_for_a_request_that_sglang_would_not_admit(child: Child) -> None:
    """No memory, no evicted prefix: as many run as may."""
    full = "prefill(1, waiting=200, others=1, full=True, first=1, evictable=64)"
    assert ask(child, full) == [True]
    assert ask(child, full.replace("full=True", "full=False"))[0] == ["evict", 64]


def test_a_request_that_waits_is_looked_at_again_when_something_has_changed(child: Child) -> None:
    assert ask(child, "waits(5)") == [1, 1]


def test_only_the_request_that_does_not_fit_is_ended(child: Child) -> None:
    left, told = ask(child, "ends_one()")
    assert left == ["job-10", "other", "job-11"]
    assert told == [["abort", "job-1"]]


def test_a_request_whose_grammar_becomes_ready_is_looked_at_like_any_other(child: Child) -> None:
    assert ask(child, "ready(8)") == [[[0, 1]], [], 1]
    assert ask(child, "ready(1)") == [[], [["abort", "json"]], 1]


def test_in_mid_prefill_memory_that_is_gone_ends_that_request_with_503(child: Child) -> None:
    (what, who, reason), reached = ask(child, "prefill(1, chunked=True)")
    assert (what, who, reached) == ("abort", "chunked", False)
    assert reason["status_code"] == 503
    assert reason["message"].endswith("after 128 of 200 tokens of the prompt; 128 would fit")


def test_finished_prefixes_make_room_before_anything_is_refused(child: Child) -> None:
    told = ask(child, "prefill(3, waiting=100, first=3, evictable=192)")
    assert told == [["evict", 128], True]


def test_memory_goes_only_when_no_step_is_under_way_and_the_device_is_done(child: Child) -> None:
    assert ask(child, "idle(fully=True)") == ["wait for the device", "unmap", "sglang"]
    assert ask(child, "idle(fully=False)") == ["sglang"]


def test_decode_is_told_when_memory_is_gone(child: Child) -> None:
    assert ask(child, "decode(4, 64)") is True
    assert ask(child, "decode(0, 64)") is False
    assert ask(child, "decode(1, 64, prefix=1)") is True  # the prefix's page
    assert ask(child, "decode(0, 0)") is True
