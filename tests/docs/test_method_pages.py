"""A page per method: none is missing or left over, and what is written by hand agrees with the code."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from types import ModuleType

import pytest
from page_modules import script

import holdfast as hf
from holdfast.algorithms import ALGORITHMS

pytest.importorskip("mkdocs")

METHODS = Path(__file__).parents[2] / "docs" / "methods"
NAMES = sorted(ALGORITHMS)
CITED = re.compile(r"([A-Z][\w-]+)(?: et al\.| and \w+|, \w+ and \w+)? (\d{4})")


@pytest.fixture(scope="module")
def pages() -> ModuleType:
    return script("methods/pages.py")


def test_every_method_has_a_page_a_curve_and_a_result(pages: ModuleType) -> None:
    written = sorted(path.stem for path in METHODS.glob("*.md") if path.stem != "index")
    assert written == NAMES, "write docs/methods/NAME.md"
    assert sorted(pages.METHODS) == NAMES, "write a table [NAME] in docs/methods/methods.toml"
    drawn = sorted(path.stem for path in (METHODS / "figures").glob("*.svg"))
    assert drawn == NAMES, "draw the curve: python docs/methods/curves.py NAME"
    assert {name: next(iter(pages.RESULTS[name])) for name in NAMES} == {
        name: pages.METHODS[name]["title"] for name in NAMES
    }


@pytest.mark.parametrize("name", NAMES)
def test_a_page_is_whole(name: str, pages: ModuleType) -> None:
    file = METHODS / f"{name}.md"
    assert file.exists(), f"write docs/methods/{name}.md"
    by_hand = file.read_text(encoding="utf-8")
    page = pages.whole_page(name, by_hand)
    headings = re.findall(r"^## (.*)$", page, re.MULTILINE)
    assert headings[0] == "Equations"
    assert headings[-4:] == ["When it fails", "A curve", "Run it", "Papers"]
    title = by_hand.split("\n", 1)[0].removeprefix("# ")
    assert title.split(",")[0] in pages.by_hand(name)["title"]
    assert "nothing up" not in page
    # A reconstruction says so on its page as in the registry.
    assert ("econstruction" in by_hand) == ("reconstruction" in ALGORITHMS.describe(name)["paper"])


@pytest.mark.parametrize("name", NAMES)
def test_the_papers_are_those_of_the_registry(name: str, pages: ModuleType) -> None:
    cited = set(CITED.findall(_plain(ALGORITHMS.describe(name)["paper"])))
    listed = {_first_author_and_year(pages.PAPERS[key]) for key in pages.by_hand(name)["papers"]}
    assert cited
    assert cited <= listed


def test_every_paper_is_cited(pages: ModuleType) -> None:
    cited = {key for entry in pages.METHODS.values() for key in entry["papers"]}
    assert cited == set(pages.PAPERS)
    arxiv = [paper["arxiv"] for paper in pages.PAPERS.values() if "arxiv" in paper]
    assert len(set(arxiv)) == len(arxiv)
    assert all(re.fullmatch(r"\d{4}\.\d{4,5}", number) for number in arxiv)


@pytest.mark.parametrize("name", NAMES)
def test_both_lines_make_the_same_method(name: str, pages: ModuleType) -> None:
    given = tomllib.loads(pages.toml_line(name))["algorithm"]
    from_file = ALGORITHMS.build(given.pop("name"), given)
    assert from_file == eval(pages.python_line(name), {"hf": hf})


def test_the_index_says_which_cannot_be_deployed() -> None:
    stated = re.search(r"all but (.*?) run deployed", (METHODS / "index.md").read_text(encoding="utf-8"))
    assert stated is not None
    answering = [name for name in NAMES if ALGORITHMS[name].declared.answers]
    assert re.findall(r"\((.*?)\.md\)", stated[1]) == answering


def test_facts_are_those_of_the_code(pages: ModuleType) -> None:
    scaffold, led, pdmm = (pages.facts(name) for name in ("scaffold", "led", "pdmm"))
    assert "| Cohorts | yes |" in scaffold
    assert "2 vectors up, 2 down per client and round: 8 + 8 bytes per parameter" in scaffold
    assert "1 vector over every directed link and round: 4 bytes per parameter" in led
    assert "not on links that change" in led
    assert "| Channels | [half only]" in pdmm
    assert "| Needs convex f_i | yes |" in pages.facts("dualfl")


def test_hyperparameters_come_with_what_the_source_says(pages: ModuleType) -> None:
    table = pages.hyperparameters("ditto")
    assert "| `lr` | number above 0, or a schedule | required |" in table
    assert "| `rho` | number from 0 | `0.1` | the paper's lambda: 0 is training alone" in table
    assert "| `server_lr` | number above 0, or a schedule | `1.0` | other than 1: generalised FedAvg" in table


def _first_author_and_year(paper: dict) -> tuple[str, str]:
    return _plain(paper["authors"].split(",")[0].split(". ")[-1]), str(paper["year"])


def _plain(text: str) -> str:
    return text.replace("ń", "n")
