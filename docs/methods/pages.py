"""Adds to each method's hand-written page what the code knows, and lists the pages in the navigation.

A page, NAME.md, has the equations, what the method is good for and when it fails. mkdocs calls ``on_config``
and ``on_page_markdown``. Facts are found by asking the library what it would run, and by a dry run that
counts what is sent. Citations, settings and curves come from papers.toml, methods.toml and curves.py.
"""

from __future__ import annotations

import json
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.pages import Page

from holdfast.algorithms import ALGORITHMS
from holdfast.channels import CHANNELS
from holdfast.cli.listing import entries
from holdfast.contract import Channel, Method, ServerAlgorithm
from holdfast.core.errors import HoldfastError
from holdfast.core.tree import leaves
from holdfast.core.validation import Cohort, parameters
from holdfast.engines.common.counters import Footprint
from holdfast.engines.common.dry_run import dry_run
from holdfast.engines.common.fit import check_fit
from holdfast.engines.common.profile import profile
from holdfast.topology import Network, base_graph, ring, server

HERE = Path(__file__).parent
NODES = 4
ROUNDING = 1e-13  # results below this are rounding error
TABLE = "<!-- the table of methods -->"
COMPRESSORS = {  # one of each kind of channel that changes messages
    "half": CHANNELS.build("half", {}),
    "half with feedback": CHANNELS.build("half", {"feedback": True}),
    "compressors": CHANNELS.build("uniform", {}),
}


def _read(name: str) -> dict[str, Any]:
    return tomllib.loads((HERE / name).read_text(encoding="utf-8"))


METHODS, PAPERS = _read("methods.toml"), _read("papers.toml")
RESULTS = json.loads((HERE / "figures" / "results.json").read_text(encoding="utf-8"))


