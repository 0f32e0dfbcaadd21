"""Pages of the site that are written from the code."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType

import pytest
from page_modules import script

pytest.importorskip("mkdocs")
from mkdocs.config import load_config

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def hooks() -> ModuleType:
    return script("hooks.py")


def test_every_command_is_there(hooks: ModuleType) -> None:
    page = hooks.commands()
    for heading in ("run", "resume", "list", "new project", "node", "federation try"):
        assert f"\n## holdfast {heading}\n" in page
    assert "| `--runs-dir` | Where the run directory is made. |" in page


def test_types_are_words(hooks: ModuleType) -> None:
    page = hooks.experiment_keys()
    assert "| `evaluate_every` | whole number or `'auto'` | `auto` | rounds between measurements" in page
    assert "| `mixing` | a name, or a table with a name | none |" in page
    assert "Union[" not in page


def test_lists_that_are_no_sweeps_are_named(hooks: ModuleType) -> None:
    page = hooks.experiment_keys()
    assert set(re.findall(r"^\| `(\w+)` \| a list", page, re.MULTILINE)) == {"seeds", "metrics"}
    assert "no sweeps: `seeds`, `metrics`," in page
    assert "no lists to sweep over" not in page
    assert "\n## `[[algorithm]]`\n" in page
    assert "| `local_epochs` | whole number | none |" in page


@pytest.fixture(scope="module")
def nav() -> list:
    config = load_config(str(ROOT / "mkdocs.yml"))
    return config.plugins.on_config(config).nav


def test_llms_txt_lists_every_page(hooks: ModuleType, nav: list) -> None:
    """If it does not, ``make docs`` writes it anew."""
    written, wanted = (
        set(re.findall(r"^- \[.*?\]\((.*?)\)", text, re.MULTILINE))
        for text in ((ROOT / "llms.txt").read_text(encoding="utf-8"), hooks.llms(nav, on_site=False))
    )
    assert written == wanted, "make docs brings llms.txt up to date"
    assert all((ROOT / path).exists() for path in written)


def test_every_page_is_in_the_navigation_and_begins_with_prose(hooks: ModuleType, nav: list) -> None:
    listed = {path for section in nav for part in section.values() for _, path in hooks._pages(part)}
    pages = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")}
    missing = {path for path in listed if path.endswith(".md")} ^ (pages | set(hooks.WRITTEN))
    assert not missing, "each page of docs/ is in mkdocs.yml, and a page for each method in docs/methods/"
    for page in pages:
        title, sentence = hooks._beginning(page)
        assert title, page
        assert re.match(r'[A-Z0-9`"*[]', sentence), f"{page} begins with {sentence[:60]!r}"
        assert not sentence.startswith(("```", "|", "#")), page


@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
def test_as_many_papers_are_named_as_are_listed(page: str) -> None:
    listed = re.findall(
        r"^\| \[.*?\]\(docs/papers/[\w-]+\.md\) \|", (ROOT / "README.md").read_text(), re.MULTILINE
    )
    words = ["no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
    found = re.findall(r"(\w+) papers", (ROOT / page).read_text())
    assert [word for word in found if word in words] == [words[len(listed)]]
