"""q38 patch-sglang on the command line; what it does is tested in tests/sglang_ext."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Iterator
from importlib import util
from pathlib import Path

import pytest

from q38.sglang_ext import options, patch_tree, source
from q38.sglang_ext.targets import EDITED_FILES, MECHANISMS, all_targets
from tests.cli.conftest import Result

Cli = Callable[..., Result]
ACTIONS = ["check", "enable", "disable", "verify", "export-patch", "apply", "revert"]


@pytest.fixture
def tree(tmp_path: Path) -> Iterator[Path]:
    """A copy of the installed SGLang's files."""
    if util.find_spec("sglang") is None:
        pytest.skip("no sglang: run scripts/test.sh, which installs SGLang")
    installed = source.installed_tree()
    files = {found[0] for target in all_targets() if (found := source.module_file(installed, target))}
    for file in files | {installed / name for name in (*EDITED_FILES, "sglang/_version.py")}:
        copy = tmp_path / "tree" / file.relative_to(installed)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, copy)
    source._parsed.cache_clear()
    yield tmp_path / "tree"
    source._parsed.cache_clear()


@pytest.mark.parametrize("action", ACTIONS)
def test_without_sglang_every_action_says_how_to_get_it(
    q38: Cli, action: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source.importlib.util, "find_spec", lambda name: None)
    result = q38("patch-sglang", action, *(["-o", "x.diff"] if action == "export-patch" else []))
    assert result.code == 3
    assert 'pip install "q38[sglang]"' in result.err


def test_check_prints_a_state_for_every_mechanism(q38: Cli, tree: Path) -> None:
    result = q38("patch-sglang", "check", "--tree", tree)
    assert result.code == 0
    for mechanism in MECHANISMS:
        assert f"{mechanism.name} " in result.out
    assert "plugin" in result.out


def test_check_says_no_where_a_mechanism_does_not_fit(q38: Cli, tree: Path) -> None:
    file = tree / EDITED_FILES[0]
    file.write_text(file.read_text().replace("def get_quant_method(", "def get_method("))
    result = q38("patch-sglang", "check", "--tree", tree, "--json")
    assert result.code == 1
    states = {m["mechanism"]: m["state"] for m in json.loads(result.out.splitlines()[0])["mechanisms"]}
    assert states["experts-2bit"] == "unsupported"
    assert states["rope-sync"] == "plugin"
    assert "get_quant_method is missing" in result.err + result.out


def test_enable_and_disable_leave_one_file_and_none(
    q38: Cli, tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "env"))
    for action, there in (("enable", True), ("enable", True), ("disable", False), ("disable", False)):
        assert q38("patch-sglang", action, "--dry-run").code == 0
        before = options.marker().is_file()
        assert q38("patch-sglang", action).code == 0
        assert options.marker().is_file() is there
        assert options.enabled() is there
        assert before in (there, not there)


def test_apply_and_revert_name_the_files(q38: Cli, tree: Path) -> None:
    before = (tree / EDITED_FILES[0]).read_bytes()
    applied = q38("patch-sglang", "apply", "--tree", tree, "--json")
    assert [Path(f).name for f in json.loads(applied.out)["files"]] == [Path(f).name for f in EDITED_FILES]
    assert (tree / EDITED_FILES[0]).read_bytes() != before
    again = q38("patch-sglang", "apply", "--tree", tree)
    assert again.code == 2
    assert "already patched" in again.err
    assert q38("patch-sglang", "revert", "--tree", tree).code == 0
    assert (tree / EDITED_FILES[0]).read_bytes() == before


def test_a_dry_run_patches_nothing(q38: Cli, tree: Path) -> None:
    assert q38("patch-sglang", "apply", "--tree", tree, "--dry-run").code == 0
    assert {s.state for s in patch_tree.states(tree)} == {"original"}


def test_export_writes_a_diff_of_the_installed_release(q38: Cli, tree: Path, tmp_path: Path) -> None:
    out = tmp_path / "q38.diff"
    assert q38("patch-sglang", "export-patch", "-o", out, "--dry-run").code == 0
    assert not out.exists()
    assert q38("patch-sglang", "export-patch", "-o", out).code == 0
    assert [line[6:] for line in out.read_text().splitlines() if line.startswith("+++ b/")] == list(
        EDITED_FILES
    )


@pytest.mark.slow
def test_verify_loads_sglang_and_finds_every_hook(q38: Cli, tree: Path) -> None:
    if util.find_spec("orjson") is None:
        pytest.skip("SGLang is installed without its dependencies: run scripts/test.sh")
    result = q38("patch-sglang", "verify", "--json")
    assert result.code == 0, result.err
    assert sorted(json.loads(result.out)["hooks"]) == sorted(t for m in MECHANISMS for t in m.hooked)
