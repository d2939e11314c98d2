"""What the extension refuses inside SGLang's processes: each by name, with its reason."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
import torch

from q38.base.errors import CheckFailed, InputError, ResourceError
from q38.sglang_ext import activate, manifest, source
from q38.sglang_ext.hooks import Hook

if TYPE_CHECKING:
    from tests.sglang_ext.conftest import Child

EXPERTS = """
import torch
from types import SimpleNamespace
from q38.sglang_ext.experts import RowExpertsMethod
layer = torch.nn.Module()
layer.moe_tp_size, layer.moe_ep_size, layer.num_fused_shared_experts, layer.layer_id, layer.top_k = 1, 1, 0, 0, 4
method = RowExpertsMethod(2, 128, "model.layers.1.mlp.experts")
def create(dtype=torch.bfloat16): method.create_weights(layer, 16, 256, 64, dtype)
def runner(name): method.create_moe_runner(layer, SimpleNamespace(activation=name, routed_scaling_factor=None))
"""


@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("layer.moe_tp_size = 2; create()", "live on one device.*--tp 1"),
        ("layer.moe_ep_size = 2; create()", "live on one device"),
        ("layer.num_fused_shared_experts = 1; create()", "fused into the routed ones"),
        ("create(torch.float32)", "activations of torch.float32.*--dtype bfloat16"),
        ("runner('gelu')", "experts with gelu"),
    ],
)
def test_experts_that_rows_cannot_hold(sglang_child: Child, code: str, told: str) -> None:
    with pytest.raises(RuntimeError, match=rf"InputError: model.layers.1.mlp.experts: .*{told}"):
        sglang_child.run(EXPERTS + code)


@pytest.mark.parametrize(
    ("module", "made", "told"),
    [
        ("int8_linear.Int8LinearMethod", "4, 128, True, 'x'", "packed at 4 bits, the kernels take 8"),
        ("int8_linear.Int8LinearMethod", "8, 128, False, 'x'", "zero points"),
        ("unpacked_linear.UnpackedLinearMethod", "8, 128, False, 'x'", "zero points"),
    ],
)
def test_projections_that_the_kernels_cannot_read(
    sglang_child: Child, module: str, made: str, told: str
) -> None:
    file, name = module.split(".")
    with pytest.raises(RuntimeError, match=f"InputError: x: .*{told}"):
        sglang_child.run(f"from q38.sglang_ext.{file} import {name}\n{name}({made})")


STEP = """
import torch
from types import SimpleNamespace
from q38.sglang_ext.ngram import read_rows
class Mode:
    def __init__(self, kind): self.kind = kind
    def __getattr__(self, name): return lambda: name == "is_" + self.kind or (self.kind in ("mixed", "target_verify") and name == "is_extend")
    def __str__(self): return self.kind
def step(kind, stream=None, tokens=1):
    rows = SimpleNamespace(stream=stream, context=2)
    runner = SimpleNamespace(model=SimpleNamespace(_q38_table_rows=[rows]))
    request = SimpleNamespace(output_ids=[5, 6, 7], origin_input_ids=[1, 2])
    batch = SimpleNamespace(forward_mode=Mode(kind), reqs=[request])
    read_rows(SimpleNamespace(input_ids=torch.zeros(tokens)), None, batch, runner)
