"""What a run will do, checked before anything is written: its jobs, and whether they fit this machine."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import tomli_w

from holdfast.contract import IDENTITY, Channel, Method
from holdfast.core.fingerprint import fingerprint
from holdfast.core.validation import Cohort
from holdfast.core.world import ALONE, World
from holdfast.engines.common.counters import Footprint
from holdfast.engines.common.dry_run import dry_run
from holdfast.engines.common.simulation import Simulation
from holdfast.experiments.callbacks import JobInfo
from holdfast.experiments.choices import Named, as_channel, as_method, bias_warning, own_epochs
from holdfast.experiments.record_files import short
from holdfast.experiments.setting import Setting, build_method, build_setting, convexity_warning, torch_device
from holdfast.experiments.spec import Cadence, Experiment
from holdfast.experiments.sweep import expand

# --- what a runner runs: jobs and how to build them, whether a file or Python calls describe them -------


class PlannedJob(Protocol):
    """One algorithm with one seed at one point of a sweep."""

    @property
    def id(self) -> str:
        """Differs from job to job, and is fit for the name of a file."""

    @property
    def label(self) -> str:
        """The algorithm, as tables and plots call it."""

    @property
    def seed(self) -> int: ...

    @property
    def axes(self) -> Mapping[str, Any]:
        """Dotted key -> value, for what is swept."""

    @property
    def rounds(self) -> int: ...

    @property
    def evaluate_every(self) -> Cadence: ...

    @property
    def checkpoint_every(self) -> int: ...

    @property
    def info(self) -> JobInfo:
        """As callbacks know it."""


class Planned(Protocol):
    """Jobs, and what a run directory says about them."""

    @property
    def name(self) -> str: ...

    @property
    def jobs(self) -> Sequence[Any]:
        """Each a ``PlannedJob``."""

    @property
    def axes(self) -> list[str]:
        """Dotted keys that are swept: columns of the metrics."""

    @property
    def seeds(self) -> list[int]: ...

    @property
    def digest(self) -> str:
        """Identifies the experiment: a checkpoint of another one is refused."""

    @property
    def document(self) -> tuple[str, str]:
        """The file that describes the experiment to people: its name and its text."""

    @property
    def notes(self) -> dict[str, Any]:
        """What else ``summary.json`` says."""

    @property
    def device(self) -> str: ...

    @property
    def data_dir(self) -> Path | None: ...

    @property
    def world(self) -> World: ...

    def changes(self, summary: Mapping[str, Any]) -> str:
        """In what this differs from the run that ``summary`` is of, in words; empty if in nothing."""

    def at_rounds(self, rounds: int) -> Planned:
        """The same with so many rounds."""

    def warnings(self) -> list[str]:
        """What a user should know before the run, though it is no mistake."""

    def setting(self, job: Any) -> Setting:
        """The job's data, model and network."""

    def method(self, job: Any) -> Method:
        """The job's algorithm."""

    def simulation(self, job: Any) -> Simulation:
        """The job, ready to run."""


MOST_KEPT = 2**28  # numbers in the samples of settings that may be used again


class KeptSettings:
    """The last settings that were used, as the seeds of a sweep take turns."""

    def __init__(self) -> None:
        self._kept: dict[str, Setting] = {}  # the latest at the end

    def get(self, key: str, build: Callable[[], Setting]) -> Setting:
        """The setting called ``key``, built if it is not here any more."""
        kept = self._kept
        if key not in kept:
            kept[key] = build()
        kept[key] = kept.pop(key)
        while len(kept) > 1 and sum(setting.data.numbers for setting in kept.values()) > MOST_KEPT:
            del kept[next(iter(kept))]
        return kept[key]


# --- what a run will do, checked before anything is written: its jobs, and whether they fit this machine


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
                self.world.raise_on_all(partial(part, job))

    def _check(self, job: Job) -> None:
        self.setting(job).check(job.title, self.method(job), job.cohort, job.channel)


def _setting_key(job: Job) -> str:
    shared = job.experiment.model_dump(exclude={"algorithm", "channel", "seeds", "rounds", "name"})
    return json.dumps([shared, job.seed], sort_keys=True, default=str)


def _identity(index: int, experiment: Experiment, seed: int) -> str:
    label = re.sub(r"[^A-Za-z0-9._-]+", "-", experiment.algorithm.label)
    return f"{index:03d}-{label}-seed{seed}"


# --- jobs described by Python objects: what ``hf.train``, ``hf.compare`` and ``hf.tune`` run ------------


class LabelledMethod(NamedTuple):
    """A method under the name that tables and plots give it."""

    label: str
    method: Method
    axes: Mapping[str, Any] = {}  # what is swept: dotted key -> value
    local_epochs: int | None = None  # instead of its local_steps, and of the plan's local_epochs

    @classmethod
    def of(cls, algorithm: Method | Named, label: str = "") -> LabelledMethod:
        """``algorithm`` itself, or the one that is named; ``label``: by default its class."""
        given, epochs = own_epochs(algorithm)
        method = as_method(given)
        return cls(label or type(method).__name__, method, local_epochs=epochs)

    @property
    def title(self) -> str:
        """For people, such as ``LocalGECL lr=0.1``."""
        swept = [f"{key.rsplit('.', 1)[-1]}={short(value)}" for key, value in self.axes.items()]
        return " ".join([self.label, *swept])


