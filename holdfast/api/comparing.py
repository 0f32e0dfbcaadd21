"""``hf.compare``: several methods on the same problem, over several seeds."""

from __future__ import annotations

import contextlib
import inspect
import shutil
import signal
import tempfile
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import torch
from torch import nn

from holdfast.api.results import data_frame
from holdfast.api.training import CALLER, NodeData, as_read, needs_folder, plan_of, watchers
from holdfast.contract import Method
from holdfast.core.errors import HoldfastError, unknown
from holdfast.core.files import read_tensors
from holdfast.core.precision import switches_restored
from holdfast.core.validation import quoted
from holdfast.experiments.callbacks import Callback
from holdfast.experiments.methods import LabelledMethod
from holdfast.experiments.option_forms import GivenModel, Named, OfSeed
from holdfast.experiments.record import RunRecord, load_record
from holdfast.experiments.runner import Interrupted, open_run
from holdfast.experiments.spec import TrainOptions, TrainSpec, takes_options
from holdfast.report.terminal import plain_text, summary_table

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure


@dataclass(frozen=True, repr=False)
class Comparison:
    """What ``hf.compare`` found. Printing it shows the table of results."""

    record: RunRecord = field(compare=False)
    _make_model: Callable[[int], nn.Module] = field(compare=False)

    @property
    def path(self) -> Path:
        """The run directory; a temporary one if none was chosen."""
        return self.record.path

    @property
    def statuses(self) -> dict[tuple[str, int], str]:
        """How each job ended, by name and seed."""
        return {(job["algorithm"], job["seed"]): job["status"] for job in self.record.summary["jobs"]}

    def __repr__(self) -> str:
        return self.table()

    def table(self, width: int = 100) -> str:
        """One line per method at its last round, means over the seeds, in at most ``width`` characters."""
        return plain_text(summary_table([self.record], width), width)

    def plot(self, metric: str | None = None, axis: str = "round") -> Figure:
        """One metric of all methods, the mean over the seeds with a band from the lowest to the highest.

        ``metric``: by default the first that was recorded. ``axis``: "round", "payload_bytes" or
        "gradient_evaluations".
        """
        from holdfast.report.figures import curves_figure

        return curves_figure([self.record], metric or self.record.metrics[0], axis)

    def report(self, path: str | Path) -> Path:
        """Writes the report, one HTML file that needs nothing else, as ``holdfast run`` does."""
        from holdfast.report.html import write_report

        write_report([self.record], Path(path))
        return Path(path)

    def to_pandas(self) -> pandas.DataFrame:
        """All rows of all jobs as a data frame (needs ``pip install 'holdfast[pandas]'``)."""
        return data_frame(self.record.rows)

    def model(self, name: str, seed: int | None = None) -> nn.Module:
        """The average model of one method; ``seed``: by default the first."""
        jobs = [job for job in self.record.summary["jobs"] if job["algorithm"] == name]
        if not jobs:
            raise unknown("algorithm", name, {job["algorithm"] for job in self.record.summary["jobs"]})
        chosen = jobs[0]["seed"] if seed is None else seed
        found = next((job for job in jobs if job["seed"] == chosen), None)
        if found is None:
            raise HoldfastError(f"{name!r} was not run with seed {chosen}")
        file = self.path / "models" / f"{found['id']}.safetensors"
        if not file.is_file():
            raise HoldfastError(f"{name!r} with seed {chosen} left no model: it is {found['status']}")
        module = self._make_model(chosen).cpu()
        module.load_state_dict(read_tensors(file)[0])
        return module


