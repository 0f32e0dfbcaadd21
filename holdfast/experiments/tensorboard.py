"""Logging to TensorBoard, an optional extra."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from holdfast.core.errors import HoldfastError
from holdfast.engines.common.driver import Row
from holdfast.experiments.plan import Job
from holdfast.experiments.statuses import JobStatus


def summary_writer() -> Any:
    """torch's class that writes event files, if TensorBoard is installed."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise HoldfastError(
            "TensorBoard is not installed: pip install 'holdfast[tensorboard]', or drop --tensorboard"
        ) from None
    return SummaryWriter


class TensorBoardView:
    """Writes every recorded figure of every job under ``folder``/tensorboard."""

    def __init__(self, folder: Path) -> None:
        self._make_writer = summary_writer()
        self.folder = folder / "tensorboard"
        self.writer: Any = None

    def job_started(self, job: Job, first_round: int) -> None:
        self.writer = self._make_writer(str(self.folder / job.id), purge_step=first_round + 1)

    def job_prepared(self, job: Job, how: str) -> None:
        pass

    def round_done(self, job: Job, round: int) -> None:
        pass

    def row_recorded(self, job: Job, row: Row) -> None:
        for name, value in row.items():
            if name != "round":
                self.writer.add_scalar(name, value, int(row["round"]))
        self.writer.flush()

    def job_ended(self, job: Job, status: JobStatus) -> None:
        self.writer.close()
