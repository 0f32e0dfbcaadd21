"""Algorithms by name: ours, or ``module:Class`` of the user's own; so are their optimisers and solvers."""

from __future__ import annotations

import inspect
from typing import Any

from holdfast.contract import ALGORITHMS, Algorithm, LocalOptimizer, Method, ServerAlgorithm, Solver
from holdfast.core.errors import HoldfastError
from holdfast.core.registry import import_named, make_own
from holdfast.core.validation import check_arguments, hints, parameters, quoted


def algorithm_class(name: str) -> Any:
    """The class of the registered algorithm ``name``, or the user's ``module:Class``.

    For the user's own experiment files only: a name with a colon imports a module.
    """
    return import_algorithm(name) if ":" in name else ALGORITHMS[name]


def build_algorithm(name: str, given: dict[str, Any]) -> Method:
    """The algorithm ``name`` with the hyperparameters ``given``, checked."""
    maker = algorithm_class(name)
    method: Method = maker(**check_arguments(f"algorithm {name!r}", maker, own_parts(given)))
    return method


def own_parts(given: dict[str, Any]) -> dict[str, Any]:
    """``given`` with the optimiser or solver made that it names as ``module:attribute``."""
    return {key: _own_part(key, value) for key, value in given.items()}


def _own_part(key: str, value: Any) -> Any:
    """``value``, or the optimiser or solver that it names as ``module:attribute``."""
    choice = {"name": value} if isinstance(value, str) else value
    if not isinstance(choice, dict) or ":" not in str(choice.get("name")):
        return value
    options = {option: given for option, given in choice.items() if option != "name"}
    return make_own(key, choice["name"], options, LocalOptimizer, Solver)


def import_algorithm(spec: str) -> type[Method]:
    """The class that ``module:Class`` points to, if it keeps the contract (``holdfast.contract``)."""
    found = import_named("algorithm", spec, "my_module:MyTracking")
    if not (inspect.isclass(found) and issubclass(found, Algorithm | ServerAlgorithm)):
        raise HoldfastError(
            f"algorithm {spec!r}: expected a subclass of holdfast.Algorithm or holdfast.ServerAlgorithm, "
            f"got {quoted(found)}"
        )
    if missing := sorted(found.__abstractmethods__):
        raise HoldfastError(f"algorithm {spec!r}: the class lacks {', '.join(missing)}")
    declared = [name for name in inspect.get_annotations(found) if "ClassVar" not in str(hints(found)[name])]
    if not set(declared) <= set(parameters(found)):
        raise HoldfastError(f"algorithm {spec!r}: write @dataclass(frozen=True) above the class")
    return found
