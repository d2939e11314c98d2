"""Thousands of tensors in sparse files: what inspect reads must not grow with the weights."""

import json
from pathlib import Path

import pytest

from q38.base.errors import InputError
from q38.checkpoint.index import Checkpoint
from q38.inspection.findings import Severity
from q38.inspection.report import inspect
from q38.ple.split import split_ple
from q38.synth.sparse import synth_sparse

LAYERS, EXPERTS = 8, 64


@pytest.fixture(scope="module")
def config(tiny_source, tmp_path_factory) -> Path:
    """The tiny model with more layers and experts."""
    value = json.loads((tiny_source / "config.json").read_text())
    kinds = (["linear_attention"] * 3 + ["full_attention"]) * (LAYERS // 4)
    value["text_config"] |= {"num_hidden_layers": LAYERS, "layer_types": kinds, "num_experts": EXPERTS}
    path = tmp_path_factory.mktemp("scale") / "config.json"
    path.write_text(json.dumps(value))
    return path


@pytest.mark.parametrize("layout", ["bf16", "fp8", "quantized"])
def test_headers_are_enough_for_every_layout(config, tmp_path, monkeypatch, layout):
    root = tmp_path / "inner" / "model"
    made = synth_sparse(root, config, layout=layout, recipe="tiny" if layout == "quantized" else None)
    read: list[int] = []
    read_bytes = Checkpoint.read_bytes

    def counted(self, name, start=0, stop=None):
        data = read_bytes(self, name, start, stop)
        read.append(len(data))
        return data

    monkeypatch.setattr(Checkpoint, "read_bytes", counted)
    result = inspect(root)
    assert (result.layout, result.findings.count(Severity.ERROR)) == (layout, 0)
    assert (len(result.opened.tensors), result.opened.nbytes) == (made["tensors"], made["tensor_bytes"])
    assert sum(read) < 1000  # the n-gram constants and the scale of an fp8 table


@pytest.mark.parametrize("layout", ["bf16", "fp8"])
def test_a_model_with_two_ngram_layers_is_inspected_and_not_split(config, tmp_path, layout):
    value = json.loads(config.read_text())
    value["text_config"]["ple_layer_ids"] = [2, 3]
    (tmp_path / "config.json").write_text(json.dumps(value))
    root = tmp_path / "model"
    synth_sparse(root, tmp_path / "config.json", layout=layout)
    result = inspect(root)
    assert result.findings.count(Severity.ERROR) == 0
    assert result.ngram["layers"] == [1, 2]
    with pytest.raises(
        InputError, match=r"2 n-gram tables \(ple_layer_ids \[2, 3\]\), q38 handles models with one"
    ):
        split_ple(root, tmp_path / "ple")
    assert not (tmp_path / "ple").exists()
