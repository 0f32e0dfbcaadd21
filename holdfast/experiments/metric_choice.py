"""Metrics by name: those that are registered, and what can be said of a figure on the test set.

A figure is "accuracy", "loss", or a score of the user's. Of the figure f there is

- ``average_f``: of the average model; a score alone, ``f``, is the same;
- ``test_f``: the mean over the nodes' own models; ``worst_f`` (accuracy and loss), ``p10_f``: their
  percentiles; ``node_f``: all of them, in columns ``f_node0`` ...;
- ``personal_f``: the mean over personalised models; ``worst_personal_f``, ``p10_personal_f``,
  ``node_personal_f`` as above;
- ``accuracy`` may be the user's where the loss has none;
- ``class_accuracy``: that of the average model for each class, in columns ``accuracy_class0`` ...
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from holdfast.core.errors import HoldfastError, unknown
from holdfast.core.user_code import import_named
from holdfast.core.validation import quoted
from holdfast.experiments.config import Metrics
from holdfast.experiments.measured import Measured, Reads
from holdfast.experiments.metrics import METRICS, Metric
from holdfast.experiments.scores import Score

SAID = r"(average|test|worst|node|p\d+)"


@dataclass(frozen=True)
class Choosing:
    """What a problem has to be measured: classes None without accuracy, 0 if they are not known."""

    nodes: int
    has_test: bool
    classes: int | None
    scores: dict[str, Score] = field(default_factory=dict)
    finite: bool = True  # whether all training samples can be read

    def metrics(self, name: str) -> dict[str, Metric]:
        """The metric called ``name``, or the columns that it stands for."""
        if name == "default":
            chosen = [self._found(name) for name, metric in METRICS.items() if metric.default]
            return {
                name: metric
                for found in chosen
                for name, metric in found.items()
                if self._lacking(metric) is None
            }
        found = self._found(name)
        for metric in found.values():
            if lacking := self._lacking(metric):
                raise HoldfastError(f"metric {name!r} needs {lacking}")
        return found

    def _found(self, name: str) -> dict[str, Metric]:
        """A registered metric, unless it is of an accuracy of the user's own; or what is derived."""
        registered = METRICS.get(name)
        if registered is None or (registered.accuracy and "accuracy" in self.scores):
            return self._derived(name)
        return {name: registered}

    def _lacking(self, metric: Metric) -> str | None:
        if not self.finite and metric.reads in (Reads.TRAIN, Reads.TRAIN_GRADIENT):
            return "training samples that come to an end, and these do not"
        if metric.needs_test and not self.has_test:
            return "a test set: give test="
        if metric.accuracy and self.classes is None:
            return (
                "an accuracy, and this loss has none: give your own, "
                'metrics={"accuracy": lambda outputs, targets: ...}'
            )
        return None

    def _derived(self, name: str) -> dict[str, Metric]:
        if name == "class_accuracy":
            if self.classes == 0:
                raise HoldfastError("metric 'class_accuracy' needs class numbers as targets; these are none")
            make = partial(Metric, reads=Reads.AVERAGE_ON_TEST, accuracy=True, must_be_finite=False)
            return {f"accuracy_class{c}": make(_of_class(c)) for c in range(self.classes or 1)}
        for figure in ("accuracy", "loss", *self.scores):
            parts = re.fullmatch(rf"(?:{SAID}_)?(personal_)?{re.escape(figure)}", name)
            if parts is None:
                continue
            said, personal = parts[1], parts[2] is not None
            if personal and said not in ("average", "test"):
                return self._of_nodes(name, figure, said or "test", personal)
            if (not personal and said in ("test", "worst", "node")) or (said or "").startswith("p"):
                return self._of_nodes(name, figure, said, personal)
            if not personal and figure in self.scores:
                options = self._options(figure)
                return {name: Metric(_of_average(figure), Reads.AVERAGE_ON_TEST, **options)}
        prefixes, figures = ("test", "worst", "p10", "node", "personal"), ("accuracy", "loss", *self.scores)
        known = [f"{prefix}_{figure}" for figure in figures for prefix in prefixes]
        raise unknown("metric", name, {*METRICS, *known, "class_accuracy", *self.scores})

    def _of_nodes(self, name: str, figure: str, said: str, personal: bool) -> dict[str, Metric]:
        """What is ``said`` of a figure of all nodes: its mean ("test"), the worst, a percentile, or all."""
        figures = _personal_tests if personal else _node_tests
        reads = Reads.PERSONAL_ON_TEST if personal else Reads.NODES_ON_TEST
        options = self._options(figure)
        if said == "node":
            column = name.removeprefix("node_") + "_node"
            picks = {f"{column}{i}": _picked(figures, figure, i) for i in range(self.nodes)}
            return {column: Metric(pick, reads, **options) for column, pick in picks.items()}
        compute = _over_nodes(figures, figure, self._reduction(name, figure, said))
        return {name: Metric(compute, reads, **options)}

    def _options(self, figure: str) -> dict[str, Any]:
        score = (figure, self.scores[figure]) if figure in self.scores else None
        of_loss = figure == "accuracy" and score is None
        return {"accuracy": of_loss, "must_be_finite": figure == "loss", "score": score}

    def _reduction(self, name: str, figure: str, said: str) -> Callable[[Tensor], Tensor]:
        if said == "test":
            return torch.mean
        if said == "worst":
            if figure in self.scores and figure != "accuracy":
                raise HoldfastError(
                    f"metric {name!r}: whether a high {figure} is bad is not known; use p0 or p100"
                )
            return torch.amin if figure == "accuracy" else torch.amax
        percent = int(said.removeprefix("p"))
        if percent > 100:
            raise HoldfastError(f"metric {name!r}: a percentile lies between 0 and 100")
        return lambda values: torch.quantile(values, percent / 100)


