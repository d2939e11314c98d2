"""`q38 quantize` and its inputs: never written to, never removed, and named when they go away."""

from __future__ import annotations

from pathlib import Path

import pytest

from q38.base.errors import InputError
from q38.quantize import driver
from q38.quantize.driver import quantize
from tests.inspection.broken import clone
from tests.quantize.requant.common import digests, recipe


@pytest.mark.parametrize("fresh", [False, True])
@pytest.mark.parametrize("place", [".", ".."])
def test_the_source_is_refused_as_output_and_untouched(
    tiny_source: Path, tmp_path: Path, place: str, fresh: bool
) -> None:
    source = clone(tiny_source, tmp_path / "source")
    before = digests(tmp_path)
    with pytest.raises(InputError, match="would share a directory with an input"):
        quantize(source, source / place, recipe(), fresh=fresh)
    assert digests(tmp_path) == before


def test_an_output_below_the_source_leaves_it_as_it_was(
    tiny_source: Path, tiny_ple: Path, tmp_path: Path
) -> None:
    source = clone(tiny_source, tmp_path / "source")
    before = digests(source)
    for fresh in (False, True):
        quantize(source, source / "run" / "out", recipe(), ple=tiny_ple, fresh=fresh)
    after = digests(source)
    assert {name: after[name] for name in before} == before
    assert (source / "run" / "out" / "MANIFEST.json").is_file()


def test_fresh_does_not_remove_what_another_step_wrote(tiny_source: Path, tmp_path: Path) -> None:
    other = clone(tiny_source, tmp_path / "other")  # by synth tiny
    before = digests(other)
    with pytest.raises(InputError, match="was written by q38 synth tiny"):
        quantize(tiny_source, other, recipe(), fresh=True)
    assert digests(other) == before


def test_a_shard_that_vanishes_while_it_is_read_is_named_and_not_the_output(
    tiny_source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = clone(tiny_source, tmp_path / "source")
    shard = sorted(source.glob("*.safetensors"))[0]
    enough = driver.require_free_space

    def vanish(out: Path, needed: int) -> None:
        enough(out, needed)
        shard.unlink()

    monkeypatch.setattr(driver, "require_free_space", vanish)
    with pytest.raises(InputError, match="cannot be read") as caught:
        quantize(source, tmp_path / "out", recipe())
    assert caught.value.where == str(shard)
