"""SGLang's sparse backend with q38's attention in it: whose way a step goes, and the result against SGLang's reference."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.sglang_ext.conftest import Child

FORMATS = (None, "fp8", "int8", "int8ring_int4", "int4")  # None: SGLang's own bf16 buffers
EVERY = pytest.mark.parametrize("name", FORMATS)


@pytest.fixture(scope="module")
def child(sglang_child: Child) -> Child:
    sglang_child.run("import kv_attention_checks\nresult = None")
    return sglang_child


def ask(child: Child, call: str) -> Any:
    return child.run(f"result = kv_attention_checks.{call}")


@EVERY
@pytest.mark.parametrize("in_graph", [False, True])
def test_rows_are_attended_as_sglangs_reference_does(child: Child, name: str | None, in_graph: bool) -> None:
    # The reference reads bf16 values, the kernels those of the queries' fp32.
    assert 0 < ask(child, f"difference({name!r}, in_graph={in_graph})") < 5e-3


@EVERY
def test_a_step_on_a_gpu_does_not_reach_sglangs_gather(child: Child, name: str | None) -> None:
    assert ask(child, f"goes_to_sglang({name!r})") is False


@pytest.mark.parametrize(
    "call",
    [
        "goes_to_sglang('int8', gpu=False)",
        "goes_to_sglang('int8', rows=4)",  # rows that the indexer did not see
        "goes_to_sglang('int8', heads=5)",
        "goes_to_sglang(None, heads=5)",
    ],
)
def test_everything_else_goes_sglangs_way_with_its_arguments(child: Child, call: str) -> None:
    assert ask(child, call) is True


@EVERY
def test_a_step_on_the_cpu_keeps_sglangs_bits(child: Child, name: str | None) -> None:
    assert ask(child, f"cpu_is_left_alone({name!r})")


def test_indices_of_blocks_are_expanded_first(child: Child) -> None:
    assert ask(child, "blocks_are_expanded()")


@pytest.mark.parametrize("name", [None, "int8"])
def test_the_fused_write_of_newer_gpus_is_left_out(child: Child, name: str | None) -> None:
    assert ask(child, f"is_fused({name!r})") is False


@pytest.mark.parametrize(
    "call", ["is_fused(None, gpu=False)", "is_fused(None, heads=5)", "is_fused(None, rows=4)"]
)
def test_what_the_kernels_do_not_take_may_be_fused(child: Child, call: str) -> None:
    assert ask(child, call) is True