@switches_restored()
@takes_options(TrainSpec)
def compare(
    algorithms: Mapping[str, Method | Named],
    *,
    model: GivenModel | Callable[[], nn.Module],
    data: NodeData | Callable[[int], NodeData],
    rounds: int,
    seeds: Sequence[int] = (0,),
    callbacks: Sequence[Callback] = (),
    progress: bool | None = None,
    run_dir: str | Path | None = None,
    resume: bool = False,
    data_dir: str | Path | None = None,
    device: str | torch.device = "cpu",
    **options: Unpack[TrainOptions],
) -> Comparison:
    """Trains every method with every seed on the same problem, and compares them.

    All methods meet the same data, network, minibatches and, for each seed, the same initial model.

    ``algorithms``: the methods, by the names that tables and plots give them.
    ``model``: a function without arguments that makes the initial model, called after
    ``torch.manual_seed(seed)``; a name, as for ``hf.train``; or a module, from which every seed starts.
    ``data``: as for ``hf.train``; or a function from the seed to that, so that each seed draws its own split.
    ``rounds``: communication rounds. ``seeds``: one job of each method for each.
    ``callbacks``, ``progress``: as for ``hf.train``, over all jobs.
    ``run_dir``: a new folder for metrics, checkpoints, models; by default a temporary one that goes with the
    result. ``resume``: continue the comparison in ``run_dir``, if there is one; all arguments must mean the
    same, except that more ``rounds`` extend it. ``data_dir``, ``device``: as for ``hf.train``.

    {options}

    Returns a ``Comparison``: print it for a table; ``plot(metric)``, ``report(path)``, ``to_pandas()``,
    ``model(name)``. Ctrl-C ends it after the round, and what there is is returned. A method that diverges or
    fails does not stop the others; the table says so, and a warning.
    """
    named = isinstance(algorithms, Mapping) and all(isinstance(name, str) and name for name in algorithms)
    if not named or not algorithms:
        raise HoldfastError(
            f'algorithms: expected names and methods, such as {{"ours": hf.LocalGECL(lr=0.05)}}, '
            f"got {quoted(algorithms)}"
        )
    given = {"model": model_of(model), "data": data_of(data), "rounds": rounds, **options}
    methods = [LabelledMethod.of(method, name) for name, method in algorithms.items()]
    plan = plan_of("hf.compare", methods, seeds, given, device=device, data_dir=data_dir)
    for text in plan.warnings():
        warnings.warn(text, RuntimeWarning, stacklevel=CALLER)
    runner = open_run(plan, folder_for(run_dir, resume=resume), resume=resume, lasting=run_dir is not None)
    with contextlib.suppress(Interrupted):  # what there is is returned
        runner.execute(watchers(callbacks, progress, [job.info for job in runner.left]), [signal.SIGINT])
    record = load_record(runner.folder)
    for row in record.final_table():
        if row.status in ("diverged", "failed"):
            warnings.warn(f"{row.label}: {row.note}", RuntimeWarning, stacklevel=CALLER)
    of_seed = {job.seed: job for job in reversed(plan.jobs)}
    result = Comparison(record, lambda seed: deepcopy(plan.setting(of_seed[seed]).make_module()))
    if run_dir is None:
        weakref.finalize(result, shutil.rmtree, runner.folder, ignore_errors=True)
    return result


def folder_for(run_dir: str | Path | None, *, resume: bool) -> Path:
    """``run_dir``, or a new temporary folder."""
    needs_folder(run_dir, resume=resume)
    return Path(run_dir) if run_dir is not None else Path(tempfile.mkdtemp(prefix="holdfast-"))


def model_of(model: GivenModel | Callable[[], nn.Module]) -> Any:
    """The initial model, its name, or what makes one for each seed."""
    if isinstance(model, nn.Module | str | Mapping):
        return model
    if not callable(model):
        raise HoldfastError(f"model: expected a function that makes one, or a module, got {quoted(model)}")
    make = model
    try:
        inspect.signature(make).bind()
    except TypeError as error:
        raise HoldfastError(
            f"model: expected a function without arguments, such as lambda: Net(9), got {quoted(make)}, "
            f"{error}"
        ) from None

    def of_seed(seed: int) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return make()

    return OfSeed(of_seed)


def data_of(data: NodeData | Callable[[int], NodeData]) -> Any:
    """The data; a function of one argument makes those of each seed."""
    if callable(data) and len(inspect.signature(data).parameters) == 1:
        make: Any = data
        return OfSeed(lambda seed: as_read(make(seed)))
    return as_read(data)  # type: ignore[arg-type]
