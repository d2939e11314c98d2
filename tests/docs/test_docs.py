"""The documentation agrees with the program."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import pytest
import yaml

from q38.cli.docs import BEGIN, END, generated_parts, main, replace
from q38.recipe.schema import parse_recipe

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])


def test_no_generated_page_is_stale(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--check"]) == 0, capsys.readouterr().err


def test_every_verb_has_a_page_and_no_page_is_left_over() -> None:
    assert {p for p in generated_parts() if p.parent.name == "verbs"} == set(
        (ROOT / "docs" / "verbs").glob("*.md")
    )


@pytest.mark.parametrize("page", sorted((ROOT / "docs" / "verbs").glob("*.md")), ids=lambda p: p.stem)
def test_every_verb_page_tells_what_help_cannot(page: Path) -> None:
    text = page.read_text("utf-8")
    written = text[: text.index(BEGIN)] + text[text.index(END) :]
    for heading in ("## Example", "## JSON", "## Exit codes"):
        assert heading in written, f"{page.name} lacks {heading}"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_every_link_leads_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text("utf-8")):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_readme_commands_are_in_the_repository() -> None:
    commands = re.findall(r"^    bash (\S+)$", (ROOT / "README.md").read_text("utf-8"), flags=re.MULTILINE)
    assert commands == ["scripts/tiny.sh", "scripts/test.sh"]
    assert all((ROOT / command).exists() for command in commands)


def test_ci_runs_the_readme_test_command() -> None:
    assert "scripts/test.sh" in (ROOT / ".ci" / "run").read_text("utf-8")


def test_every_pip_call_pins_torch() -> None:
    for file in [*ROOT.glob("scripts/*.sh"), ROOT / ".ci" / "run", *PAGES]:
        for line in file.read_text("utf-8").splitlines():
            if re.match(r"\s+(remedy|q38): ", line):
                continue  # output of a verb, pasted
            if re.search(r"\bpip install\b(?! )|pip install .*[\w\]]", line) and "`pip install`" not in line:
                # SGLang pins torch itself, to another release than that for the CPU.
                assert "-c constraints/cpu.txt" in line or "sglang]" in line, f"{file.name}: {line}"


def test_recipes_on_the_pages_are_those_that_ship_or_can_be_used() -> None:
    text = (ROOT / "recipes" / "tiny.yaml").read_text("utf-8")
    shown = "".join(f"    {line}".rstrip() + "\n" for line in text.splitlines())
    assert f"    $ cat recipes/tiny.yaml\n{shown}\n    $ " in (ROOT / "docs" / "guide.md").read_text("utf-8")
    page = (ROOT / "docs" / "recipe.md").read_text("utf-8")
    example = page.partition("A short one:\n\n")[2].partition("\n\n")[0]
    recipe = parse_recipe(yaml.safe_load(textwrap.dedent(example)))
    assert (
        recipe.quantize.experts.method == "expert-local"
    )  # autoround does not fit the card that this is about
    assert (recipe.placement.engine, recipe.oracle.engine) == ("sglang", "sglang")


def test_a_stale_page_is_named_and_written_only_without_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("q38.cli.docs.DOCS", tmp_path)
    assert main(["--check"]) == 1
    assert "run.md: is stale" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
    assert main([]) == 0
    assert main(["--check"]) == 0


def test_hand_written_text_survives_a_rewrite() -> None:
    page = f"# title\n\nbefore\n\n{BEGIN}\n\nold\n{END}\n\nafter\n"
    new = replace(page, "new", title="x")
    assert new == f"# title\n\nbefore\n\n{BEGIN}\n\nnew\n{END}\n\nafter\n"
    assert replace(new, "new", title="x") == new


def test_a_new_page_gets_a_title() -> None:
    assert replace("", "rows", title="q38 new").startswith(f"# q38 new\n\n{BEGIN}")


def test_every_folder_of_the_package_is_in_the_structure_page() -> None:
    text = (ROOT / "docs" / "structure.md").read_text("utf-8")
    folders = [p.parent.name for p in (ROOT / "q38").glob("*/__init__.py")]
    assert [f for f in folders if f"`q38/{f}/`" not in text] == []
