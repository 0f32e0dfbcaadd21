"""``hf.tune``: the best step size of a method, on a grid that widens itself."""

from __future__ import annotations

import contextlib
import shutil
import signal
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import torch
from torch import nn

from holdfast.api.comparing import data_of, folder_for, model_of
from holdfast.api.results import data_frame
from holdfast.api.training import CALLER, NodeData, plan_of, watchers
from holdfast.contract import Method
from holdfast.core.errors import HoldfastError
from holdfast.core.precision import switches_restored
from holdfast.core.validation import quoted
from holdfast.experiments.callbacks import Callback
from holdfast.experiments.choices import as_method, own_epochs
from holdfast.experiments.execution import stop_signals
from holdfast.experiments.methods import LabelledMethod
from holdfast.experiments.option_forms import GivenModel, Named
from holdfast.experiments.plan import Plan
from holdfast.experiments.record_files import Mode
from holdfast.experiments.runner import Interrupted
from holdfast.experiments.spec import TrainOptions, TrainSpec, takes_options
from holdfast.experiments.tuning import (
    Grids,
    Trial,
    Tuned,
    axis_of,
    chosen_goal,
    first_grid,
    open_folder,
    takes_whole_numbers,
)
from holdfast.experiments.tuning import tune as tune_grids
from holdfast.report.progress import run_watched
from holdfast.report.terminal import plain_text

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure


@dataclass(frozen=True, repr=False)
class Tuning:
    """What ``hf.tune`` found. Printing it shows the table of trials."""

    tuned: Tuned = field(compare=False)
    path: Path  # a run directory for the grid and for each widening; a temporary folder if none was chosen
    interrupted: bool  # by Ctrl-C: not all values were tried
    _make: Callable[[float], Method] = field(compare=False)

    @property
    def trials(self) -> list[Trial]:
        """All that were tried, by value: ``value``, ``score`` (mean, std; None if it diverged), ``note``."""
        return sorted(self.tuned.trials, key=lambda trial: trial.value)

    @property
    def best_value(self) -> float:
        """The best value of the hyperparameter."""
        best = self.tuned.goal.best(self.trials)
        if best is None:
            raise HoldfastError("there is no best value: every one that was tried diverged or failed")
        return best.value

    @property
    def best(self) -> Method:
        """The method with the best value, ready for ``hf.train``."""
        return self._make(self.best_value)

    @property
    def on_edge(self) -> bool:
        """Whether a better value may lie outside of all that were tried."""
        return any(self.tuned.on_edge(name) for name in self.tuned.algorithms)

    def __repr__(self) -> str:
        return self.table()

    def table(self, width: int = 100) -> str:
        """One line per value, in at most ``width`` characters."""
        from holdfast.report.tuning import tuning_table

        return plain_text(tuning_table(self.tuned), width)

    def plot(self) -> Figure:
        """The metric against the hyperparameter, a matplotlib figure; crosses are values that diverged."""
        from holdfast.report.tuning import tuning_figure

        return tuning_figure(self.tuned)

    def to_pandas(self) -> pandas.DataFrame:
        """The trials as a data frame (needs ``pip install 'holdfast[pandas]'``)."""
        goal = self.tuned.goal
        return data_frame(
            [
                {
                    goal.parameter: trial.value,
                    goal.metric: trial.score.mean if trial.score else None,
                    "std": trial.score.std if trial.score else None,
                    "note": trial.note,
                }
                for trial in self.trials
            ]
        )


