"""The manifest of a release: every target is found, and what is changed, missing or unknown is named."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from q38.base.errors import CheckFailed, InputError
from q38.data import data_path
from q38.sglang_ext import manifest
from q38.sglang_ext.activate import check_targets
from q38.sglang_ext.source import digest, module_file, release, source_of
from q38.sglang_ext.targets import AUTOROUND, MECHANISMS, all_targets


def edit(tree: Path, target: str, before: str, after: str) -> None:
    found = module_file(tree, target)
    assert found is not None
    text = found[0].read_text()
    assert before in text
    found[0].write_text(text.replace(before, after))
    from q38.sglang_ext.source import _parsed

    _parsed.cache_clear()


def test_the_installed_release_is_the_one_of_its_manifest(sglang_tree: Path) -> None:
    assert manifest.compare(sglang_tree) == []


@pytest.mark.parametrize("version", ["0.5.22", "0.5.23"])
def test_each_known_release_has_a_hash_for_every_target(version: str) -> None:
    assert version in manifest.known_releases()
    assert set(manifest.load(version)["targets"]) == set(all_targets())


def test_the_command_writes_the_manifest_that_ships(sglang_tree: Path, tmp_path: Path) -> None:
    out = tmp_path / "manifest.json"
    subprocess.run(
        [sys.executable, "-m", "q38.sglang_ext.manifest", str(sglang_tree), "-o", str(out)], check=True
    )
    shipped = data_path("assets", "sglang", f"{release(sglang_tree)}.json")
    assert json.loads(out.read_text()) == json.loads(shipped.read_text())


def test_a_changed_target_is_named(tree: Path) -> None:
    edit(
        tree, AUTOROUND, "lm_head_quantized=cls.get_from_keys_or(", "lm_head_quantized=cls.get_from_keys_or ("
    )
    found = manifest.compare(tree)
    assert [str(m) for m in found] == [f"{AUTOROUND}.from_config is changed"]


def test_a_missing_target_is_named(tree: Path) -> None:
    edit(tree, AUTOROUND, "def get_quant_method(", "def get_quantization_method(")
    assert [str(m) for m in manifest.compare(tree)] == [f"{AUTOROUND}.get_quant_method is missing"]


def test_the_refusal_lists_everything_that_does_not_match(tree: Path) -> None:
    edit(tree, AUTOROUND, "def get_quant_method(", "def get_quantization_method(")
    edit(
        tree, AUTOROUND, "lm_head_quantized=cls.get_from_keys_or(", "lm_head_quantized=cls.get_from_keys_or ("
    )
    with pytest.raises(CheckFailed) as refused:
        check_targets(tree)
    for name in ("get_quant_method is missing", "from_config is changed", "2 of q38's targets"):
        assert name in str(refused.value)


def test_a_change_outside_the_targets_does_not_matter(tree: Path) -> None:
    edit(tree, AUTOROUND, "def check_cpu_support(", "def check_cpu_supported(")
    check_targets(tree)


def test_an_unknown_release_is_refused_with_one_that_is_known(tree: Path) -> None:
    version = tree / "sglang" / "_version.py"
    version.write_text(version.read_text().replace(release(tree), "0.9.1"))
    with pytest.raises(CheckFailed, match=r"SGLang 0\.9\.1 .*0\.5\.23"):
        check_targets(tree)


def test_no_manifest_is_built_where_a_target_is_missing(tree: Path) -> None:
    edit(tree, AUTOROUND, "def get_quant_method(", "def get_quantization_method(")
    with pytest.raises(InputError, match="get_quant_method"):
        manifest.build(tree)


def test_a_directory_without_sglang_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no sglang package"):
        release(tmp_path)


def test_source_is_read_with_its_decorators_and_nothing_after_it(tmp_path: Path) -> None:
    package = tmp_path / "sglang"
    package.mkdir()
    (package / "m.py").write_text(
        "import x\n\nclass A:\n    LIST = (\n        1,\n    )\n\n    @classmethod\n    def f(cls):\n        return 1\n\n    def g(self): ...\n"
    )
    assert source_of(tmp_path, "sglang.m.A.f") == "    @classmethod\n    def f(cls):\n        return 1"
    assert source_of(tmp_path, "sglang.m.A.LIST") == "    LIST = (\n        1,\n    )"
    assert source_of(tmp_path, "sglang.m.A.h") is None
    assert source_of(tmp_path, "sglang.none") is None
    assert len(digest("x")) == 64


def test_a_mechanism_is_named_once_and_hooks_something_but_for_the_early_scheduler() -> None:
    names = [m.name for m in MECHANISMS]
    assert len(names) == len(set(names))
    # One changes nothing of SGLang: it starts its scheduler in another way.
    assert [m.name for m in MECHANISMS if not m.hooked] == ["early-scheduler"]
    assert all(m.relied for m in MECHANISMS if not m.hooked)
