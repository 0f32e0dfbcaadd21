"""Sweeps: any value of an experiment may be a list, and then the experiment is run for every element.

The dotted key of such a value becomes a column of the metrics.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from holdfast.algorithms import ALGORITHMS
from holdfast.algorithms.load import import_algorithm
from holdfast.core.errors import HoldfastError
from holdfast.core.registry import Registry
from holdfast.core.validation import accepts, hints, quoted
from holdfast.experiments.option_forms import OneOf
from holdfast.experiments.spec import Experiment, leaves

REGISTRIES: dict[str, Registry[Any]] = {
    ".".join(filter(None, (leaf.table, leaf.key))): mark.registry
    for leaf in leaves(Experiment).values()
    for mark in leaf.field.metadata
    if isinstance(mark, OneOf)
} | {"algorithm": ALGORITHMS}


@dataclass(frozen=True)
class Variant:
    """One point of the sweep."""

    axes: dict[str, Any]  # dotted key -> value, for the keys that were lists
    experiment: Experiment


def expand(raw: dict[str, Any]) -> list[Variant]:
    """Every point of the sweep that ``raw`` (with defaults) spans, checked."""
    variants = []
    shared = {key: value for key, value in raw.items() if key != "algorithm"}
    for outer, plain in _sweep(shared):
        for entry in raw["algorithm"]:
            for inner, algorithm in _sweep({"algorithm": entry}):
                experiment = _validated(plain | algorithm)
                variants.append(Variant(outer | inner, experiment))
    _distinct_labels(variants)
    return variants


def _sweep(table: dict[str, Any]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """(axes, table without lists) for every combination of the listed values in ``table``."""
    axes = dict(_find_axes(table, ()))
    for values in itertools.product(*axes.values()):
        point = copy.deepcopy(table)
        for path, value in zip(axes, values, strict=True):
            target = point
            for part in path[:-1]:
                target = target[part]
            target[path[-1]] = value
        yield {".".join(path): value for path, value in zip(axes, values, strict=True)}, point


def _find_axes(
    table: Mapping[str, Any], path: tuple[str, ...]
) -> Iterator[tuple[tuple[str, ...], list[Any]]]:
    for key, value in table.items():
        here = (*path, key)
        if isinstance(value, dict):
            yield from _find_axes(value, here)
        elif isinstance(value, list) and not _is_list_valued(here, table, value):
            if not value:
                raise HoldfastError(f"{'.'.join(here)}: an empty list leaves nothing to run")
            for element in value:
                if value.count(element) > 1:
                    raise HoldfastError(
                        f"{'.'.join(here)}: a list is a sweep over its elements, but {quoted(element)} "
                        "stands in it twice"
                    )
            yield here, value


def _is_list_valued(path: tuple[str, ...], table: Mapping[str, Any], value: list[Any]) -> bool:
    """Whether a list is the value itself (say, the hidden sizes of an MLP), not a sweep over its elements."""
    if path in (("seeds",), ("metrics",)):
        return True
    if path[:2] == ("algorithm", "local_steps"):
        return path[2:] == ("nodes",)  # one number for each node is {nodes = [...]} here
    if path in (("network", "compute"), ("network", "links")):
        return not any(isinstance(element, list | dict) for element in value)
    maker = _maker(".".join(path[:-1]), table.get("name"))
    annotation = hints(maker).get(path[-1]) if maker else None
    if annotation is None:
        return False
    # A list with no valid element is taken as a mistaken value, so that the error speaks of the whole list.
    return accepts(annotation, value) or not any(accepts(annotation, element) for element in value)


def _maker(key: str, name: Any) -> Callable[..., Any] | None:
    """The class or factory of what an experiment names under ``key``; None if there is no such name."""
    if key == "algorithm" and isinstance(name, str) and ":" in name:
        return import_algorithm(name)
    registry = REGISTRIES.get(key)
    return registry[name] if registry and isinstance(name, str) and name in registry else None


def _validated(point: dict[str, Any]) -> Experiment:
    experiment = Experiment.of(point)
    if not experiment.algorithm.label:
        experiment.algorithm.label = experiment.algorithm.name
    return experiment


def _distinct_labels(variants: list[Variant]) -> None:
    seen: set[tuple[str, str]] = set()
    for variant in variants:
        identity = (variant.experiment.algorithm.label, repr(variant.axes))
        if identity in seen:
            raise HoldfastError(
                f"algorithm: {identity[0]!r} stands in the experiment twice; give each a 'label' of its own"
            )
        seen.add(identity)
