"""``holdfast list``: what can be chosen in an experiment."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterable
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from holdfast.cli.options import AsJson
from holdfast.core.errors import unknown

if TYPE_CHECKING:
    from rich.console import Console

    from holdfast.contract import Algorithm
    from holdfast.core.registry import Registry

REGISTRIES = {  # in which module, under which name
    "algorithms": ("holdfast.algorithms", "ALGORITHMS"),
    "topologies": ("holdfast.topology", "TOPOLOGIES"),
    "mixings": ("holdfast.topology", "MIXINGS"),
    "datasets": ("holdfast.data", "DATASETS"),
    "partitions": ("holdfast.data", "PARTITIONERS"),
    "models": ("holdfast.models", "MODELS"),
    "losses": ("holdfast.problem.losses", "LOSSES"),
    "schedules": ("holdfast.contract.parameters", "SCHEDULES"),
    "optimizers": ("holdfast.optimizers", "OPTIMIZERS"),
    "solvers": ("holdfast.solvers", "SOLVERS"),
    "channels": ("holdfast.channels", "CHANNELS"),
    "aggregations": ("holdfast.robust", "AGGREGATIONS"),
    "attacks": ("holdfast.robust", "ATTACKS"),
    "distributions": ("holdfast.topology", "DISTRIBUTIONS"),
}
KINDS = [*REGISTRIES, "metrics"]
FAMILIES = [
    "plain averaging",
    "corrected, between neighbours",
    "corrected, with a server",
    "a dual on every link",
    "primal-dual, with a server",
    "sporadic",
    "personalised",
]
OWN = "your own"  # registered without a family
TYPES = {  # what parameters are, in words; others are shown as they are written
    "Rate": "number above 0, or a schedule",
    "Weight": "number from 0, or a schedule",
    "Chance": "probability, or a schedule",
    "Probability": "probability above 0",
    "Positive": "number above 0",
    "NonNegative": "number from 0",
    "Finite": "number",
    "Count": "whole number from 1",
    "LocalSteps": "whole number from 1, or one for every node",
    "Whole": "whole number from 0",
    "Decay": "number from 0, below 1",
    "Share": "number above 0, up to 1",
    "Annotated[float, Field(gt=0, le=1)]": "number above 0, up to 1",
    "Annotated[float, Field(gt=0, le=2)]": "number above 0, up to 2",
    "Annotated[float, Field(ge=0, lt=1)]": "number from 0, below 1",
    "Optimizer": "optimiser",
    "LocalSolver": "solver",
    "Part": "names of parts of the model, or a number",
    "Gamma": "number above 0, 'safe' or 'tuned'",
    "bool": "true or false",
    "str": "text",
    "GapRule": "'strong-convexity' or 'dual-point'",
    "Bits": "whole number from 1 to 8",
    "LinkProbability": "probability above 0",
    "Concentration": "number above 0, or inf",
    "Widths": "list of whole numbers",
    "list[Count]": "list of whole numbers",
    "list[str]": "list of words",
    "Annotated[tuple[ChosenChannel, ...], Field(min_length=2), BeforeValidator(_as_tuple)]": "channels",
    "Attackers": "list of whole numbers",
    "ChosenAggregation": "aggregation",
    "AtLeastTwo": "whole number from 2",
    "TwoOrMore": "whole number from 2",
    "Copies": "whole number from 2",
    "Shifts": "whole number from 1 to 1000",
}


def list_(
    kind: Annotated[
        str | None,
        typer.Argument(
            help="algorithms, topologies, datasets, models, partitions ... (all, if left out); or runs.",
            autocompletion=lambda: [*KINDS, "runs"],
        ),
    ] = None,
    as_json: AsJson = False,
    runs_dir: Annotated[Path, typer.Option(help="Where 'holdfast list runs' looks.")] = Path("runs"),
) -> None:
    """List what can be chosen in an experiment, with parameters, defaults and one line on each.

    [bold]holdfast list runs[/bold]   the runs made so far, with what became of them
    """
    from rich.console import Console

    if kind == "runs":
        from holdfast.cli.runs import list_runs

        list_runs(runs_dir, as_json=as_json)
        return
    if kind is not None and kind not in KINDS:
        raise unknown("kind of choice", kind, KINDS, _kind_of(kind))
    kinds = [kind] if kind else KINDS
    if as_json:
        listed = {name: entries(name) for name in kinds}
        print(json.dumps(listed[kind] if kind else listed, indent=2, default=repr))
        return
    console = Console()
    for name in kinds:
        _print(console, name, entries(name))


def _kind_of(name: str) -> str | None:
    """The command that lists the choice called ``name``, if there is one."""
    kind = next((kind for kind in KINDS if name in _names(kind)), None)
    return None if kind is None else f"'holdfast list {kind}', which has it"


def _names(kind: str) -> Iterable[str]:
    """Of all choices of one kind."""
    if kind == "metrics":
        from holdfast.experiments.metrics import METRICS

        return METRICS
    return _registry(kind)


def _registry(kind: str) -> Registry[Any]:
    module, attribute = REGISTRIES[kind]
    found: Registry[Any] = getattr(import_module(module), attribute)
    return found


def entries(kind: str) -> list[dict[str, Any]]:
    """Name, summary and parameters of every choice of one kind."""
    if kind == "metrics":
        from holdfast.experiments.metrics import METRICS

        return [
            {
                "name": name,
                "summary": inspect.cleandoc(metric.summary),
                "parameters": [],
                "default": metric.default,
            }
            for name, metric in METRICS.items()
        ]
    registry = _registry(kind)
    listed = [registry.describe(name) for name in registry]
    for entry in listed:
        notes = _notes(registry[entry["name"]])
        for parameter in entry["parameters"]:
            parameter["words"] = _in_words(parameter["type"])
            parameter["note"] = notes.get(parameter["name"], "").replace("``", "`")
    if kind == "algorithms":
        for entry in listed:
            entry.setdefault("family", OWN)
            entry |= _costs(registry[entry["name"]], entry["parameters"])
        listed.sort(key=_family_place)
    return listed


def _in_words(annotation: str) -> str:
    """A type such as ``Rate | None`` in words; the default shows that None is allowed."""
    parts = [part for part in annotation.split(" | ") if part not in ("None", "Path")]
    return " or ".join(TYPES.get(part, ", ".join(_values(part)) or part) for part in parts)


def _values(annotation: str) -> list[str]:
    """What a ``Literal`` allows."""
    inside = re.fullmatch(r"Literal\[(.*)\]", annotation)
    return inside[1].split(", ") if inside else []


def _notes(maker: Any) -> dict[str, str]:
    """The comments beside parameters in the source: of a class and its bases, or of a function."""
    made_of = reversed(maker.__mro__[:-1]) if inspect.isclass(maker) else [inspect.unwrap(maker)]
    found: dict[str, str] = {}
    for part in made_of:
        if part.__module__.startswith("holdfast"):
            found |= dict(re.findall(r"^    (\w+): [^#\n]*# (.+)$", inspect.getsource(part), re.MULTILINE))
    return found


def _family_place(entry: dict[str, Any]) -> int:
    """Our families in their order, then those of others."""
    return FAMILIES.index(entry["family"]) if entry["family"] in FAMILIES else len(FAMILIES)


def _costs(maker: Any, parameters: list[dict[str, Any]]) -> dict[str, Any]:
    """Where a method runs, what it sends per round and keeps per node, with default hyperparameters.

    Nothing if it demands a hyperparameter that is not a number: there is no telling which value is sensible.
    """
    from holdfast.contract import ServerAlgorithm
    from holdfast.core.validation import accepts, hints
    from holdfast.engines.common.dry_run import dry_run
    from holdfast.topology import Network, ring, server

    sample: dict[str, float] = {}
    for parameter in parameters:
        name, annotation = parameter["name"], hints(maker)[parameter["name"]]
        if parameter["required"] or name == "lr":
            fitting = [number for number in (0.1, 1) if accepts(annotation, number)]
            if not fitting:
                return {}
            sample[name] = fitting[0]
    method = maker(**sample)
    served = isinstance(method, ServerAlgorithm) or method.capabilities.topology == "server"
    nodes = 4
    network = server(nodes) if served else Network.of(ring(nodes))
    footprint = dry_run(method, network)
    cohorts = isinstance(method, ServerAlgorithm)
    return {
        "network": ("server, cohorts" if cohorts else "server") if served else _graphs(method),
        "vectors_per_round": footprint.vectors_per_round / (nodes if served else network.directed_links),
        "vectors_per": "client, up and down" if served else "directed link",
        "state_vectors_per_node": footprint.state_vectors / nodes,
    }


def _graphs(method: Algorithm) -> str:
    return "graph" if method.capabilities.topology == "graph" else "graph or server"


def _print(console: Console, kind: str, listed: list[dict[str, Any]]) -> None:
    from rich.markup import escape
    from rich.padding import Padding

    console.print(f"\n[bold underline]{kind}[/bold underline]")
    family = None
    for entry in listed:
        if entry.get("family") != family:
            family = entry.get("family")
            console.print(f"\n[bold]{family}[/bold]")
        note = "" if entry.get("default", True) else " [dim](only when asked for)[/dim]"
        console.print(f"[bold cyan]{entry['name']}[/bold cyan]", highlight=False)
        console.print(Padding(f"{escape(entry['summary'])}{note}", (0, 0, 0, 4)), highlight=False)
        if facts := _facts(entry):
            console.print(Padding(f"[dim]{escape(facts)}[/dim]", (0, 0, 0, 4)), highlight=False)
        if entry["parameters"]:
            parameters = ", ".join(_parameter(parameter) for parameter in entry["parameters"])
            console.print(Padding(f"[green]{escape(parameters)}[/green]", (0, 0, 0, 4)), highlight=False)


def _facts(entry: dict[str, Any]) -> str:
    """The paper and the costs of an algorithm, as far as they are known."""
    known = [entry["paper"]] if "paper" in entry else []
    if "network" in entry:
        sent = entry["vectors_per_round"]
        known += [
            f"on: {entry['network']}",
            f"sends {sent:g} {'vector' if sent == 1 else 'vectors'} per {entry['vectors_per']}, "
            f"keeps {entry['state_vectors_per_node']:g} per node",
        ]
    return "; ".join(known)


def _parameter(parameter: dict[str, Any]) -> str:
    name = parameter["name"]
    return f"{name} (required)" if parameter["required"] else f"{name} = {parameter['default']!r}"
