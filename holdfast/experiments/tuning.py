"""Finding the best value of a hyperparameter on a grid that widens while the best lies on its edge.

A tuning is a folder with one run directory for the first grid and one for each widening: ``grid-0``,
``grid-1`` and so on. Which values come next follows from what is recorded, so an interrupted tuning is simply
run again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from holdfast.core.errors import HoldfastError, unknown
from holdfast.core.files import write_json
from holdfast.core.validation import accepts, hints, parameters, quoted
from holdfast.experiments.plan import Plan
from holdfast.experiments.record import RunRecord, Spread, load_record
from holdfast.experiments.record_files import Mode, better, check_choosing
from holdfast.experiments.runner import Runner

FILE = "tuning.json"
AROUND = (0.25, 0.5, 1.0, 2.0, 4.0)  # the first grid, as multiples of the value that is there
FARTHEST = 10.0  # times the edge, for the next value beyond it

Grids = Mapping[str, Sequence[float]]
"""The values to try, by the label of the algorithm."""


class Trial(NamedTuple):
    """One value of the hyperparameter."""

    algorithm: str
    value: float
    score: (
        Spread | None
    )  # the metric at the last round, over the seeds; None: a seed diverged or failed, or it is undefined
    note: str  # what did not go as planned, such as "diverged at round 3"


@dataclass(frozen=True)
class Goal:
    """What is tuned, and towards what."""

    parameter: str
    metric: str
    mode: Mode
    widen: int  # at most so many times, for each algorithm
    private: bool = False  # whether every trial spends a privacy budget

    def best(self, trials: Sequence[Trial]) -> Trial | None:
        """The best of them, the smallest value of several that are equal; None if all diverged."""
        scored = [trial for trial in trials if trial.score is not None]
        return max(scored, key=self.rank, default=None)

    def rank(self, trial: Trial) -> float:
        """Higher is better; what diverged is worst."""
        if trial.score is None:
            return float("-inf")
        return trial.score.mean if self.mode == "max" else -trial.score.mean

    def next_value(self, trials: Sequence[Trial]) -> float | None:
        """A value beyond the edge on which the best lies; None if it does not.

        If all diverged, smaller ones are tried. An edge that is only as good as its neighbour does not count.
        """
        line = sorted(trials, key=lambda trial: trial.value)
        values, ranks = [trial.value for trial in line], [self.rank(trial) for trial in line]
        best = max(ranks)
        if best == float("-inf") or (ranks[0] == best and ranks[1] < best):
            return _beyond(values[1], values[0])
        if ranks[-1] == best and ranks[-2] < best:
            return _beyond(values[-2], values[-1])
        return None


def _beyond(inner: float, edge: float) -> float | None:
    """As far beyond ``edge`` as that is from ``inner``, by ratio; whole numbers stay whole."""
    found = edge * min(max(edge / inner, 1 / FARTHEST), FARTHEST)
    if isinstance(edge, int) and isinstance(inner, int):
        return round(found) if round(found) >= 1 and round(found) != edge else None
    return float(f"{found:.6g}")


@dataclass(frozen=True)
class Tuned:
    """What a tuning found so far."""

    goal: Goal
    trials: list[Trial]
    widened: dict[str, int]  # by algorithm: how often

    def of(self, algorithm: str) -> list[Trial]:
        """The trials of one algorithm, by value."""
        return sorted((t for t in self.trials if t.algorithm == algorithm), key=lambda trial: trial.value)

    @property
    def algorithms(self) -> list[str]:
        return list(dict.fromkeys(trial.algorithm for trial in self.trials))

    def best(self, algorithm: str) -> Trial | None:
        """The best trial of one algorithm; None if all diverged."""
        return self.goal.best(self.of(algorithm))

    def on_edge(self, algorithm: str) -> bool:
        """Whether a better value may lie outside of all that were tried."""
        return self.goal.next_value(self.of(algorithm)) is not None

    @property
    def caveats(self) -> list[str]:
        """What a reader must know before trusting the best values."""
        found = []
        if self.goal.private:
            found.append(
                f"each of the {len(self.trials)} trials spent the privacy budget: on the same data, they "
                "spend more together than the epsilon of a run says"
            )
        for name in self.algorithms:
            often = f", after {self.widened[name]} widenings" if self.widened[name] else ""
            values, best = [trial.value for trial in self.of(name)], self.best(name)
            same = len({self.goal.rank(trial) for trial in self.of(name)}) == 1
            if best is None:
                found.append(f"{name}: everything diverged or failed, down to {values[0]:g}{often}")
            elif same and len(values) > 1:
                grid = f"{values[0]:g} to {values[-1]:g}"
                found.append(
                    f"{name}: all values of {self.goal.parameter}, {grid}, gave the same {self.goal.metric}; "
                    "none of them is best"
                )
            elif self.on_edge(name):
                edge = "smallest" if best.value == values[0] else "largest"
                found.append(
                    f"{name}: the best {self.goal.parameter}, {best.value:g}, is the {edge} tried{often}"
                )
        return found


def tune(
    goal: Goal,
    grids: Grids,
    make_plan: Callable[[Grids], Plan],
    folder: Path,
    execute: Callable[[Runner], None],
    so_far: Callable[[Tuned], None] = lambda tuned: None,
) -> Tuned:
    """Runs the grids, then what lies beyond their edges; ``execute`` runs what is left of a run directory."""
    trials: list[Trial] = []
    widened = dict.fromkeys(grids, 0)
    todo: Grids = {name: sorted(values) for name, values in grids.items()}
    wave = 0
    while todo:
        plan, run = make_plan(todo), folder / f"grid-{wave}"
        if (run / "summary.json").is_file():
            runner = Runner.reopen(plan, run)
        else:
            run.mkdir(exist_ok=True)
            runner = Runner.begin(plan, run)
        execute(runner)
        trials += read_trials(load_record(run), goal)
        tuned = Tuned(goal, trials, widened)
        so_far(tuned)
        beyond = {name: goal.next_value(tuned.of(name)) for name in grids if widened[name] < goal.widen}
        todo = {name: [value] for name, value in beyond.items() if value is not None}
        widened = {name: count + (name in todo) for name, count in widened.items()}
        wave += 1
    return Tuned(goal, trials, widened)


def read_trials(record: RunRecord, goal: Goal) -> list[Trial]:
    """One for each line of the record."""
    found = []
    for group, row in zip(record.groups, record.final_table(), strict=True):
        text = str(group.jobs[0]["axes"][axis_of(goal.parameter)])
        value = int(text) if text.isdecimal() else float(text)
        score = row.defined(goal.metric) if row.status in ("done", "stopped") else None
        found.append(Trial(row.algorithm, value, score, row.note))
    return found


def axis_of(parameter: str) -> str:
    """The swept key, as in an experiment file."""
    return f"algorithm.{parameter}"


def chosen_goal(parameter: str, metric: str | None, mode: Mode | None, widen: int, plan: Plan) -> Goal:
    """The goal, checked against what ``plan`` records; by default test accuracy, else the training loss."""
    recorded = list(plan.setting(plan.jobs[0]).metrics)
    name = metric or next((name for name in ("test_accuracy", "train_loss") if name in recorded), recorded[0])
    if name not in recorded:
        raise unknown("metric", name, recorded)
    if not isinstance(widen, int) or widen < 0:
        raise HoldfastError(f"widen: should be a whole number, 0 or more, got {quoted(widen)}")
    private = plan.setting(plan.jobs[0]).objective.private is not None
    if private:
        check_choosing(name, "tuning")
    return Goal(parameter, name, better(name, mode), widen, private)


def first_grid(where: str, values: Sequence[float] | None, present: Any, *, whole: bool) -> list[float]:
    """The values to begin with, checked; by default around the one that is ``present``."""
    if values is not None and not isinstance(values, Sequence):
        raise HoldfastError(f"{where}: expected a list such as [0.01, 0.1, 1], got {quoted(values)}")
    if values is None:
        if isinstance(present, bool) or not isinstance(present, int | float) or present <= 0:
            raise HoldfastError(f"{where}: give the values to try; there is no number to start from")
        scaled = [present * factor for factor in AROUND]
        values = sorted({max(1, round(value)) for value in scaled}) if whole else scaled
    numbers = [v for v in values if isinstance(v, int if whole else (int, float)) and v > 0 and v is not True]
    if len(numbers) < len(values) or len(set(numbers)) < max(2, len(numbers)):
        kind = "whole" if whole else "positive"
        raise HoldfastError(f"{where}: expected two or more different {kind} numbers, got {quoted(values)}")
    return sorted(numbers if whole else map(float, numbers))


def takes_whole_numbers(method: type, parameter: str) -> bool:
    """Whether a hyperparameter, such as ``local_steps``, is a number of something."""
    if parameter not in parameters(method):
        raise unknown(f"parameter of {method.__name__}", parameter, parameters(method))
    return not accepts(hints(method)[parameter], 1.5)


def read_notes(folder: Path) -> dict[str, Any]:
    """What ``open_folder`` noted about the tuning in ``folder``."""
    try:
        notes: dict[str, Any] = json.loads((folder / FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise HoldfastError(f"{folder / FILE} is damaged: {error}") from None
    return notes


def open_folder(folder: Path, notes: dict[str, Any], *, resume: bool) -> None:
    """Makes ``folder`` that of a tuning with ``notes``, or checks that it is.

    ``widen`` may differ: a tuning that ended on an edge can go on.
    """
    file = folder / FILE
    if file.is_file():
        if not resume:
            raise HoldfastError(
                f"run_dir: {folder} holds a tuning; go on with it by resume=True, or choose another folder"
            )
        before = read_notes(folder)
        changed = [name for name in notes if name != "widen" and before.get(name) != notes[name]]
        if changed:
            raise HoldfastError(
                f"{folder}: the tuning began with other arguments: {', '.join(changed)}; give the same, or "
                "choose another run_dir"
            )
    elif folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise HoldfastError(f"run_dir: {folder} exists and is no tuning of holdfast; choose another folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise HoldfastError(f"cannot make the folder {folder}: {error.strerror}") from None
    write_json(file, notes)
