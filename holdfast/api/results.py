"""What training gives back: figures of every round, and the models."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from holdfast.core.errors import HoldfastError
from holdfast.core.files import read_tensors, write_tensors
from holdfast.experiments.callbacks import Measurements
from holdfast.experiments.record_files import SETTLED, JobStatus
from holdfast.problem.flat import FlatModel

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure

HEADLINES = ("test_accuracy", "average_loss", "train_loss")  # what a repr shows of the last row


@dataclass(frozen=True)
class History:
    """What was recorded: one row of metrics per evaluated round."""

    rows: list[Measurements]

    def __len__(self) -> int:
        return len(self.rows)

    def __repr__(self) -> str:
        if not self.rows:
            return "History(no rows)"
        rounds = f"rounds {self.rows[0]['round']:.0f} to {self.rows[-1]['round']:.0f}"
        names = ", ".join(name for name in self.rows[0] if name != "round")
        return f"History({len(self)} rows, {rounds}: {names})"

    def __getitem__(self, metric: str) -> list[float]:
        """All recorded values of one metric, such as ``history["test_accuracy"]``."""
        if metric not in self.rows[0]:
            raise HoldfastError(f"no metric {metric!r} was recorded; there are {', '.join(self.rows[0])}")
        return [row[metric] for row in self.rows]

    def to_pandas(self) -> pandas.DataFrame:
        """The rows as a data frame (needs ``pip install 'holdfast[pandas]'``)."""
        return data_frame(self.rows)

    def plot(self, metric: str | None = None) -> Figure:
        """One metric against the rounds; by default the first that was recorded."""
        from holdfast.report.figures import history_figure

        name = metric or next(key for key in self.rows[0] if key != "round")
        return history_figure(self["round"], self[name], name)


def data_frame(rows: Sequence[Mapping[str, object]]) -> pandas.DataFrame:
    """Rows as a data frame, if pandas is installed."""
    try:
        import pandas
    except ImportError:
        raise HoldfastError("pandas is not installed: pip install 'holdfast[pandas]'") from None
    return pandas.DataFrame(list(rows))


@dataclass(frozen=True)
class _Result:
    history: History
    status: JobStatus  # "done"; or what ended it early: "diverged", "interrupted" or "stopped"

    @property
    def diverged(self) -> bool:
        """Whether a figure became infinite or NaN, or grew without bound."""
        return self.status == "diverged"

    def plot(self, metric: str | None = None) -> Figure:
        """One metric against the rounds, a matplotlib figure; by default the first that was recorded."""
        return self.history.plot(metric)

    def _ended(self) -> str:
        """Such as ``done after round 30: test_accuracy 0.78``."""
        if not self.history.rows:
            return self.status
        last = self.history.rows[-1]
        figures = [f"{name} {last[name]:.4g}" for name in HEADLINES if name in last]
        when = " after" if self.status in SETTLED else ", last measured after"
        return f"{self.status}{when} round {last['round']:.0f}" + (
            f": {', '.join(figures)}" if figures else ""
        )


@dataclass(frozen=True, repr=False)
class TrainResult(_Result):
    """A trained federation."""

    model: nn.Module  # the average of all nodes' models; of a personalised method, the common one
    models: Tensor  # [n, d]: every node's trainable parameters, flat; those of its personal model, if any
    _module: Callable[[Tensor], nn.Module] = field(compare=False)  # from a row of ``models``, and statistics
    _statistics: Tensor = field(compare=False)  # [n, 2 s]: of BatchNorm in every node's model, if it has any

    def __repr__(self) -> str:
        nodes, dim = self.models.shape
        return f"TrainResult({self._ended()}; {nodes} nodes, {dim:,} parameters)"

    def node_model(self, node: int) -> nn.Module:
        """The model of one node, 0 to n - 1, as a module of its own on the CPU."""
        if not 0 <= node < len(self.models):
            raise HoldfastError(f"node {node} does not exist: expected 0..{len(self.models) - 1}")
        return self._module(torch.cat([self.models[node], self._statistics[node]]))

    def save(self, path: str | Path) -> None:
        """Writes history, status and all models as one safetensors file, which ``hf.load_result`` reads.

        ``models`` is [n, d]; the average model's ``state_dict`` stands there under ``model.*``.
        """
        # Copies: safetensors takes no tensors that share memory, as tied weights do.
        state = {f"model.{name}": value.clone() for name, value in self.model.state_dict().items()}
        own = {"statistics": self._statistics} if self._statistics.numel() else {}
        tensors = {"models": self.models, **own, **state}
        notes = {"kind": "result", "status": self.status, "history": self.history.rows}
        try:
            write_tensors(Path(path), {k: t.detach().cpu().contiguous() for k, t in tensors.items()}, notes)
        except OSError as error:
            raise HoldfastError(f"cannot write the result {path}: {error.strerror}") from None


def load_result(path: str | Path, model: nn.Module) -> TrainResult:
    """What ``result.save(path)`` wrote.

    ``path``: the file. ``model``: a module built like the one that was trained; its values do not matter.

    Returns a ``TrainResult`` equal to the one that was saved.
    """
    file = Path(path)
    if not file.is_file():
        raise HoldfastError(f"there is no file {file}; expected one that result.save wrote")
    try:
        tensors, notes = read_tensors(file)
    except HoldfastError:
        raise HoldfastError(f"{file} is not a file that result.save wrote, or it is damaged") from None
    if notes.get("kind") != "result":
        raise HoldfastError(f"{file} is a file of holdfast, but not one that result.save wrote")
    state = {k.removeprefix("model."): t for k, t in tensors.items() if k.startswith("model.")}
    given = model.state_dict()
    shapes = {name: tuple(value.shape) for name, value in given.items()}
    if shapes != {name: tuple(value.shape) for name, value in state.items()}:
        raise HoldfastError(f"model: its parameters are not called or shaped like those in {file}")
    template = deepcopy(model).cpu()
    template.load_state_dict(state)  # frozen parts and buffers too: nodes share them
    module = FlatModel(template, torch.device("cpu"), tensors["models"].dtype).module
    models = tensors["models"]
    statistics = tensors.get("statistics", models[:, :0])
    return TrainResult(History(notes["history"]), notes["status"], template, models, module, statistics)


@dataclass(frozen=True, repr=False)
class MinimizeResult(_Result):
    """The path of every node."""

    x: Tensor  # [rounds + 1, n, d]: each node's model after each round's exchange; fewer if it ended early

    def __repr__(self) -> str:
        _, nodes, dim = self.x.shape
        return f"MinimizeResult({self._ended()}; {nodes} nodes, {dim:,} parameters)"
