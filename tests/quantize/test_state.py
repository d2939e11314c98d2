"""What an unfinished run goes on from, and when it may not."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from q38.base.errors import InputError
from q38.quantize import devices, driver
from q38.quantize.driver import quantize
from q38.recipe.schema import Recipe

METHODS = ("autoround", "opt-rtn")


@pytest.fixture(scope="module")
def recipes(vary: Callable[..., Recipe]) -> dict[str, Recipe]:
    return {method: vary(experts={"method": method, "iters": 1}) for method in METHODS}


@pytest.fixture(scope="module")
def trials(
    tiny_source: Path, tiny_ple: Path, recipes: dict[str, Recipe], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    """Two blocks of four, by method. Read only."""
    root = tmp_path_factory.mktemp("trials")
    for method, recipe in recipes.items():
        quantize(tiny_source, root / method, recipe, ple=tiny_ple, blocks="1")
    return {method: root / method for method in recipes}


@pytest.fixture
def trial(trials: dict[str, Path], tmp_path: Path) -> Callable[[str], Path]:
    return lambda method: Path(shutil.copytree(trials[method], tmp_path / method))


@pytest.mark.parametrize("method", METHODS)
def test_a_lost_shard_whose_inputs_are_gone_is_named(
    method: str, trial: Callable[[str], Path], recipes: dict[str, Recipe], tiny_source: Path, tiny_ple: Path
) -> None:
    out = trial(method)
    (out / "model-00003-of-00005.safetensors").unlink()  # of block 1
    with pytest.raises(
        InputError, match=r"model-00003-of-00005\.safetensors: must be written, .* with --fresh"
    ):
        quantize(tiny_source, out, recipes[method], ple=tiny_ple)


def test_cut_activations_are_named_too(
    trial: Callable[[str], Path], recipes: dict[str, Recipe], tiny_source: Path, tiny_ple: Path
) -> None:
    out = trial("opt-rtn")
    state = out / ".q38" / "activations-2.safetensors"
    state.write_bytes(state.read_bytes()[:-8])
    with pytest.raises(InputError, match=r"model-00004.* are gone \(activations-2\.safetensors: .*truncated"):
        quantize(tiny_source, out, recipes["opt-rtn"], ple=tiny_ple)


def test_a_lost_shard_of_the_first_block_is_made_again(
    trial: Callable[[str], Path], recipes: dict[str, Recipe], tiny_source: Path, tiny_ple: Path
) -> None:
    out = trial("opt-rtn")
    lost = out / "model-00002-of-00005.safetensors"
    before = lost.read_bytes()
    lost.unlink()
    assert quantize(tiny_source, out, recipes["opt-rtn"], ple=tiny_ple, blocks="1")["blocks"]
    assert lost.read_bytes() == before


@pytest.mark.parametrize("method", METHODS)
def test_a_run_does_not_go_on_with_another_package(
    method: str,
    trial: Callable[[str], Path],
    recipes: dict[str, Recipe],
    tiny_source: Path,
    tiny_ple: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out, real = trial(method), devices.package_versions()
    monkeypatch.setattr(devices, "package_versions", lambda: {**real, "torch": "9.9", "sglang": "9.9"})
    with pytest.raises(InputError, match=r'begun with another version\.torch \(".*", now "9\.9"\).*--fresh'):
        quantize(tiny_source, out, recipes[method], ple=tiny_ple)
    assert quantize(tiny_source, out, recipes[method], ple=tiny_ple, blocks="1")["blocks"]  # nothing to do


def test_a_finished_run_stays_up_to_date_with_another_package(
    tiny_source: Path, tiny_ple: Path, tiny_quantized: Path, fast: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "package_versions", lambda: {"torch": "9.9"})
    assert quantize(tiny_source, tiny_quantized, fast, ple=tiny_ple)["complete"]


@pytest.mark.parametrize("name", ["generation_config.json", "chat_template.jinja"])
def test_a_changed_copied_file_is_no_longer_up_to_date(
    name: str, tiny_source: Path, vary: Callable[..., Recipe], tmp_path: Path
) -> None:
    source, recipe = Path(shutil.copytree(tiny_source, tmp_path / "source")), vary(experts={"method": "rtn"})
    quantize(source, tmp_path / "out", recipe)
    (source / name).write_text((source / name).read_text() + "\n")
    with pytest.raises(InputError, match=rf"begun with another copied\.{name}"):
        quantize(source, tmp_path / "out", recipe)


@pytest.mark.parametrize("method", METHODS)
def test_a_resumed_run_asks_for_no_disk_that_it_holds_already(
    method: str,
    trial: Callable[[str], Path],
    recipes: dict[str, Recipe],
    tiny_source: Path,
    tiny_ple: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(driver, "require_free_space", lambda out, needed: asked.append(needed))
    quantize(tiny_source, tmp_path / "new", recipes[method], ple=tiny_ple, blocks="0")
    quantize(tiny_source, trial(method), recipes[method], ple=tiny_ple, blocks="1")
    planned = quantize(tiny_source, tmp_path / "none", recipes[method], dry_run=True)
    cache, scratch = (planned["calibration"][key] for key in ("cache_bytes", "scratch_bytes"))
    assert asked[0] == planned["bytes"] + scratch
    chains = 2 if method == "autoround" else 1
    left = sum(size for file, size in planned["shards"].items() if file > "model-00004")
    assert 0 <= left + scratch - chains * cache - asked[1] < 2**13  # the header of the state that lies there