# --- mkdocs ------------------------------------------------------------------------------------------------


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Lists the methods by family, after what mkdocs.yml says of "Methods"."""
    [section] = [entry["Methods"] for entry in config.nav or [] if "Methods" in entry]
    families: dict[str, list[str]] = {}
    for entry in listed():
        families.setdefault(entry["family"].capitalize(), []).append(f"methods/{entry['name']}.md")
    section += [{family: pages} for family, pages in families.items()]
    return config


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """The page with everything that is not written by hand."""
    folder, _, name = page.file.src_uri.removesuffix(".md").rpartition("/")
    if folder != "methods":
        return markdown
    return markdown.replace(TABLE, table()) if name == "index" else whole_page(name, markdown)


def whole_page(name: str, written: str) -> str:
    """``written`` with facts after its introduction; the curve, how to run it and the papers at its end."""
    introduction, rest = written.split("\n## ", 1)
    return "\n".join(
        [introduction, facts(name), f"## {rest}", curve(name), lines_that_run(name), papers(name)]
    )


@cache
def listed() -> list[dict[str, Any]]:
    return entries("algorithms")


# --- facts -------------------------------------------------------------------------------------------------


def by_hand(name: str) -> dict[str, Any]:
    """What methods.toml says of the method."""
    if name not in METHODS:
        raise PluginError(f"docs/methods/methods.toml has no table [{name}]: write one, then draw its curve")
    found: dict[str, Any] = METHODS[name]
    return found


def results(name: str) -> dict[str, float]:
    """What curves.py found for the method."""
    if name not in RESULTS:
        raise PluginError(f"{name} has no curve: run python docs/methods/curves.py {name}")
    found: dict[str, float] = RESULTS[name]
    return found


@cache
def example(name: str) -> Method:
    """The method with the settings of its curve."""
    return ALGORITHMS.build(name, by_hand(name)["settings"])


def is_served(method: Method) -> bool:
    return isinstance(method, ServerAlgorithm) or method.capabilities.topology == "server"


def runs(method: Method, over: Network, cohort: Cohort = "all", channel: Channel | None = None) -> bool:
    """Whether the library would run it."""
    try:
        check_fit(method, NODES, over, cohort, channel or CHANNELS.build("identity", {}))
    except HoldfastError:
        return False
    return True


def usual_network(method: Method) -> Network:
    return server(NODES) if is_served(method) else Network.of(ring(NODES))


def facts(name: str) -> str:
    """What it runs on, sends, keeps and takes, as a table."""
    method, family = example(name), ALGORITHMS.describe(name)
    rows = {
        "Runs on": places(method),
        "Cohorts": "yes" if runs(method, server(NODES), 2) else "no: needs every node in every round",
        "Sends": sends(method),
        "Keeps": f"{_vectors_of(footprint(method).state_vectors / NODES)} per node between rounds",
        "Local steps": local_steps(method),
        "Channels": channels(method),
        "Needs convex f_i": "yes" if method.capabilities.assumes_convex else "no",
        "Paper": family["paper"],
    }
    lines = ["", f"| `{name}` | |", "|---|---|", *(f"| {key} | {value} |" for key, value in rows.items()), ""]
    return "\n".join(lines)


def places(method: Method) -> str:
    changing = base_graph(NODES)
    found = {
        "any connected graph": runs(method, Network.of(ring(NODES))),
        "graphs that change": runs(method, changing),
        "a server": runs(method, server(NODES)),
    }
    words = ", ".join(place for place, fits in found.items() if fits)
    if found["any connected graph"] and not found["graphs that change"]:
        words += "; [not on links that change](../graphs-that-change.md)"
    return words


@cache
def footprint(method: Method) -> Footprint:
    return dry_run(method, usual_network(method), rounds=4)


def sends(method: Method) -> str:
    """Vectors per round, to whom, and bytes for each parameter of the model."""
    counted = footprint(method)
    if is_served(method):
        up = counted.vectors_per_round / NODES / 2
        down = up
        if isinstance(method, ServerAlgorithm):
            found = profile(method, usual_network(method))
            up = float(len(_vectors(found.messages[0], found.one.dim)))
            down = counted.vectors_per_round / NODES - up
        text = f"{_vectors_of(up)} up, {down:g} down per client and round: "
        text += f"{4 * up:g} + {4 * down:g} bytes per parameter"
    else:
        each = counted.vectors_per_link
        text = f"{_vectors_of(each)} over every directed link and round: {4 * each:g} bytes per parameter"
    if counted.scalars_per_round > 0:
        text += ", plus a single number"
    if counted.scalars_per_round < 0:
        text += ", except for those that stay at the node"
    if counted.vectors_at_start:
        each = counted.vectors_at_start / usual_network(method).directed_links
        text += f"; {_vectors_of(each)} more before the first round"
    return text


def _vectors(message: Any, dim: int) -> list[Any]:
    return [leaf for leaf in leaves(message) if leaf.shape[-1] == dim]


def _vectors_of(count: float) -> str:
    return {0: "nothing", 1: "1 vector"}.get(count, f"{count:g} vectors")


def local_steps(method: Method) -> str:
    """Who takes them: an optimiser, a solver, or the method itself."""
    taken = parameters(type(method))
    who = []
    if "optimizer" in taken:
        who.append("any [optimiser](../optimizers.md)")
    if method.capabilities.uses_solver:
        who.append("a solver of the local problem")
    return " or ".join(who) or "plain SGD, built into the method"


def channels(method: Method) -> str:
    over = usual_network(method)
    taken = [kind for kind, channel in COMPRESSORS.items() if runs(method, over, channel=channel)]
    if len(taken) == len(COMPRESSORS):
        return "[all](../channels.md)"
    return f"[{', '.join(taken)} only](../channels.md)" if taken else "none"


# --- the curve, the lines, the papers ----------------------------------------------------------------------


def curve(name: str) -> str:
    ends = "; ".join(f"{label}: {_short(value)}" for label, value in results(name).items())
    what = (
        "The nodes' own losses"
        if ALGORITHMS.describe(name)["family"] == "personalised"
        else "The distance to the optimum"
    )
    return "\n".join(
        [
            "\n## A curve\n",
            f"![{by_hand(name)['title']} on heterogeneous quadratics](figures/{name}.svg)\n",
            f"*{what} after 300 rounds, relative to the start. {ends}.",
            "[The problem](index.md#the-curves).*",
        ]
    )


def _short(value: float) -> str:
    return "below 1e-13 (rounding)" if value <= ROUNDING else f"{value:.2g}"


def python_line(name: str) -> str:
    given = ", ".join(f"{key}={_literal(value)}" for key, value in by_hand(name)["settings"].items())
    return f"hf.{ALGORITHMS[name].__name__}({given})"


def _literal(value: Any) -> str:
    return json.dumps(value) if isinstance(value, str) else repr(value)


def toml_line(name: str) -> str:
    given = ", ".join(f"{key} = {json.dumps(value)}" for key, value in by_hand(name)["settings"].items())
    return f'algorithm = {{ name = "{name}", {given} }}'


def lines_that_run(name: str) -> str:
    place = "server" if is_served(example(name)) else "ring"
    return (
        "\n## Run it\n\n"
        f"```python\nmethod = {python_line(name)}\n"
        f'result = hf.train(method, model=net, data=data, topology="{place}", rounds=100)\n```\n\n'
        f"```toml\n{toml_line(name)}\n```\n\n" + hyperparameters(name)
    )


def hyperparameters(name: str) -> str:
    """All of them, with what stands beside them in the source."""
    [entry] = [entry for entry in listed() if entry["name"] == name]
    lines = ["| hyperparameter | | default | |", "|---|---|---|---|"]
    for one in entry["parameters"]:
        default = "required" if one["required"] else f"`{one['default']!r}`"
        lines.append(f"| `{one['name']}` | {one['words']} | {default} | {one['note']} |".replace("||", "‖"))
    return "\n".join(lines) + "\n"


def papers(name: str) -> str:
    return "\n".join(["\n## Papers\n", *(f"- {citation(key)}" for key in by_hand(name)["papers"]), ""])


def citation(key: str) -> str:
    paper = PAPERS[key]
    text = f"{paper['authors']}. *{paper['title']}*. {paper['where']}."
    if "arxiv" in paper:
        text += f" [arXiv:{paper['arxiv']}](https://arxiv.org/abs/{paper['arxiv']})."
    if "checked" in paper:
        text += f" [Checked here](../papers/{paper['checked']}.md)."
    return text


# --- the table of all methods ------------------------------------------------------------------------------


def table() -> str:
    lines = ["| method | runs on | sends | keeps | ends at |", "|---|---|---|---|---|"]
    family = None
    for entry in listed():
        if entry["family"] != family:
            family = entry["family"]
            lines.append(f"| **{family.capitalize()}** | | | | |")
        lines.append(f"| {' | '.join(_row(entry['name']))} |")
    return "\n".join(lines)


def _row(name: str) -> list[str]:
    method, title = example(name), by_hand(name)["title"]
    counted, served = footprint(method), is_served(method)
    on = "server" if served else "graph or server" if runs(method, server(NODES)) else "graph"
    return [
        f"[{title}]({name}.md)",
        f"{on}, cohorts" if runs(method, server(NODES), 2) else on,
        f"{counted.vectors_per_round / NODES:g} up + down"
        if served
        else f"{counted.vectors_per_link:g} per link",
        f"{counted.state_vectors / NODES:g}",
        "0" if results(name)[title] <= ROUNDING else f"{results(name)[title]:.1g}",
    ]
