import json
import math

import pytest
from typer.testing import CliRunner

import q38.cli.inspect  # noqa: F401 (registers the verb)
from q38.base.errors import InputError
from q38.checkpoint.index import Checkpoint
from q38.cli.app import app
from q38.inspection.findings import Findings, Severity
from q38.inspection.report import inspect
from q38.model.names import Group
from tests.inspection.broken import clone, drop_where, edit_config, edit_json, edit_tensors, edit_text_config
from tests.ple.sources import make_source


def groups(result):
    return {g.group: g for g in result.groups}


@pytest.mark.parametrize(
    ("base", "layout", "experts"),
    [
        ("tiny_source", "bf16", "fused"),
        ("tiny_source_fp8", "fp8", "per expert"),
        ("tiny_packed", "quantized", "per expert"),
    ],
)
def test_the_layout_is_told_by_the_tensors(base, layout, experts, request):
    result = inspect(request.getfixturevalue(base))
    assert (result.layout, result.experts) == (layout, experts)


@pytest.mark.parametrize("base", ["tiny_source", "tiny_source_fp8", "tiny_packed"])
def test_groups_cover_every_tensor_and_byte(base, request):
    root = request.getfixturevalue(base)
    result, stored = inspect(root), Checkpoint.open(root)
    assert sum(g.tensors for g in result.groups) == len(stored.tensors)
    assert sum(g.nbytes for g in result.groups) == stored.nbytes


def test_parameters_do_not_depend_on_how_they_are_stored(tiny_source, tiny_source_fp8, tiny_packed):
    counts = [groups(inspect(root)) for root in (tiny_source, tiny_source_fp8, tiny_packed)]
    for group in (Group.EXPERTS, Group.GDN_IN, Group.SHARED_EXPERT, Group.ROUTER, Group.LM_HEAD):
        assert len({c[group].parameters for c in counts}) == 1


def test_the_histogram_of_widths_covers_the_packed_matrices(tiny_packed):
    bits, stored = inspect(tiny_packed).bits, Checkpoint.open(tiny_packed)
    packed = [name for name in stored.tensors if name.endswith(".qweight")]
    assert bits["2"]["matrices"] + bits["8"]["matrices"] == len(packed)
    codes = math.prod(stored.info("model.language_model.layers.0.mlp.experts.0.up_proj.qweight").shape) * 16
    assert bits["2"]["parameters"] == bits["2"]["matrices"] * codes


def test_the_report_shows_the_parts_and_the_table(tiny_source):
    report = inspect(tiny_source).to_dict()
    assert all(
        report["parts"][part] for part in ("vision", "mtp", "tokenizer", "chat_template", "generation_config")
    )
    assert report["ngram"]["rows"] == report["ngram"]["rows_expected"] == 20_992
    assert report["layers"] == {"linear_attention": 3, "full_attention": 1}
    assert json.loads(json.dumps(report)) == report


@pytest.mark.parametrize("spelling", ["full_attention", "qwen_sparse_attention", "indexed_attention"])
def test_each_spelling_of_the_layer_types_is_understood(tiny_source, tmp_path, spelling):
    root = clone(tiny_source, tmp_path / "model")
    edit_text_config(root, layer_types=["linear_attention"] * 3 + [spelling])
    assert inspect(root).findings.kept == []


def test_an_unknown_layer_type_is_refused(tiny_source, tmp_path):
    root = clone(tiny_source, tmp_path / "model")
    edit_text_config(root, layer_types=["linear_attention"] * 3 + ["sliding_attention"])
    with pytest.raises(InputError, match=r"layer_types\[3\] is 'sliding_attention'"):
        inspect(root)


def test_experts_of_a_bf16_checkpoint_may_be_one_matrix_each(tiny_source, tmp_path):
    root = clone(tiny_source, tmp_path / "model")

    def unfuse(tensors):
        for name in [n for n in tensors if ".experts." in n]:
            prefix, _, projection = name.rpartition(".")
            for e, matrix in enumerate(tensors.pop(name)):
                parts = {projection: matrix}
                if projection == "gate_up_proj":
                    gate, up = matrix.chunk(2)
                    parts = {"gate_proj": gate, "up_proj": up}
                tensors |= {f"{prefix}.{e}.{part}.weight": value for part, value in parts.items()}

    for name in [n for n in Checkpoint.open(root).tensors if ".experts." in n]:
        if name in Checkpoint.open(root).tensors:
            edit_tensors(root, unfuse, file_of=name)
    result = inspect(root)
    assert (result.layout, result.experts, result.findings.kept) == ("bf16", "per expert", [])


def test_a_flat_text_config_with_short_names_is_understood(tiny_source, tmp_path):
    root = clone(tiny_source, tmp_path / "model")
    drop_where(root, lambda name: name.startswith(("mtp.", "model.visual.")))

    def shorten(tensors):
        for name in [n for n in tensors if "language_model." in n]:
            tensors[name.replace("language_model.", "")] = tensors.pop(name)

    for file in sorted({t.file for t in Checkpoint.open(root).tensors.values()}):
        edit_tensors(root, shorten, file_of=next(iter(Checkpoint.open(root).headers[file.name].tensors)))

    def flatten(config):
        text = config.pop("text_config") | {"model_type": "qwen4_exp_text", "mtp_num_hidden_layers": 0}
        config.clear()
        config.update(text)

    edit_json(root / "config.json", flatten)
    result = inspect(root)
    assert result.findings.kept == []
    assert result.parts["text_only"]


@pytest.mark.parametrize(
    "break_it",
    [
        lambda root: (root / "config.json").unlink(),
        lambda root: (root / "config.json").write_text("{"),
        lambda root: edit_config(root, model_type="llama"),
        lambda root: [f.unlink() for f in root.glob("*.safetensors")],
    ],
)
def test_what_cannot_be_inspected_at_all_is_refused(tiny_source, tmp_path, break_it):
    root = clone(tiny_source, tmp_path / "model")
    break_it(root)
    with pytest.raises(InputError) as caught:
        inspect(root)
    assert caught.value.remedy


def test_the_first_twenty_of_a_kind_are_kept_and_all_are_counted():
    findings = Findings()
    for n in range(50):
        findings.add("tensor-missing", f"number {n}", "look")
    assert (len(findings.kept), findings.count(Severity.ERROR)) == (20, 50)


def test_errors_come_first():
    findings = Findings()
    for code in ("mtp-absent", "index-size", "tensor-missing"):
        findings.add(code, "what", "remedy")
    assert [f.severity for f in findings.ordered()] == [Severity.ERROR, Severity.WARNING, Severity.NOTE]


def test_the_command_ends_with_0_on_a_sound_checkpoint(tiny_source):
    run = CliRunner().invoke(app, ["inspect", str(tiny_source)])
    assert run.exit_code == 0
    assert "nothing wrong" in run.stdout


def test_the_command_ends_with_1_on_an_error_and_2_where_nothing_can_be_inspected(tmp_path):
    source = make_source(tmp_path / "source")  # a table and nothing else
    run = CliRunner().invoke(app, ["inspect", str(source), "--json"])
    assert run.exit_code == 1
    assert "layout-unknown" in json.loads(run.stdout)["finding_counts"]
    assert CliRunner().invoke(app, ["inspect", str(tmp_path)]).exit_code == 2
    assert CliRunner().invoke(app, ["inspect"]).exit_code == 2


def test_the_command_prints_the_table_of_codes():
    run = CliRunner().invoke(app, ["inspect", "--codes"])
    assert "shard-broken" in run.stdout
