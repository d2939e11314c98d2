"""`--trained`: a model that learned something, with every part in use, and the same bytes twice."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from q38.checkpoint.fp8 import dequantize_blocks
from q38.checkpoint.index import Checkpoint
from q38.checkpoint.job import MANIFEST
from q38.checkpoint.packing import dequantize
from q38.hf.hooks import qsa_shortcut
from q38.model.text import load_texts, pack_tokens
from q38.quantize.rtn import round_to_nearest
from q38.synth import train
from q38.synth.tiny import synth_tiny

SHORT = "import sys; from pathlib import Path; from q38.synth import tiny, train; train.STEPS, train.EVALUATED = 3, 8; tiny.synth_tiny(Path(sys.argv[1]), trained=True)"


def digests(directory: Path) -> dict[str, str]:
    return {
        p.name: hashlib.sha256(p.read_bytes()).hexdigest()
        for p in sorted(directory.iterdir())
        if p.is_file() and p.name != MANIFEST
    }


def _shorten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train, "STEPS", 3)
    monkeypatch.setattr(train, "EVALUATED", 8)


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three steps of training, in a process of its own."""
    out = tmp_path_factory.mktemp("short") / "model"
    subprocess.run([sys.executable, "-c", SHORT, str(out)], check=True)
    return out


def test_training_gives_the_same_bytes_in_another_process(short: Path, tmp_path: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "1"}
    subprocess.run([sys.executable, "-c", SHORT, str(tmp_path / "again")], check=True, env=environment)
    assert digests(tmp_path / "again") == digests(short)


def test_only_the_text_model_and_mtp_change(short: Path, tiny_source: Path) -> None:
    before, after = Checkpoint.open(tiny_source), Checkpoint.open(short)
    assert {n: (i.dtype, i.shape) for n, i in after.tensors.items()} == {
        n: (i.dtype, i.shape) for n, i in before.tensors.items()
    }
    same = {n for n in before.tensors if before.read_bytes(n) == after.read_bytes(n)}
    stay = {n for n in before.tensors if n.startswith(("model.visual.", "mtp.fc_", "mtp.pre_fc_norm_"))}
    stay |= {n for n in before.tensors if before.info(n).dtype == "I64"}
    stay |= {n for n in before.tensors if ".indexer." in n and not n.startswith("mtp.")}
    assert stay <= same
    matrices = {n for n in before.tensors if len(before.info(n).shape) > 1}
    assert not (matrices - stay) & same  # a vector may need more than three steps to move in bfloat16


def test_mtp_starts_as_a_copy_of_the_last_attention_layer(short: Path) -> None:
    after, last = Checkpoint.open(short), "model.language_model.layers.3."
    copied = [n for n in after.tensors if n.startswith("mtp.layers.0.")]
    assert len(copied) == 24
    for name in copied:
        assert after.read_bytes(name) == after.read_bytes(name.replace("mtp.layers.0.", last))


