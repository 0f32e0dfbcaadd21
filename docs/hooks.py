"""Pages that are written by the code: every experiment key, every command, every choice.

mkdocs calls ``on_files`` before it reads the pages.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import typer.main
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined
from typer.core import TyperGroup, TyperOption

import holdfast
from holdfast import _HOMES
from holdfast.cli.app import app
from holdfast.cli.listing import KINDS, entries
from holdfast.core.registry import Registry
from holdfast.core.validation import Section
from holdfast.experiments.option_forms import AsGiven, Checked, Choice, OneOf
from holdfast.experiments.spec import AlgorithmConfig, Experiment, meanings

ROOT = Path(__file__).parents[1]
EXTERNAL = re.compile(
    r"""(?:<(?:script|img|iframe|link)\b[^>]*(?:src|href)=["']?|import\(["'])(https?://[^"' >]+)"""
)
WRITTEN = {  # pages that are written here: title, and what they hold
    "reference/experiment-keys.md": ("Every experiment key", "Types and defaults."),
    "reference/cli.md": ("Every command", "Arguments and options."),
    "reference/choices.md": ("Every choice", "Methods, topologies, data sets and so on, with parameters."),
    "reference/api.md": ("Every name in Python", "Signatures and docstrings."),
}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the generated pages."""
    pages = {
        "reference/experiment-keys.md": experiment_keys(),
        "reference/cli.md": commands(),
        "reference/choices.md": choices(),
        "reference/api.md": names(),
    }
    for path, text in pages.items():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Links to files outside the documentation, which readers of the repository can follow, become names."""
    return re.sub(r"\[([^\]]*)\]\((?:\.\./)+(?!docs/)([^)]*)\)", _outside, markdown)


def _outside(link: re.Match[str]) -> str:
    text, target = link.groups()
    return link[0] if (ROOT / "docs" / target.split("#")[0]).exists() else f"{text} (`{target}`)"


def on_post_page(output: str, page: Page, **_: Any) -> str:
    """The page without what would ask others for anything; what is left must not."""
    output = re.sub(
        r'<script type="module">(?:(?!</script>).)*mermaid.*?</script>', "", output, flags=re.DOTALL
    )
    if found := EXTERNAL.search(output):
        raise PluginError(f"{page.file.src_uri} loads {found[1]} from elsewhere: keep a copy here")
    return output


def on_post_build(config: MkDocsConfig) -> None:
    """llms.txt, what programs that read the site start from; the repository has it with its own paths."""
    nav = config.nav or []
    Path(config.site_dir, "llms.txt").write_text(llms(nav, on_site=True), encoding="utf-8")
    (ROOT / "llms.txt").write_text(llms(nav, on_site=False), encoding="utf-8")


# --- llms.txt -----------------------------------------------------------------------------------------------


def llms(nav: list[Any], *, on_site: bool) -> str:
    """The navigation as llms.txt: a line per page, with its title and the first sentence it begins with."""
    about = (
        (ROOT / "README.md").read_text(encoding="utf-8").split("\n\n")[1].replace("\n", " ").replace("**", "")
    )
    start = "start/" if on_site else "docs/start.md"
    lines = [
        "# holdfast",
        "",
        f"> {about}",
        "",
        f"Python 3.11 or newer, torch. Begin with [five minutes]({start}).",
        "",
    ]
    for section in nav:
        [(title, entries_of)] = section.items()
        lines += [f"## {title}", "", *(_llms_line(*page, on_site) for page in _pages(entries_of)), ""]
    return "\n".join(lines)


def _pages(nav: list[Any]) -> Iterator[tuple[str | None, str]]:
    """The pages of a part of the navigation: title, if it is given there, and path."""
    for entry in nav:
        if isinstance(entry, str):
            yield None, entry
        else:
            for title, inner in entry.items():
                yield from _pages(inner) if isinstance(inner, list) else [(title, inner)]


def _llms_line(title: str | None, path: str, on_site: bool) -> str:
    stem, _, kind = path.rpartition(".")
    heading, sentence = ("", "") if kind == "ipynb" else WRITTEN.get(path) or _beginning(path)
    name, words = title or heading, f": {sentence}" if sentence else ""
    if on_site:
        return f"- [{name}]({re.sub(r'(^|/)(index|README)$', '', stem) or '.'}/){words}"
    if path in WRITTEN:
        return f"- {name}, in the site that `make docs` builds{words}"
    home = f"notebooks/{path.removeprefix('learn/')}" if kind == "ipynb" else f"docs/{path}"
    return f"- [{name}]({home}){words}"


def _beginning(path: str) -> tuple[str, str]:
    """A page's title and its first sentence, without links and marks."""
    file = ROOT / "docs" / path
    if not file.exists():
        raise PluginError(f"docs/{path} is in the navigation, but is not there: write the page")
    title, paragraph, *_ = file.read_text(encoding="utf-8").split("\n\n")
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", paragraph.replace("\n", " ")).replace("*", "")
    return title.removeprefix("# "), re.split(r"(?<=[.!?])\s", text)[0].rstrip(":")


