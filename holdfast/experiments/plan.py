"""What a run will do, checked before anything is written: its jobs, and whether they fit this machine."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import tomli_w

from holdfast.algorithms import Method
from holdfast.channels import Channel
from holdfast.core.validation import Cohort
from holdfast.core.world import ALONE, World
from holdfast.engines.common.dry_run import Footprint, dry_run
from holdfast.engines.common.simulation import Simulation
from holdfast.experiments.assembly import Setting, convexity_warning, torch_device
from holdfast.experiments.callbacks import JobInfo
from holdfast.experiments.choices import as_channel
from holdfast.experiments.config import Cadence, Experiment
from holdfast.experiments.networks import bias_warning
from holdfast.experiments.planned import KeptSettings
from holdfast.experiments.record_files import short
from holdfast.experiments.setting import build_method, build_setting
from holdfast.experiments.sweep import expand


@dataclass(frozen=True)
class Job:
    """One algorithm with one seed at one point of the sweep."""

    id: str
    experiment: Experiment
    axes: dict[str, Any]
    seed: int

    @property
    def label(self) -> str:
        return self.experiment.algorithm.label

    @property
    def rounds(self) -> int:
        return self.experiment.rounds

    @property
    def evaluate_every(self) -> Cadence:
        return self.experiment.evaluate_every

    @property
    def checkpoint_every(self) -> int:
        return self.experiment.checkpoint_every

    @property
    def info(self) -> JobInfo:
        """As callbacks know it."""
        return JobInfo(self.id, self.title, self.rounds)

    @property
    def cohort(self) -> Cohort:
        return self.experiment.network.cohort

    @property
    def channel(self) -> Channel:
        """What messages travel through, its parameters checked."""
        return as_channel(self.experiment.channel)

    @property
    def title(self) -> str:
        """For people: the label and what sets this job apart."""
        seed = [f"seed {self.seed}"] if len(self.experiment.seeds) > 1 else []
        return " ".join([self.label, *self.axis_labels, *seed])

    @property
    def axis_labels(self) -> list[str]:
        """Such as ``lr=0.1``, one for each swept key."""
        return [f"{key.rsplit('.', 1)[-1]}={short(value)}" for key, value in self.axes.items()]


class Plan:
    """The jobs of an experiment on this machine."""

    def __init__(self, raw: dict[str, Any], data_dir: Path | None, device: str, world: World = ALONE) -> None:
        self.raw, self.data_dir, self.device, self.world = raw, data_dir, device, world
        self.variants = expand(raw)
        self.axes = list(dict.fromkeys(axis for variant in self.variants for axis in variant.axes))
        self.jobs = [
            Job(_identity(index, variant.experiment, seed), variant.experiment, variant.axes, seed)
            for index, variant in enumerate(self.variants)
            for seed in variant.experiment.seeds
        ]
        self._methods: dict[str, Method] = {}
        self._settings = KeptSettings()

    @property
    def name(self) -> str:
        return self.variants[0].experiment.name

    @property
    def seeds(self) -> list[int]:
        return self.variants[0].experiment.seeds

    @cached_property
    def digest(self) -> str:
        """Identifies the experiment: a checkpoint of another one is refused."""
        return hashlib.sha256(json.dumps(self.raw, sort_keys=True, default=str).encode()).hexdigest()

    @property
    def document(self) -> tuple[str, str]:
        """The experiment as a file."""
        return "experiment.toml", tomli_w.dumps(self.raw)

    @property
    def notes(self) -> dict[str, Any]:
        """Nothing more is to be said in ``summary.json``."""
        return {}

    def changes(self, summary: Mapping[str, Any]) -> str:
        """Whether ``summary`` is of another experiment, in words."""
        same = summary.get("digest") == self.digest
        return "" if same else "experiment.toml was changed since the run began; start a new run"

    def at_rounds(self, rounds: int) -> Plan:
        """The same with so many rounds."""
        return Plan(self.raw | {"rounds": rounds}, self.data_dir, self.device, self.world)

    def setting(self, job: Job) -> Setting:
        """The job's data, model and network."""
        build = partial(build_setting, job.experiment, job.seed, self.data_dir, self.device, self.world)
        return self._settings.get(_setting_key(job), build)

    def shares_setting(self, first: Job, second: Job) -> bool:
        """Whether two jobs see the same data, model, network and minibatches."""
        return _setting_key(first) == _setting_key(second)

    def simulation(self, job: Job) -> Simulation:
        """The job, ready to run."""
        return self.setting(job).simulation(self.method(job), job.cohort, job.channel, rounds=job.rounds)

    def method(self, job: Job) -> Method:
        """The job's algorithm with its hyperparameters, estimated ones too."""
        if job.id not in self._methods:
            self._methods[job.id] = build_method(job.experiment, self.setting(job))
        return self._methods[job.id]

    def footprint(self, job: Job) -> Footprint:
        """What a round of the job sends and computes."""
        rounds = min(job.rounds, 50)
        network, cohort = self.setting(job).network, job.cohort
        return dry_run(self.method(job), network, cohort, rounds, job.channel)

    def memory(self, job: Job) -> int:
        """Estimated peak bytes: everything of every row, data, activations."""
        setting = self.setting(job)
        return setting.memory(self.footprint(job)) + setting.problem.step_bytes

    def warnings(self) -> list[str]:
        """What a user should know before the run, though it is no mistake."""
        found = [
            convexity_warning(job.label, self.method(job), self.setting(job).problem) for job in self.jobs
        ]
        for job in self.jobs:
            found.append(bias_warning(job.label, self.method(job), self.setting(job).network))
            if (epochs := job.experiment.algorithm.local_epochs) is not None:
                found.append(self.setting(job).local_epochs(epochs).note)
        return list(dict.fromkeys(filter(None, found)))

    def check(self) -> None:
        """Builds everything once, so that mistakes surface before the run directory exists."""
        torch_device(self.device)
        for job in self.jobs:
            # One by one: a rank that fails in one must not miss what the others do together in the next.
            for part in (self.setting, self.method, self._check):
                self.world.together(partial(part, job))

    def _check(self, job: Job) -> None:
        self.setting(job).check(job.title, self.method(job), job.cohort, job.channel)


def _setting_key(job: Job) -> str:
    shared = job.experiment.model_dump(exclude={"algorithm", "channel", "seeds", "rounds", "name"})
    return json.dumps([shared, job.seed], sort_keys=True, default=str)


def _identity(index: int, experiment: Experiment, seed: int) -> str:
    label = re.sub(r"[^A-Za-z0-9._-]+", "-", experiment.algorithm.label)
    return f"{index:03d}-{label}-seed{seed}"