def test_a_kill_after_the_training_costs_no_second_one_and_leaves_the_process_as_it_was(
    short: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    _shorten(monkeypatch)
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    with monkeypatch.context() as patch:
        patch.setattr("q38.synth.tiny._write_shards", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            synth_tiny(out, trained=True)
    # The training used threads and random numbers of its own.
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.get_rng_state(), state)
    assert not torch.are_deterministic_algorithms_enabled()
    monkeypatch.setattr(train, "train", lambda *_, **__: pytest.fail("trained a second time"))
    result = synth_tiny(out, trained=True)
    assert result["training"]["steps"] == 3
    assert digests(out) == digests(short)
    assert not (out / ".q38").exists()


def test_the_fp8_layout_holds_the_trained_weights(
    short: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _shorten(monkeypatch)
    synth_tiny(tmp_path / "fp8", fp8=True, trained=True)
    fp8, bf16 = Checkpoint.open(tmp_path / "fp8"), Checkpoint.open(short)
    assert fp8.read_bytes("lm_head.weight") == bf16.read_bytes("lm_head.weight")
    prefix = "model.language_model.layers.0.mlp.experts"
    weight = bf16.read(f"{prefix}.down_proj")[3].float()
    codes, scales = (fp8.read(f"{prefix}.3.down_proj.weight{s}") for s in ("", "_scale_inv"))
    assert (dequantize_blocks(codes, scales).float() - weight).norm() < 0.04 * weight.norm()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Most of the real training, which is enough to tell that it works."""
    out = tmp_path_factory.mktemp("trained") / "model"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "STEPS", train.STEPS * 4 // 5)
        synth_tiny(out, trained=True)
    return out


class Probe:
    """The trained model in float32 and its log-probabilities on held-out text."""

    def __init__(self, directory: Path) -> None:
        from transformers import AutoModelForImageTextToText, AutoTokenizer

        self.model = AutoModelForImageTextToText.from_pretrained(directory, dtype=torch.float32).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(directory)
        self.texts = load_texts("stdlib", "held_out").texts[::4]
        self.ids = pack_tokens(self.texts, self.tokenizer, length=128, count=16).ids
        self.layers = self.model.model.language_model.layers
        self.reference = self.log_probabilities()

    @torch.no_grad()
    def log_probabilities(self) -> torch.Tensor:
        with qsa_shortcut():
            return self.model(input_ids=self.ids).logits.log_softmax(-1)

    def divergence(self) -> float:
        """Mean KL divergence of the model as it is now from the untouched one, nats."""
        now = self.log_probabilities()
        return float((self.reference.exp() * (self.reference - now)).sum(-1).mean())

    def divergence_with(self, parameters: list[Any], change: Any) -> float:
        before = [p.data for p in parameters]
        try:
            for parameter in parameters:
                parameter.data = change(parameter.data)
            return self.divergence()
        finally:
            for parameter, data in zip(parameters, before, strict=True):
                parameter.data = data


@pytest.fixture(scope="module")
def probe(trained: Path) -> Probe:
    return Probe(trained)


@pytest.mark.slow
def test_the_held_out_loss_is_far_below_that_of_the_untrained_model(trained: Path, probe: Probe) -> None:
    training = json.loads((trained / MANIFEST).read_text())["result"]["training"]
    assert training["loss_before"] > 7.6  # about log(2048)
    assert training["loss_after"] < 5.8
    # transformers, which orders the shards of the table itself, finds the same loss in the files.
    windows = pack_tokens(probe.texts, probe.tokenizer, length=128, count=32).ids
    with qsa_shortcut():
        assert train.evaluate(probe.model, windows) == pytest.approx(training["loss_after"], abs=1e-3)


@pytest.mark.slow
def test_the_ngram_table_is_used(probe: Probe) -> None:
    table = probe.layers[1].ple.ple_embedding.ngram_embedding.weight
    assert probe.divergence_with([table], torch.zeros_like) > 0.02


@pytest.mark.slow
def test_experts_and_routers_are_used(probe: Probe) -> None:
    experts = [layer.mlp.experts.down_proj for layer in probe.layers]
    routers = [layer.mlp.gate.weight for layer in probe.layers]
    assert probe.divergence_with(experts, torch.zeros_like) > 0.02
    assert probe.divergence_with(routers, lambda w: w.roll(5, 0)) > 0.02


@pytest.mark.slow
def test_every_expert_takes_part(probe: Probe) -> None:
    counts = [torch.zeros(16) for _ in probe.layers]

    def count(i: int) -> Any:
        def hook(_: Any, __: Any, output: Any) -> None:
            counts[i] += torch.bincount(output[2].flatten(), minlength=16)

        return hook

    hooks = [layer.mlp.gate.register_forward_hook(count(i)) for i, layer in enumerate(probe.layers)]
    probe.log_probabilities()
    for handle in hooks:
        handle.remove()
    for selected in counts:
        assert (selected > 0).all()
        assert selected.max() < 0.5 * selected.sum()


@pytest.mark.slow
def test_widths_of_the_experts_can_be_told_apart(probe: Probe) -> None:
    experts = [
        p for layer in probe.layers for p in (layer.mlp.experts.gate_up_proj, layer.mlp.experts.down_proj)
    ]

    def rounded(bits: int) -> Any:
        def change(fused: torch.Tensor) -> torch.Tensor:
            return torch.stack([dequantize(*round_to_nearest(w, bits, 128), bits) for w in fused])

        return change

    two, four, eight = (probe.divergence_with(experts, rounded(bits)) for bits in (2, 4, 8))
    assert two > 5 * four > 25 * eight
    assert two > 0.005