# --- every experiment key -----------------------------------------------------------------------------------


SAID = {  # of sections whose docstrings speak to those who read the code
    Experiment: "Keys that stand before the first table of the file.",
    AlgorithmConfig: "One table for each method to run, with `name` as in `holdfast list algorithms` or "
    "module:attribute. Keys that are not in this table are the method's parameters.",
}


def experiment_keys() -> str:
    """Keys with their types and defaults; the comments beside them in the source say what they mean."""
    lines = [
        "# Every experiment key",
        "",
        "Written from the code. A key without a default must be given. `holdfast init` writes a file to",
        "start from, and [Experiments](../experiments.md) explains what the keys do.",
        "",
        "A list makes a sweep: the experiment is run for every element. Only values that are lists",
        "themselves are no sweeps: `seeds`, `metrics`, the probabilities in `compute` and `links`, and",
        "parameters such as the sizes of an MLP's layers. The last three are swept by a list of lists.",
    ]
    sections = [*_sections(Experiment, ""), ("`[[algorithm]]`", AlgorithmConfig)]
    for title, section in sections:
        lines += [
            "",
            f"## {title}",
            "",
            SAID.get(section) or _first_line(section),
            "",
            "| key | type | default | |",
            "|---|---|---|---|",
        ]
        notes = meanings(section)
        for name, field in section.model_fields.items():
            if _inner_section(field.annotation):
                continue
            default = "required" if field.default is PydanticUndefined else _shown(field.default)
            cells = (f"`{name}`", _type_of(field), default, notes.get(name, ""))
            lines.append(f"| {' | '.join(map(_cell, cells))} |")
    return "\n".join(lines) + "\n"


def _sections(section: type[Section], title: str) -> Iterator[tuple[str, type[BaseModel]]]:
    yield title or "At the top", section
    for name, field in section.model_fields.items():
        if inner := _inner_section(field.annotation):
            yield from _sections(inner, f"`[{name}]`")


def _inner_section(annotation: Any) -> type[Section] | None:
    return annotation if inspect.isclass(annotation) and issubclass(annotation, Section) else None


def _type_of(field: FieldInfo) -> str:
    """The type of a key of a file, in words."""
    for mark in field.metadata:
        if isinstance(mark, OneOf):
            return "a name, or a table with a name"
        if isinstance(mark, AsGiven):
            return "text"
        if isinstance(mark, Checked):
            return _type(mark.annotation)
    return _type(field.annotation)


