"""What a run will do, checked before anything is written: its jobs, and whether they fit this machine."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch

from holdfast.algorithms import Method
from holdfast.channels import CHANNELS, Channel
from holdfast.core.memory import require_memory
from holdfast.core.precision import compute_in
from holdfast.core.world import ALONE, World
from holdfast.engines.cluster.place import RankPlace
from holdfast.engines.cluster.ranks import Ranks
from holdfast.engines.common.dry_run import Footprint, dry_run
from holdfast.engines.common.fit import check_fit
from holdfast.engines.common.place import HERE
from holdfast.engines.common.simulation import Simulation
from holdfast.engines.simulate.executors.rules import executor_for
from holdfast.experiments.config import Choice, Experiment
from holdfast.experiments.setting import Setting, build_method, build_setting, torch_device
from holdfast.experiments.sweep import expand
from holdfast.problem.reference.curvature import why_not_convex
from holdfast.problem.samples import MOST_READY


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
    def title(self) -> str:
        """For people: the label and what sets this job apart."""
        seed = [f"seed {self.seed}"] if len(self.experiment.seeds) > 1 else []
        return " ".join([self.label, *self.axis_labels, *seed])

    @property
    def axis_labels(self) -> list[str]:
        """Such as ``lr=0.1``, one for each swept key."""
        return [f"{key.rsplit('.', 1)[-1]}={short(value)}" for key, value in self.axes.items()]


def short(value: Any) -> str:
    """A swept value in a few characters: a choice by its name."""
    if isinstance(value, dict):
        inner = ",".join(f"{key}={short(part)}" for key, part in value.items() if key != "name")
        return f"{value.get('name', '')}({inner})" if inner else str(value.get("name", ""))
    return str(value)


MOST_KEPT = 2**28  # numbers in the samples of settings that may be used again


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
        self._settings: dict[str, Setting] = {}  # the last ones used, the latest at the end

    @property
    def name(self) -> str:
        return self.variants[0].experiment.name

    @property
    def seeds(self) -> list[int]:
        return self.variants[0].experiment.seeds

    @cached_property
    def digest(self) -> str:
        """Identifies the experiment: a checkpoint of another one is refused."""
        return hashlib.sha256(json.dumps(self.raw, sort_keys=True).encode()).hexdigest()

    def setting(self, job: Job) -> Setting:
        """The job's data, model and network; the last ones are kept, as the seeds of a sweep take turns."""
        key, kept = _setting_key(job), self._settings
        if key not in kept:
            kept[key] = build_setting(job.experiment, job.seed, self.data_dir, self.device, self.world)
        kept[key] = kept.pop(key)
        while len(kept) > 1 and sum(setting.data.x.numel() for setting in kept.values()) > MOST_KEPT:
            del kept[next(iter(kept))]
        return kept[key]

    def shares_setting(self, first: Job, second: Job) -> bool:
        """Whether two jobs see the same data, model, network and minibatches."""
        return _setting_key(first) == _setting_key(second)

    def simulation(self, job: Job) -> Simulation:
        """The job, ready to run."""
        setting, device = self.setting(job), torch.device(self.device)
        compute_in(job.experiment.precision)  # jobs before may have been computed in another
        parts = (self.method(job), setting.objective, setting.network)
        options: Any = {"seed": job.seed, "cohort_size": cohort_size(job.experiment)}
        options |= {"channel": build_channel(job.experiment)}
        place = RankPlace(self.world, setting.network) if isinstance(self.world, Ranks) else HERE
        return Simulation(*parts, **options, place=place, executor=executor_for(device))

    def method(self, job: Job) -> Method:
        """The job's algorithm with its hyperparameters, estimated ones too."""
        if job.id not in self._methods:
            self._methods[job.id] = build_method(job.experiment, self.setting(job))
        return self._methods[job.id]

    def footprint(self, job: Job) -> Footprint:
        """What a round of the job sends and computes."""
        network, cohort = self.setting(job).network, cohort_size(job.experiment)
        rounds = min(job.experiment.rounds, 50)
        return dry_run(self.method(job), network, cohort, rounds, build_channel(job.experiment))

    def memory(self, job: Job) -> int:
        """Estimated peak bytes: everything of every row, data, activations."""
        return self._rows_and_data(job) + self.setting(job).objective.step_bytes

    def _rows_and_data(self, job: Job) -> int:
        setting, x, batch = self.setting(job), self.setting(job).data.x, job.experiment.problem.batch_size
        nodes, number = setting.data.nodes, getattr(torch, job.experiment.dtype).itemsize
        everything = int(setting.data.counts.sum())
        prepared = everything * x[0].numel() * number
        ready = prepared if batch == "full" and self.device == "cpu" and prepared <= MOST_READY else 0
        rows = self.footprint(job).memory(nodes, setting.dim, number)
        return int(rows + everything * x[0].numel() * x.element_size() + ready)

    def warnings(self) -> list[str]:
        """What a user should know before the run, though it is no mistake."""
        return list(dict.fromkeys(filter(None, (self._convexity_warning(job) for job in self.jobs))))

    def _convexity_warning(self, job: Job) -> str | None:
        if not self.method(job).assumes_convex:
            return None
        reason = why_not_convex(self.setting(job).objective)
        return (
            f"{job.label} promises to converge on convex objectives only, and here {reason}"
            if reason
            else None
        )

    def check(self) -> None:
        """Builds everything once, so that mistakes surface before the run directory exists."""
        torch_device(self.device)
        for job in self.jobs:
            # One by one: a rank that fails in one must not miss what the others do together in the next.
            for part in (self.setting, self.method, self._check):
                self.world.together(partial(part, job))

    def _check(self, job: Job) -> None:
        setting = self.setting(job)
        cohort, channel = cohort_size(job.experiment), build_channel(job.experiment)
        check_fit(self.method(job), setting.data.nodes, setting.network, cohort, channel)
        ranks = self.world.on_this_machine if self.device == "cpu" else 1
        # In two steps: a model that is far too large is not even made.
        needed = self._rows_and_data(job) * ranks / self.world.size
        require_memory(job.title, needed, self.device)
        setting.objective.check_model(setting.test)
        require_memory(job.title, needed + setting.objective.step_bytes * ranks, self.device)


def cohort_size(experiment: Experiment) -> int | None:
    """Clients per round; None for everybody."""
    return None if experiment.network.cohort == "all" else experiment.network.cohort


def build_channel(experiment: Experiment) -> Channel:
    """What the experiment's messages travel through."""
    chosen = experiment.channel or Choice(name="identity")
    return CHANNELS.build(chosen.name, chosen.parameters)


def _setting_key(job: Job) -> str:
    shared = job.experiment.model_dump(exclude={"algorithm", "channel", "seeds", "rounds", "name"})
    return json.dumps([shared, job.seed], sort_keys=True)


def _identity(index: int, experiment: Experiment, seed: int) -> str:
    label = re.sub(r"[^A-Za-z0-9._-]+", "-", experiment.algorithm.label)
    return f"{index:03d}-{label}-seed{seed}"
