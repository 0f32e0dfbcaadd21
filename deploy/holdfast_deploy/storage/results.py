"""What a member leaves behind for its people: its model, and a record for ``holdfast report``."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from holdfast.core.files import replace_durably, write_json
from holdfast.problem.flat import FlatModel
from holdfast_deploy.federation import Federation
from holdfast_deploy.storage.messages import DamagedError
from holdfast_deploy.storage.table import COSTS, Row, Table

Status = Literal["running", "done", "interrupted", "failed"]

Score = tuple[float, float]  # accuracy and negative loss on a member's own test split: higher is better

OVERALL = {"running": "running", "done": "complete", "interrupted": "interrupted", "failed": "interrupted"}


def write_model(
    folder: Path, model: FlatModel, row: Tensor, notes: dict[str, Any], name: str = "model"
) -> None:
    """The module with parameters ``row`` [d + 2 s] as ``model.safetensors``, or under another ``name``.

    Without BatchNorm's statistics, [d], the file has none: a module that is to load it will say so.
    """
    tensors, memory = {}, set()
    unknown = model.statistics_names if len(row) == model.dim else ()
    state = {key: t for key, t in model.module(row).state_dict().items() if key not in unknown}
    for key, tensor in state.items():
        shared = tensor.data_ptr() in memory  # tied weights, which safetensors would refuse
        memory.add(tensor.data_ptr())
        tensors[key] = tensor.clone() if shared else tensor.contiguous()
    temporary = folder / f".{name}.safetensors.partial"
    try:
        safetensors.torch.save_file(tensors, temporary, {"holdfast": json.dumps(notes)})
    except safetensors.SafetensorError as error:  # it hides a full disk in its text
        number = re.search(r"os error (\d+)", str(error))
        if number is None:
            raise
        code = int(number[1])
        raise OSError(code, os.strerror(code), str(temporary)) from None
    with temporary.open("rb") as file:
        os.fsync(file.fileno())
    replace_durably(temporary, folder / f"{name}.safetensors")


def read_model(folder: Path, model: FlatModel) -> Tensor:
    """The parameters, [d], that ``write_model`` wrote."""
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    return torch.cat([tensors[name].flatten() for name in model.shapes])


def digests(folder: Path, names: Iterable[str]) -> dict[str, str]:
    """SHA-256 of the models that ``write_model`` wrote under these names, by file."""
    found = {}
    for name in names:
        with (folder / f"{name}.safetensors").open("rb") as file:
            found[f"{name}.safetensors"] = hashlib.file_digest(file, "sha256").hexdigest()
    return found


def read_results(folder: Path, model: FlatModel) -> tuple[Tensor, dict[str, float]]:
    """The parameters, [d], and the figures that a finished member wrote; nothing of it may have changed."""
    path = folder / "report.json"
    try:
        report = json.loads(path.read_bytes())
        written, metrics = dict(report["models"]), dict(report["metrics"])
    except (ValueError, KeyError, TypeError):
        raise DamagedError(f"{path} is damaged") from None
    for file, digest in written.items():
        try:
            found = digests(folder, [file.removesuffix(".safetensors")])[file]
        except FileNotFoundError:
            raise DamagedError(f"{folder / file} is missing") from None
        if found != digest:
            raise DamagedError(f"{folder / file} is damaged")
    return read_model(folder, model), metrics


class Record:
    """``metrics.csv`` and ``summary.json`` of a member: a run with a single job."""

    def __init__(self, folder: Path, federation: Federation, member: str, facts: dict[str, int]) -> None:
        self.folder, self.federation = folder, federation
        self.job = {"algorithm": federation.algorithm_name, "seed": federation.seed}
        facts = {"nodes": len(federation.node), **facts}
        self.about = {"name": federation.name, "member": member, "digest": federation.id, "facts": facts}
        self.table = Table(folder / "metrics.csv", self.job)
        self._best: Score | None = None
        self._newest_is_best = False

    def keep(self, upto: int) -> None:
        """Goes on with what was recorded up to a round; later ones are computed again."""
        self._best = None
        for row in self.table.keep(upto):
            self._compare(row)

    def add(self, round: int, figures: dict[str, float], costs: dict[str, float]) -> None:
        """Records the ``figures`` of a round, and the ``costs`` so far, of those that all runs have."""
        row = self.job | {"round": round} | figures | {name: costs[name] for name in COSTS}
        self.table.add(row)
        self._compare(row)

    def is_best(self) -> bool:
        """Whether the newest figures are better on the member's own test split than all before."""
        return self._newest_is_best

    def _compare(self, row: Row) -> None:
        score = _score(row)
        self._newest_is_best = score is not None and (self._best is None or score > self._best)
        if self._newest_is_best:
            self._best = score

    def conclude(self, status: Status, done: int, seconds: float, message: str = "") -> None:
        """Notes how far the member is, and why it ended, if it failed."""
        job = self.job | {"axes": {}, "status": status, "round": done, "rounds": self.federation.rounds}
        job |= {"seconds": round(seconds, 3)} | ({"message": message} if message else {})
        write_json(self.folder / "summary.json", self.about | {"status": OVERALL[status], "jobs": [job]})


def _score(row: Row) -> Score | None:
    """None for a member without a test split."""
    if row.get("test_loss") in (None, ""):
        return None
    return float(row.get("test_accuracy") or 0.0), -float(row["test_loss"])
