"""``holdfast list``: what can be chosen in an experiment."""

from __future__ import annotations

import inspect
import json
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.padding import Padding

from holdfast.algorithms import ALGORITHMS
from holdfast.algorithms.base import Algorithm, ServerAlgorithm
from holdfast.algorithms.schedules import SCHEDULES
from holdfast.data import DATASETS, PARTITIONS
from holdfast.errors import unknown
from holdfast.metrics.measured import EXPENSIVE, METRICS
from holdfast.models import MODELS
from holdfast.objective.losses import LOSSES
from holdfast.registry import Registry
from holdfast.topology import MIXINGS, TOPOLOGIES

REGISTRIES: dict[str, Registry[Any]] = {
    "algorithms": ALGORITHMS,
    "topologies": TOPOLOGIES,
    "mixings": MIXINGS,
    "datasets": DATASETS,
    "partitions": PARTITIONS,
    "models": MODELS,
    "losses": LOSSES,
    "schedules": SCHEDULES,
}
KINDS = [*REGISTRIES, "metrics"]


def list_choices(kind: str | None, *, as_json: bool) -> None:
    """Prints the choices of one kind, or of all."""
    if kind is not None and kind not in KINDS:
        raise unknown("kind of choice", kind, KINDS)
    kinds = [kind] if kind else KINDS
    if as_json:
        listed = {name: entries(name) for name in kinds}
        print(json.dumps(listed[kind] if kind else listed, indent=2, default=repr))
        return
    console = Console()
    for name in kinds:
        _print(console, name, entries(name))


def entries(kind: str) -> list[dict[str, Any]]:
    """Name, summary and parameters of every choice of one kind."""
    if kind == "metrics":
        return [
            {
                "name": name,
                "summary": inspect.cleandoc(metric.__doc__ or ""),
                "parameters": [],
                "default": name not in EXPENSIVE,
            }
            for name, metric in METRICS.items()
        ]
    registry = REGISTRIES[kind]
    listed = [registry.describe(name) for name in registry]
    if kind == "algorithms":
        for entry in listed:
            entry["network"] = _network_of(registry[entry["name"]])
    return listed


def _network_of(maker: Any) -> str:
    """What an algorithm runs on."""
    if issubclass(maker, ServerAlgorithm):
        return "server, cohorts" if maker.allows_cohorts else "server"
    assert issubclass(maker, Algorithm)
    return "server" if maker.needs_server else "any graph or server"


def _print(console: Console, kind: str, listed: list[dict[str, Any]]) -> None:
    console.print(f"\n[bold underline]{kind}[/bold underline]")
    for entry in listed:
        runs_on = f"  [dim]{entry['network']}[/dim]" if "network" in entry else ""
        note = "" if entry.get("default", True) else " [dim](only when asked for)[/dim]"
        console.print(f"[bold cyan]{entry['name']}[/bold cyan]{runs_on}", highlight=False)
        console.print(Padding(f"{escape(entry['summary'])}{note}", (0, 0, 0, 4)), highlight=False)
        if entry["parameters"]:
            parameters = ", ".join(_parameter(parameter) for parameter in entry["parameters"])
            console.print(Padding(f"[green]{escape(parameters)}[/green]", (0, 0, 0, 4)), highlight=False)


def _parameter(parameter: dict[str, Any]) -> str:
    name = parameter["name"]
    return f"{name} (required)" if parameter["required"] else f"{name} = {parameter['default']!r}"
