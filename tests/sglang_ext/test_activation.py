"""Activation in a process that has imported SGLang: every hook verified, or a refusal that names it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from q38.base.settings import child_env
from q38.sglang_ext.targets import AUTOROUND, MECHANISMS

if TYPE_CHECKING:
    from tests.sglang_ext.conftest import Child

SETUP = "from q38.sglang_ext.hooks import Hook, apply, in_place\n"


def test_every_hooked_target_is_in_place(sglang_child: Child) -> None:
    code = SETUP + "result = [h.target for h in hooks if in_place(h)]"
    assert sorted(sglang_child.run(code)) == sorted(t for m in MECHANISMS for t in m.hooked)


def test_activating_again_wraps_nothing_twice(sglang_child: Child) -> None:
    code = (
        "from sglang.srt.layers.quantization.auto_round import AutoRoundConfig as A\n"
        "before = A.get_quant_method\nactivate(engine=True)\nresult = A.get_quant_method is before"
    )
    assert sglang_child.run(code) is True


@pytest.mark.parametrize(
    "target",
    [
        AUTOROUND + ".gone",
        "sglang.srt.gone.f",
        "sglang.srt.server_args.ServerArgs.GONE",
    ],
)
@pytest.mark.parametrize("kind", ["around", "set"])
def test_a_hook_without_its_target_is_refused_by_name(sglang_child: Child, target: str, kind: str) -> None:
    with pytest.raises(RuntimeError, match=rf"CheckFailed.*{target}"):
        sglang_child.run(SETUP + f"apply([Hook({target!r}, {kind!r}, print)])")


def test_a_hook_that_is_overwritten_later_is_not_in_place(sglang_child: Child) -> None:
    code = SETUP + (
        "import sglang.srt.layers.quantization.auto_round as m\n"
        "hook = next(h for h in hooks if h.target.endswith('get_quant_method'))\n"
        "kept, m.AutoRoundConfig.get_quant_method = m.AutoRoundConfig.get_quant_method, lambda self: None\n"
        "result = in_place(hook)\nm.AutoRoundConfig.get_quant_method = kept"
    )
    assert sglang_child.run(code) is False


def test_fused_names_resolve_with_the_hook_and_not_without(sglang_child: Child) -> None:
    code = """
from sglang.srt.layers.quantization.auto_round import AutoRoundConfig
import torch
layers = "model.language_model.layers"
name = f"{layers}.0.linear_attn.in_proj_"
config = {
    "bits": 2, "group_size": 128, "sym": True, "block_name_to_quantize": layers,
    "extra_config": {name + "a": {"bits": 16}, name + "b": {"bits": 16}},
    "packed_modules_mapping": {"in_proj_ba": ["in_proj_b", "in_proj_a"]},
}
hooked = AutoRoundConfig.from_config(config)
plain = AutoRoundConfig.from_config.__func__.__wrapped__(AutoRoundConfig, config)
result = [c.get_layer_config(torch.nn.Module(), name + "ba")[0] for c in (hooked, plain)]
"""
    assert sglang_child.run(code) == [16, 2]


def test_the_architecture_may_leave_its_vision_tower_out(sglang_child: Child) -> None:
    code = (
        "from sglang.srt.server_args import ServerArgs\n"
        "result = 'Qwen4ExpForConditionalGeneration' in ServerArgs.LANGUAGE_MODEL_ONLY_ARCHITECTURES"
    )
    assert sglang_child.run(code) is True


def test_breakable_graphs_take_the_logits_output(sglang_child: Child) -> None:
    code = """
import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.model_executor.runner_backend.breakable_cuda_graph_backend import BreakableCudaGraphBackend
class Runner:
    def cuda_graph_output_rows(self, output): return None
b = object.__new__(BreakableCudaGraphBackend)
b._cuda_graph_runner = Runner()
output = LogitsProcessorOutput(next_token_logits=torch.arange(6.).view(3, 2), hidden_states=torch.ones(2, 5))
full = b._alloc_full_buffer(output, 4)
rows = b._output_rows(output, 4)
b._copy_output_to_buffer(output, full, rows)
cut = b._slice_output(full, rows)
other = LogitsProcessorOutput(next_token_logits=torch.zeros(3, 2))
try:
    b._copy_output_to_buffer(other, full, rows)
    refused = False
except ValueError:
    refused = True
same = bool((cut.next_token_logits == output.next_token_logits[:2]).all())
tensor = b._slice_output(torch.ones(3), 2).shape[0]
result = [rows, list(full.next_token_logits.shape), list(cut.hidden_states.shape), same, refused, tensor]
"""
    assert sglang_child.run(code) == [2, [4, 2], [2, 5], True, True, 2]


def test_a_process_that_is_not_asked_to_stays_as_it_is(sglang_tree: Path) -> None:
    code = (
        "import sys; from q38.sglang_ext import install; install()\n"
        "print([m for m in sys.modules if m.startswith('sglang') or m == 'torch'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=child_env(drop=("Q38_SGLANG",))
    )
    assert done.stdout.strip() == "[]", done.stderr


def test_options_that_are_no_json_end_the_process_with_one_line(sglang_tree: Path) -> None:
    code = "from q38.sglang_ext.options import given; given()"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=child_env({"Q38_SGLANG": "{"})
    )
    assert "not options of the SGLang extension" in done.stderr


def test_a_changed_sglang_ends_the_process_that_loads_the_plugin(tree: Path) -> None:
    """SystemExit with one line: SGLang catches every Exception of a plugin and goes on."""
    file = tree / "sglang/srt/layers/quantization/auto_round.py"
    file.write_text(file.read_text().replace("def get_quant_method(", "def get_method("))
    code = (
        "import q38.sglang_ext.activate as a\n"
        f"a.installed_tree = lambda: __import__('pathlib').Path({str(tree)!r})\n"
        "from q38.sglang_ext import install\n"
        "try: install()\n"
        "except Exception: print('swallowed')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env=child_env({"Q38_SGLANG": '{"model":""}'}),
    )
    assert done.returncode == 1
    assert done.stderr.startswith("q38: ") and "get_quant_method is missing" in done.stderr
    assert "swallowed" not in done.stdout
