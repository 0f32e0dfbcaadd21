"""Commands on the pages of the documentation: each exists, with the options that are printed."""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tomli_w
import typer.main
from typer.core import TyperGroup

from holdfast.cli.app import app
from holdfast.experiments.experiment_file import default_experiment
from holdfast.experiments.plan import Plan

ROOT = Path(__file__).parents[2]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "examples/README.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
COMMANDS = typer.main.get_command(app)
NO_COMMANDS = ("relay 1",)  # words of a protocol


def commands(page: Path) -> Iterator[list[str]]:
    """The words of every ``holdfast ...`` in a block of shell commands or in a line of text."""
    text = page.read_text(encoding="utf-8")
    blocks = re.findall(r"```sh[^\n]*\n(.*?)```", text, re.DOTALL)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    lines += re.findall(r"`(holdfast [^`]*)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    for line in lines:
        words = re.sub(r"(^|\s)#.*", "", " ".join(line.split()))
        if (match := re.search(r"(?:^|\s)holdfast (.*)", words)) and match[1] not in NO_COMMANDS:
            yield shlex.split(match[1])


def understood(words: list[str]) -> str | None:
    """What is wrong with a command; None: nothing."""
    command: Any = COMMANDS
    while isinstance(command, TyperGroup) and words and re.fullmatch(r"[a-z][a-z-]*", words[0]):
        if words[0] not in command.commands:
            return f"there is no command {words[0]!r}"
        command, words = command.commands[words[0]], words[1:]
    known = {option for parameter in command.params for option in parameter.opts} | {"--help"}
    strange = [word for word in words if word.startswith("--") and word.split("=")[0] not in known]
    return f"{command.name} has no option {strange[0]}" if strange else None


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_commands_on_a_page_exist(page: Path) -> None:
    assert {" ".join(words): wrong for words in commands(page) if (wrong := understood(words))} == {}


def test_there_are_many_commands() -> None:
    found = [words for page in PAGES for words in commands(page)]
    assert len(found) > 100
    assert understood(["run", "mine.toml", "--wach"]) == "run has no option --wach"
    assert understood(["federation", "trie"]) == "there is no command 'trie'"


FEDERATION = {"node", "relay", "round", "membership", "secure_aggregation"}  # tables of federation files
EXPERIMENTS = [
    pytest.param(block, id=f"{page.stem}-{order}")
    for page in PAGES
    for order, block in enumerate(
        re.findall(r"```toml\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    )
    if not FEDERATION & set(tomllib.loads(block)) and ":two_clusters" not in block  # a module of its own
]


@pytest.mark.parametrize("block", EXPERIMENTS)
def test_experiments_on_a_page_are_accepted(block: str, tmp_path: Path) -> None:
    """What a block leaves out is taken from the default experiment."""
    given, whole = tomllib.loads(block), tomllib.loads(default_experiment())
    if "optimizer" in given:
        given = {"algorithm": whole["algorithm"][0] | given}
    if "server_lr" in block:
        given["network"] = {"topology": "server"}
    for key, value in given.items():
        whole[key] = whole[key] | value if isinstance(whole.get(key), dict) else value
    file = tmp_path / "experiment.toml"
    file.write_text(tomli_w.dumps(whole), encoding="utf-8")
    Plan.of_file(file, [], None, "cpu").check()