def _type(annotation: Any) -> str:
    """A type in words, such as ``whole number or 'auto'``; error messages tell the limits."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _type(inner[0])
    if origin is Literal:
        return " or ".join(f"`{value!r}`" for value in inner)
    if origin in (Union, UnionType):
        return " or ".join(_type(one) for one in inner if one is not NoneType)
    if origin in (list, dict):
        return "a list" if origin is list else "a table"
    if inspect.isclass(annotation) and issubclass(annotation, Choice):
        return "a name, or a table with a name"
    if is_dataclass(annotation):
        return "a table with " + ", ".join(f"`{field.name}`" for field in fields(annotation))
    return {str: "text", int: "whole number", float: "number", bool: "true or false", Any: "see Experiments"}[
        annotation
    ]


def _shown(default: Any) -> str:
    return "none" if default in (None, "") else f"`{getattr(default, 'name', default)}`"


# --- every command ------------------------------------------------------------------------------------------


def commands() -> str:
    """All commands with their arguments and options."""
    lines = ["# Every command", "", "Written from the code; `holdfast COMMAND --help` says the same.", ""]
    lines += _command("holdfast", typer.main.get_command(app), 2)
    return "\n".join(lines) + "\n"


def _command(path: str, command: Any, level: int) -> list[str]:
    """``command``: of typer, which brings its own copy of click."""
    if isinstance(command, TyperGroup):
        return [
            line
            for name, inner in command.commands.items()
            if not inner.hidden
            for line in _command(f"{path} {name}", inner, level)
        ]
    lines = [f"{'#' * level} {path}", "", _plain(command.help or ""), ""]
    shown = [parameter for parameter in command.params if not getattr(parameter, "hidden", False)]
    if shown:
        lines += ["| argument or option | |", "|---|---|"]
    for parameter in shown:
        is_option = isinstance(parameter, TyperOption)
        name = ", ".join(parameter.opts) if is_option else parameter.metavar or parameter.name.upper()
        lines.append(f"| `{_cell(name)}` | {_cell(_plain(parameter.help or ''))} |")
    return [*lines, ""]


def _plain(help_text: str) -> str:
    return re.sub(r"\[/?bold\]", "`", help_text).replace("\b", "").strip()


# --- every choice -------------------------------------------------------------------------------------------


def choices() -> str:
    """What can be named in an experiment, with parameters and defaults."""
    lines = [
        "# Every choice",
        "",
        "Written from the code; `holdfast list` prints the same, `--json` for programs.",
        "",
    ]
    for kind in KINDS:
        lines += [f"## {kind.capitalize()}", ""]
        for entry in entries(kind):
            page = f" [Its page](../methods/{entry['name']}.md)." if kind == "algorithms" else ""
            lines += [f"### {entry['name']}", "", f"{entry['summary']}{page}", ""]
            for parameter in entry["parameters"]:
                default = "required" if parameter["required"] else f"default `{parameter['default']!r}`"
                note = f". *{parameter['note']}*" if parameter["note"] else ""
                lines.append(f"- `{parameter['name']}`: {parameter['words']}, {default}{note}")
            lines.append("")
    return "\n".join(lines) + "\n"


# --- every name ---------------------------------------------------------------------------------------------

ROOMS = {
    "Train, compare, tune": ["holdfast.api"],
    "Data": ["holdfast.data", "holdfast.data.tables", "holdfast.data.images", "holdfast.data.lazy"],
    "Networks": ["holdfast.topology"],
    "Methods": ["holdfast.algorithms"],
    "The contract": ["holdfast.contract"],
    "Optimisers and solvers": ["holdfast.optimizers", "holdfast.solvers"],
    "Channels": ["holdfast.channels"],
    "Callbacks and loggers": [
        "holdfast.experiments.callbacks",
        "holdfast.experiments.trackers",
        "holdfast.report.progress",
    ],
}


def names() -> str:
    """Every public name of ``holdfast``, by room; what no room claims comes last."""
    left: dict[str, list[str]] = {}
    for name, home in _HOMES.items():
        left.setdefault(home, []).append(name)
    rooms = {title: [(home, left.pop(home)) for home in homes] for title, homes in ROOMS.items()}
    rooms["The rest"] = list(left.items())
    lines = [
        "# Every name in Python",
        "",
        "`import holdfast as hf`; every name below is `hf.` and the name.",
        "",
    ]
    for title, homes in rooms.items():
        lines += [f"## {title}", ""]
        for home, listed in homes:
            for name in listed:
                if not isinstance(getattr(holdfast, name), Registry):
                    lines += [f"::: {home}.{name}", "    options:", "      heading_level: 3", ""]
    return "\n".join(lines) + "\n"


def _first_line(thing: Any) -> str:
    return (inspect.getdoc(thing) or "").split("\n")[0]


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