@dataclass(frozen=True)
class GivenJob:
    """One algorithm with one seed."""

    id: str
    label: str
    seed: int
    method: Method
    rounds: int
    evaluate_every: Cadence
    checkpoint_every: int
    title: str
    axes: Mapping[str, Any]
    local_epochs: int | None

    @property
    def info(self) -> JobInfo:
        """As callbacks know it."""
        return JobInfo(self.id, self.title, self.rounds)


@dataclass(frozen=True)
class GivenPlan:
    """The jobs of a call from Python."""

    origin: str  # such as "hf.train"
    name: str
    methods: Sequence[LabelledMethod]
    seeds: list[int]
    rounds: int
    evaluate_every: Cadence
    checkpoint_every: int
    make_setting: Callable[[int], Setting]  # from a seed
    arguments: Callable[[], Mapping[str, Any]]  # what the result depends on, by name
    device: str
    cohort: Cohort = "all"
    channel: Channel = IDENTITY
    local_epochs: int | None = None  # instead of the methods' local_steps
    data_dir: Path | None = None
    world: World = ALONE
    _settings: KeptSettings = field(default_factory=KeptSettings)

    @cached_property
    def jobs(self) -> list[GivenJob]:
        """Every method with every seed."""
        return [
            self._job(index, labelled, seed)
            for index, labelled in enumerate(self.methods)
            for seed in self.seeds
        ]

    def _job(self, index: int, labelled: LabelledMethod, seed: int) -> GivenJob:
        number = f"{index:03d}-" if len(self.methods) > 1 else ""
        return GivenJob(
            id=f"{number}{file_name(labelled.title)}-seed{seed}",
            label=labelled.label,
            seed=seed,
            method=labelled.method,
            rounds=self.rounds,
            evaluate_every=self.evaluate_every,
            checkpoint_every=self.checkpoint_every,
            title=f"{labelled.title} seed {seed}" if len(self.seeds) > 1 else labelled.title,
            axes=labelled.axes,
            local_epochs=self.local_epochs if labelled.local_epochs is None else labelled.local_epochs,
        )

    @property
    def axes(self) -> list[str]:
        return list(dict.fromkeys(axis for labelled in self.methods for axis in labelled.axes))

    @cached_property
    def fingerprints(self) -> dict[str, str]:
        """A digest of every argument."""
        described = {**self.arguments(), "seeds": self.seeds, "rounds": self.rounds}
        described["evaluate_every"] = self.evaluate_every
        return {name: fingerprint(value) for name, value in described.items()}

    @property
    def digest(self) -> str:
        return fingerprint(self.fingerprints)

    @property
    def document(self) -> tuple[str, str]:
        """What was run, in words; nothing can be run from it, as the objects themselves are not there."""
        setting, given = self.setting(self.jobs[0]), self.arguments()
        topology, data = given.get("topology"), given["data"]
        words: dict[str, Any] = {
            "origin": self.origin,
            "rounds": self.rounds,
            "seeds": self.seeds,
            "evaluate_every": self.evaluate_every,
            "problem": {
                "dataset": data
                if isinstance(data, str | dict)
                else f"own data {self.fingerprints['data'][:8]}",
                "model": type(setting.problem.model.template).__name__,
                "nodes": setting.data.nodes,
                "loss": type(setting.loss).__name__,
                **setting.terms.options,
            },
            "network": {"topology": topology if isinstance(topology, str | dict) else "own graph"},
            "algorithm": [{"label": each.title, "method": repr(each.method)} for each in self.methods],
        }
        return "setting.toml", tomli_w.dumps(words)

    @property
    def notes(self) -> dict[str, Any]:
        return {"origin": self.origin, "arguments": self.fingerprints}

    def changes(self, summary: Mapping[str, Any]) -> str:
        """The arguments that are not those of the run that ``summary`` is of."""
        if summary.get("origin") != self.origin:
            return f"it is not a run of {self.origin}, but of {summary.get('origin', 'holdfast run')}"
        before, now = summary["arguments"], self.fingerprints
        changed = [name for name in {**before, **now} if before.get(name) != now.get(name)]
        if not changed:
            return ""
        shown = ", ".join(
            "seed" if (name, self.origin) == ("seeds", "hf.train") else name for name in changed
        )
        return f"the run began with other arguments: {shown}; give the same, or choose another run_dir"

    def at_rounds(self, rounds: int) -> GivenPlan:
        """The same with so many rounds."""
        return replace(self, rounds=rounds)

    def warnings(self) -> list[str]:
        found = [
            convexity_warning(job.label, self.method(job), self.setting(job).problem) for job in self.jobs
        ]
        for job in self.jobs:
            found.append(bias_warning(job.label, self.method(job), self.setting(job).network))
            if job.local_epochs is not None:
                found.append(self.setting(job).local_epochs(job.local_epochs).note)
        return list(dict.fromkeys(filter(None, found)))

    def setting(self, job: GivenJob) -> Setting:
        return self._settings.get(str(job.seed), lambda: self.make_setting(job.seed))

    def method(self, job: GivenJob) -> Method:
        return self.setting(job).fitted(job.method, job.local_epochs)

    def simulation(self, job: GivenJob) -> Simulation:
        return self.setting(job).simulation(self.method(job), self.cohort, self.channel, rounds=job.rounds)

    def check(self) -> None:
        """Refuses what does not fit together, before anything is written."""
        for job in self.jobs:
            setting = self.setting(job)
            title = f"{job.label} on {setting.data.nodes} nodes"
            setting.check(title, self.method(job), self.cohort, self.channel)


def file_name(text: str) -> str:
    """``text`` as part of the name of a file, which may have 255 bytes."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text)[:100]