@switches_restored()
@takes_options(TrainSpec)
def tune(
    algorithm: Method | Named | Callable[[float], Method],
    *,
    model: GivenModel | Callable[[], nn.Module],
    data: NodeData | Callable[[int], NodeData],
    rounds: int,
    parameter: str = "lr",
    values: Sequence[float] | None = None,
    metric: str | None = None,
    mode: Mode | None = None,
    widen: int = 4,
    seeds: Sequence[int] = (0,),
    callbacks: Sequence[Callback] = (),
    progress: bool | None = None,
    run_dir: str | Path | None = None,
    resume: bool = False,
    data_dir: str | Path | None = None,
    device: str | torch.device = "cpu",
    **options: Unpack[TrainOptions],
) -> Tuning:
    """Finds the best value of a hyperparameter on a grid that widens while the best lies on its edge.

    ``algorithm``: a method, whose ``parameter`` is replaced; or a function from the value to a method, such
    as ``lambda lr: hf.FedProx(lr=lr, mu=1 / lr)``.
    ``model``, ``data``, ``rounds``, ``seeds``, ``callbacks``, ``progress``: as for ``hf.compare``.
    ``parameter``: the name of the hyperparameter, a positive number.
    ``values``: the first grid; by default 1/4 to 4 times the value that the method has, by factors of two.
    ``metric``: what is compared, at the last round and as a mean over ``seeds``; by default "test_accuracy"
    if there is a test set, else "train_loss". ``mode``: "max" or "min"; known for metrics of holdfast.
    A value with which a seed diverges or fails is worse than any other.
    ``widen``: how often at most a value is added beyond the edge on which the best lies. If that is not
    enough, a warning says so, and ``on_edge`` is true.
    ``run_dir``: a new folder with a run directory for the grid and for each widening; by default a temporary
    one. ``resume``: continue the tuning in ``run_dir``, if there is one; ``widen`` may then be more.
    ``data_dir``, ``device``: as for ``hf.train``.

    {options}

    Returns a ``Tuning``: ``best`` (a method), ``best_value``, ``trials``, ``plot()``, ``to_pandas()``; print
    it for a table. Ctrl-C ends it after the round, and what there is is returned.
    """
    named, epochs = own_epochs(algorithm)
    given = as_method(named) if isinstance(named, str | Mapping) else named
    make, name, grid = _grid(given, parameter, values)
    seldom = (
        {"checkpoint_every": rounds} if run_dir is None else {}
    )  # nothing is resumed from a temporary one
    shared = {**seldom, "model": model_of(model), "data": data_of(data), "rounds": rounds, **options}

    def make_plan(grids: Grids) -> Plan:
        axis = axis_of(parameter)
        methods = [LabelledMethod(name, make(value), {axis: value}, epochs) for value in grids[name]]
        return plan_of("hf.tune", methods, seeds, shared, device=device, data_dir=data_dir)

    first = make_plan({name: grid})
    goal = chosen_goal(parameter, metric, mode, widen, first)
    for text in first.warnings():
        warnings.warn(text, RuntimeWarning, stacklevel=CALLER)
    folder = folder_for(run_dir, resume=resume)
    notes = {"parameter": parameter, "metric": goal.metric, "mode": goal.mode, "values": grid}
    open_folder(folder, {**notes, "widen": widen, "origin": "hf.tune"}, resume=resume)
    watching = watchers(callbacks, progress, [], leave=False)
    found = [Tuned(goal, [], {name: 0})]

    interrupted = True
    with contextlib.suppress(Interrupted), stop_signals(signal.SIGINT) as asked:  # what there is is returned
        found.append(
            tune_grids(goal, {name: grid}, make_plan, folder, run_watched(watching, asked), found.append)
        )
        interrupted = False
    result = Tuning(found[-1], folder, interrupted, make)
    for caveat in [] if interrupted else result.tuned.caveats:
        warnings.warn(caveat, RuntimeWarning, stacklevel=CALLER)
    if run_dir is None:
        weakref.finalize(result, shutil.rmtree, folder, ignore_errors=True)
    return result


def _grid(
    algorithm: Method | Callable[[float], Method], parameter: str, values: Sequence[float] | None
) -> tuple[Callable[[float], Method], str, list[float]]:
    """How the method is made from a value, its name, and the first values."""
    present: Any = None
    if isinstance(algorithm, Method):
        whole, present = takes_whole_numbers(type(algorithm), parameter), getattr(algorithm, parameter)
    elif not callable(algorithm) or isinstance(algorithm, type):
        raise HoldfastError(
            "algorithm: expected a method such as hf.LocalGECL(lr=0.05), or a function that makes one from a "
            f"value, got {quoted(algorithm)}"
        )
    else:
        whole = values is not None and all(isinstance(value, int) for value in values)

    def make(value: float) -> Method:
        if not isinstance(algorithm, Method):
            made = algorithm(value)
            if not isinstance(made, Method):
                raise HoldfastError(f"algorithm: expected the function to make a method, got {quoted(made)}")
            return made
        changed: dict[str, Any] = {parameter: value}
        return replace(algorithm, **changed)

    grid = first_grid("values", values, present, whole=whole)
    return make, type(make(grid[0])).__name__, grid