"""


@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("step('target_verify')", "a step of kind target_verify.*without speculation"),
        ("step('split_prefill')", "a step of kind split_prefill"),
        ("step('mixed', stream=object())", "prompts and answers in one step"),
        ("step('decode', tokens=3)", "3 tokens in a step whose requests account for 1.*beam search"),
    ],
)
def test_steps_whose_rows_cannot_be_known(sglang_child: Child, code: str, told: str) -> None:
    with pytest.raises(RuntimeError, match=f"InputError: n-gram rows: {told}"):
        sglang_child.run(STEP + code)


def test_more_tokens_in_a_step_than_the_buffers_hold() -> None:
    from q38.sglang_ext.table_rows import DECODE_TOKENS, TableRows

    table = TableRows.__new__(TableRows)
    torch.nn.Module.__init__(table)
    table.decode = torch.zeros(DECODE_TOKENS, 1)
    with pytest.raises(InputError, match=f"{DECODE_TOKENS + 1} tokens decoded at once"):
        table._room(DECODE_TOKENS + 1, decode=True)


def test_more_tokens_in_an_overlapped_step_than_the_buffers_hold() -> None:
    from q38.sglang_ext.stream_rows import StreamRows

    rows = StreamRows.__new__(StreamRows)
    rows.tokens = 4
    with pytest.raises(InputError, match=r"5 tokens decoded at once.*--requests 4"):
        rows.start(torch.zeros(5, 16, dtype=torch.int64))


def test_a_server_that_did_not_load_the_plugin_does_not_start(sglang_child: Child) -> None:
    code = """
import q38.sglang_ext.hooks as h
from q38.sglang_ext.server import require_plugin
require_plugin()
kept, h.in_place = h.in_place, lambda hook: False
try: require_plugin()
finally: h.in_place = kept
"""
    with pytest.raises(RuntimeError, match=r"CheckFailed.*did not load q38's plugin.*SGLANG_PLUGINS"):
        sglang_child.run(code)


def test_an_sglang_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ResourceError, match="SGLang is not installed"):
        source.installed_tree()


def test_a_manifest_of_a_release_that_lacks_a_target(tree: Path) -> None:
    (tree / "sglang/srt/layers/quantization/auto_round.py").unlink()
    with pytest.raises(InputError, match=r"targets are missing, first sglang\.srt"):
        manifest.build(tree)


def test_a_hook_that_no_manifest_covers(monkeypatch: pytest.MonkeyPatch) -> None:
    stray = SimpleNamespace(hooks=lambda: [Hook("sglang.srt.somewhere.f", "around", print)])
    monkeypatch.setattr(activate.importlib, "import_module", lambda name: stray)
    with pytest.raises(CheckFailed, match=r"hooks without a hash in the manifest: sglang\.srt\.somewhere\.f"):
        activate.collect(["somewhere"])


def test_a_release_that_no_mechanism_fits(tree: Path) -> None:
    from q38.sglang_ext.check import check, refuse_unfit

    refuse_unfit(check(tree))
    (tree / "sglang/_version.py").write_text('__version__ = "0.1.0"\n')
    with pytest.raises(CheckFailed, match=r"mechanisms do not fit SGLang 0\.1\.0"):
        refuse_unfit(check(tree))


def test_a_file_without_the_place_of_an_edit(tree: Path) -> None:
    from q38.sglang_ext.patch_edits import EDITS, patched_text

    text = (tree / EDITS[0].file).read_text()
    assert EDITS[0].after in patched_text(EDITS[0].file, text)
    with pytest.raises(CheckFailed, match="0 places for the change"):
        patched_text(EDITS[0].file, text.replace(EDITS[0].before, ""))


@pytest.mark.parametrize(
    ("error", "told"),
    [("x\nq38: sglang: 1 of q38's targets.\n", "1 of q38's targets"), ("Segmentation fault\n", "Segmentation"), ("", "exit code 4")],
)  # fmt: skip
def test_a_child_in_which_the_extension_does_not_load(error: str, told: str) -> None:
    from q38.sglang_ext.verify import read_answer

    with pytest.raises(CheckFailed, match=f"the extension does not load .*{told}"):
        read_answer(4, "", error)


def test_a_norm_that_has_no_reference_on_the_cpu(sglang_child: Child) -> None:
    with pytest.raises(RuntimeError, match="ValueError: only RMS norm of whole rows"):
        sglang_child.run(
            "import torch\nfrom q38.sglang_ext.cpu.references import gated_norm\n"
            "gated_norm(None, torch.zeros(1, 4), torch.ones(4), None, group_size=2, is_rms_norm=True)"
        )