def choose_metrics(
    wanted: Metrics, *, has_test: bool, classes: int | None, nodes: int = 1, finite: bool = True
) -> dict[str, Metric]:
    """``wanted``, checked, column by column; "default" stands for all that are available and cheap.

    A score of the user's may be named as ``module:attribute``. ``finite``: whether samples have an end.
    """
    scores: dict[str, Score] = {}
    names: list[str] = []
    for item in [wanted] if isinstance(wanted, str) else wanted:
        if isinstance(item, str) and ":" not in item:
            names.append(item)
            continue
        own = {item.partition(":")[2]: item} if isinstance(item, str) else item
        scores |= {name: _score(name, score, classes) for name, score in own.items()}
        names += own
    choosing = Choosing(nodes, has_test, classes, scores, finite)
    chosen: dict[str, Metric] = {}
    for name in names:
        chosen |= choosing.metrics(name)
    return chosen


def _score(name: str, given: Any, classes: int | None) -> Score:
    if name in METRICS or name in ("loss", "default") or (name == "accuracy" and classes is not None):
        raise HoldfastError(f"metric {name!r}: this name is taken; call yours something else")
    score = import_named("metric", given, "my_metrics:mae") if isinstance(given, str) else given
    if isinstance(score, type):
        score = score()  # such as a class of torchmetrics
    if not callable(score):
        raise HoldfastError(
            f"metric {name!r}: expected a function of (outputs, targets), got {quoted(score)}"
        )
    checked: Score = score
    return checked


Figures = Callable[[Measured], Mapping[str, Tensor]]


def _node_tests(m: Measured) -> Mapping[str, Tensor]:
    return m.node_tests


def _personal_tests(m: Measured) -> Mapping[str, Tensor]:
    return m.personal_tests


def _of_average(figure: str) -> Callable[[Measured], Tensor]:
    return lambda m: m.average_scores[figure]


def _of_class(c: int) -> Callable[[Measured], Tensor]:
    def accuracy(m: Measured) -> Tensor:
        known = m.class_accuracies
        return known[c] if c < len(known) else known.new_full((), torch.nan)

    return accuracy


def _picked(figures: Figures, figure: str, node: int) -> Callable[[Measured], Tensor]:
    return lambda m: m.everybody(figures(m)[figure])[node]


def _over_nodes(
    figures: Figures, figure: str, reduce: Callable[[Tensor], Tensor]
) -> Callable[[Measured], Tensor]:
    return lambda m: reduce(m.of_honest(m.everybody(figures(m)[figure].double())))
