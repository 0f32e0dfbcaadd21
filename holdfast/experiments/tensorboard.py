"""Logging to TensorBoard, an optional extra."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from holdfast.core.errors import HoldfastError
from holdfast.engines.common.simulation import Simulation
from holdfast.experiments.callbacks import Callback, JobInfo, Measurements
from holdfast.experiments.statuses import Outcome


def summary_writer() -> Any:
    """torch's class that writes event files, if TensorBoard is installed."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise HoldfastError(
            "TensorBoard is not installed: pip install 'holdfast[tensorboard]', or drop --tensorboard"
        ) from None
    return SummaryWriter


class TensorBoard(Callback):
    """Writes every recorded figure under ``folder``, in a folder of its own for each job."""

    late = True

    def __init__(self, folder: str | Path) -> None:
        self._make_writer = summary_writer()
        self.folder = Path(folder)
        self.writer: Any = None

    def __repr__(self) -> str:
        return f"TensorBoard({str(self.folder)!r})"

    def on_train_begin(self, job: JobInfo, simulation: Simulation) -> None:
        self.writer = self._make_writer(str(self.folder / job.id), purge_step=simulation.round + 1)

    def on_evaluate(self, job: JobInfo, row: Measurements) -> None:
        for name, value in row.items():
            if name != "round":
                self.writer.add_scalar(name, value, int(row["round"]))
        self.writer.flush()

    def on_train_end(self, job: JobInfo, outcome: Outcome) -> None:
        self.writer.close()
