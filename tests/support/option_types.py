"""Writes the options of a run for editors and type checkers at the end of ``spec.py``: ``make options``."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path

from holdfast.core.validation import Section
from holdfast.experiments import spec
from holdfast.experiments.spec import NetworkSpec, Objective, TrainSpec, leaves

SOURCE = Path(spec.__file__)
BEGIN = (
    "# What follows is written by ``make options`` from the classes above, for editors and type checkers.\n"
)
NAMED = {"model", "data", "rounds"}  # by ``hf.train`` itself


def written() -> str:
    """The end of the file as it should be."""
    objective, network = set(leaves(Objective)) - {"model", "loss"}, set(leaves(NetworkSpec))
    rest = set(leaves(TrainSpec)) - NAMED - objective - network
    return (
        BEGIN
        + "".join(_table("ObjectiveOptions", "TypedDict", "``hf.build_problem``", Objective, objective))
        + "".join(_table("NetworkOptions", "TypedDict", "``hf.minimize``", NetworkSpec, network))
        + "".join(_table("TrainOptions", "ObjectiveOptions, NetworkOptions", "``hf.train``", TrainSpec, rest))
    )


def _table(name: str, bases: str, function: str, section: type[Section], chosen: set[str]) -> Iterator[str]:
    yield f"\n\nclass {name}({bases}, total=False):\n"
    yield f'    """The options of {function} that it does not name itself."""\n\n'
    types = _types()
    for option, leaf in leaves(section).items():
        if option in chosen:
            yield f"    {option}: {types[leaf.key]}\n"


def _types() -> dict[str, str]:
    """The annotation of every field, as it stands in the source."""
    text = "".join(
        inspect.getsource(owner) for owner in (Objective, spec.ProblemSpec, NetworkSpec, TrainSpec)
    )
    return dict(re.findall(r"^    (\w+): ([^=#\n]+?)(?: = .*|  #.*)?$", text, re.MULTILINE))


if __name__ == "__main__":
    source = SOURCE.read_text(encoding="utf-8")
    SOURCE.write_text(source[: source.index(BEGIN)] + written(), encoding="utf-8")
