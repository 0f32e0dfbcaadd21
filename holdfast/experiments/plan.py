"""What a run will do, checked before anything is written: its jobs, and whether they fit this machine."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Protocol, Self

import tomli_w

import holdfast
from holdfast.contract import Channel, Method
from holdfast.core.fingerprint import fingerprint
from holdfast.core.validation import Cohort
from holdfast.core.world import ALONE, World
from holdfast.engines.common.counters import Footprint
from holdfast.engines.common.dry_run import dry_run
from holdfast.engines.common.simulation import Simulation
from holdfast.experiments.callbacks import JobInfo
from holdfast.experiments.choices import as_channel, bias_warning
from holdfast.experiments.experiment_file import read_overridden, with_defaults
from holdfast.experiments.methods import LabelledMethod
from holdfast.experiments.option_forms import Cadence, Choice, of_seed
from holdfast.experiments.setting import Setting, build_setting, convexity_warning, torch_device
from holdfast.experiments.spec import AlgorithmConfig, Experiment, TrainSpec, leaves
from holdfast.experiments.sweep import expand


@dataclass(frozen=True)
class Job:
    """One method with one seed, at one point of a sweep."""

    id: str  # differs from job to job, and is fit for the name of a file
    spec: TrainSpec
    algorithm: LabelledMethod
    seed: int
    title: str  # human-readable: the label and what sets this job apart
    shared: str = ""  # equal for jobs of a plan that see the same data, model and network, but for the seed

    @property
    def label(self) -> str:
        """The method, as tables and plots call it."""
        return self.algorithm.label

    @property
    def axes(self) -> Mapping[str, Any]:
        """Dotted key -> value, for what is swept."""
        return self.algorithm.axes

    @property
    def rounds(self) -> int:
        return self.spec.rounds

    @property
    def evaluate_every(self) -> Cadence:
        return self.spec.evaluate_every

    @property
    def checkpoint_every(self) -> int:
        return self.spec.checkpoint_every

    @property
    def cohort(self) -> Cohort:
        return self.spec.network.cohort

    @property
    def channel(self) -> Channel:
        """What messages travel through, its parameters checked."""
        return as_channel(self.spec.channel)

    @property
    def config(self) -> AlgorithmConfig:
        """The method as the experiment file describes it."""
        assert isinstance(self.algorithm.method, AlgorithmConfig), "a job of a call from Python has a method"
        return self.algorithm.method

    @property
    def info(self) -> JobInfo:
        """As callbacks know it."""
        return JobInfo(self.id, self.title, self.rounds)


class Origin(Protocol):
    """Where a plan came from: what a run directory says about it, and how a run is told from others."""

    @property
    def digest(self) -> str:
        """Identifies what is run: a checkpoint of something else is refused."""

    @property
    def notes(self) -> Mapping[str, Any]:
        """What else ``summary.json`` says."""

    def document(self, plan: Plan) -> tuple[str, str]:
        """The human-readable file that describes it: its name and its text."""

    def changes(self, summary: Mapping[str, Any]) -> str:
        """In what this differs from the run that ``summary`` is of, in words; empty if in nothing."""

    def at_rounds(self, rounds: int, plan: Plan) -> Plan:
        """The same plan with so many rounds."""


MOST_KEPT = 2**28  # numbers in the samples of settings that may be used again


class Plan:
    """Jobs on this machine, of an experiment file or of a call from Python."""

    def __init__(
        self,
        jobs: Sequence[Job],
        origin: Origin,
        name: str,
        device: str,
        *,
        data_dir: Path | None = None,
        world: World = ALONE,
    ) -> None:
        self.jobs, self.origin, self.name = list(jobs), origin, name
        self.device, self.data_dir, self.world = device, data_dir, world
        self._methods: dict[str, Method] = {}
        self._settings: dict[tuple[str, int], Setting] = {}  # the latest at the end

    @classmethod
    def of_file(
        cls,
        path: Path | None,
        overrides: Sequence[str],
        data_dir: Path | None,
        device: str,
        world: World = ALONE,
    ) -> Self:
        """The experiment in ``path`` (None: the default) with ``key.path=value`` overrides applied."""
        return cls.of_tables(read_overridden(path, overrides), data_dir, device, world)

    @classmethod
    def of_tables(
        cls, given: Mapping[str, Any], data_dir: Path | None, device: str, world: World = ALONE
    ) -> Self:
        """As ``of_file``, of what is read already."""
        origin = OfFile(given)
        jobs = [
            _of_variant(index, variant.experiment, variant.axes, seed)
            for index, variant in enumerate(expand(origin.raw))
            for seed in variant.experiment.seeds
        ]
        return cls(jobs, origin, origin.raw["name"], device, data_dir=data_dir, world=world)

    @classmethod
    def of_call(
        cls,
        origin: str,
        methods: Sequence[LabelledMethod],
        given: Mapping[str, Any],
        seeds: Sequence[int],
        *,
        device: str,
        data_dir: Path | None,
    ) -> Self:
        """Every method with every seed; ``given``: the options by name; ``origin``: such as "hf.train"."""
        spec = TrainSpec.of_arguments(given)
        jobs = [
            _of_method(index if len(methods) > 1 else None, method, spec, seed, many=len(seeds) > 1)
            for index, method in enumerate(methods)
            for seed in seeds
        ]
        own = OfCall(origin, methods, given, seeds)
        return cls(jobs, own, origin.removeprefix("hf."), device, data_dir=data_dir)

    @property
    def axes(self) -> list[str]:
        """Dotted keys that are swept: columns of the metrics."""
        return list(dict.fromkeys(axis for job in self.jobs for axis in job.axes))

    @property
    def seeds(self) -> list[int]:
        return list(dict.fromkeys(job.seed for job in self.jobs))

    @property
    def digest(self) -> str:
        """Identifies what is run: a checkpoint of something else is refused."""
        return self.origin.digest

    def at_rounds(self, rounds: int) -> Plan:
        """The same with so many rounds."""
        return self.origin.at_rounds(rounds, self)

    def setting(self, job: Job) -> Setting:
        """The job's data, model and network; the last few are kept, as the seeds of a sweep take turns."""
        kept, key = self._settings, (job.shared, job.seed)
        if key not in kept:
            kept[key] = build_setting(job.spec, job.seed, self.data_dir, self.device, self.world)
        kept[key] = kept.pop(key)
        while len(kept) > 1 and sum(setting.data.numbers for setting in kept.values()) > MOST_KEPT:
            del kept[next(iter(kept))]
        return kept[key]

    def shares_setting(self, first: Job, second: Job) -> bool:
        """Whether two jobs see the same data, model, network and minibatches."""
        return (first.shared, first.seed) == (second.shared, second.seed)

    def simulation(self, job: Job) -> Simulation:
        """The job, ready to run."""
        return self.setting(job).simulation(self.method(job), job.cohort, job.channel, rounds=job.rounds)

    def method(self, job: Job) -> Method:
        """The job's method with its hyperparameters, estimated ones too."""
        if job.id not in self._methods:
            self._methods[job.id] = self.setting(job).method(job.algorithm)
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
            setting = self.setting(job)
            found.append(bias_warning(job.label, self.method(job), setting.network))
            if (epochs := setting.local_epochs(job.algorithm)) is not None:
                found.append(epochs.note)
        return list(dict.fromkeys(filter(None, found)))

    def check(self) -> None:
        """Builds everything once, so that mistakes surface before the run directory exists."""
        torch_device(self.device)
        for job in self.jobs:
            # One by one: a rank that fails in one must not miss what the others do together in the next.
            for part in (self.setting, self.method, self._check):
                self.world.raise_on_all(partial(part, job))

    def _check(self, job: Job) -> None:
        setting = self.setting(job)
        title = f"{job.title} on {setting.data.nodes} nodes"
        setting.check(title, self.method(job), job.cohort, job.channel)


def _of_variant(index: int, experiment: Experiment, axes: Mapping[str, Any], seed: int) -> Job:
    config = experiment.algorithm
    method = LabelledMethod(config.label, config, axes, config.local_epochs)
    shared = experiment.model_dump(exclude={"algorithm", "channel", "seeds", "rounds", "name"})
    return Job(
        f"{index:03d}-{_file_name(config.label)}-seed{seed}",
        experiment,
        method,
        seed,
        _title(method, seed, many=len(experiment.seeds) > 1),
        json.dumps(shared, sort_keys=True, default=str),
    )


def _of_method(index: int | None, method: LabelledMethod, spec: TrainSpec, seed: int, *, many: bool) -> Job:
    number = "" if index is None else f"{index:03d}-"
    name = f"{number}{_file_name(method.title)[:100]}-seed{seed}"  # of a file, which may have 255 bytes
    return Job(name, spec, method, seed, _title(method, seed, many=many))


def _title(method: LabelledMethod, seed: int, *, many: bool) -> str:
    return f"{method.title} seed {seed}" if many else method.title


def _file_name(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text)


# --- where plans come from ------------------------------------------------------------------------------


class OfFile:
    """An experiment file."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        self.given, self.raw = given, with_defaults(given)
        self.digest = _digest(self.raw)
        self.notes: dict[str, Any] = {}  # nothing more is to be said

    def document(self, plan: Plan) -> tuple[str, str]:
        """The experiment as a file."""
        return "experiment.toml", tomli_w.dumps(self.raw)

    def changes(self, summary: Mapping[str, Any]) -> str:
        """Whether ``summary`` is of another experiment, in words.

        A run directory's own file, in which options are missing that came later, is the same experiment.
        """
        same = summary.get("digest") in (self.digest, _digest(self.given))
        return "" if same else "experiment.toml was changed since the run began; start a new run"

    def at_rounds(self, rounds: int, plan: Plan) -> Plan:
        """The same with so many rounds."""
        return Plan.of_tables({**self.given, "rounds": rounds}, plan.data_dir, plan.device, plan.world)


def _digest(raw: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(raw, sort_keys=True, default=str).encode()).hexdigest()


OF_THIS_MACHINE = ("checkpoint_every",)  # what a run may be resumed with another of


@dataclass(frozen=True)
class OfCall:
    """A call from Python, whose objects no file can hold: it is known by a digest of every argument."""

    name: str  # such as "hf.train"
    methods: Sequence[LabelledMethod]
    given: Mapping[str, Any]  # options by name
    seeds: Sequence[int]

    @cached_property
    def fingerprints(self) -> dict[str, str]:
        """A digest of every argument; of models and data those of the first seed."""
        options = {name: of_seed(value, self.seeds[0]) for name, value in self.given.items()}
        described = {"algorithm": list(map(_known_by, self.methods)), **options}
        described |= {"seeds": list(self.seeds), "rounds": described.pop("rounds")}
        for name in OF_THIS_MACHINE:
            described.pop(name, None)
        return {name: fingerprint(value) for name, value in described.items()}

    @cached_property
    def digest(self) -> str:
        return fingerprint(self.fingerprints)

    @property
    def notes(self) -> dict[str, Any]:
        return {"origin": self.name, "arguments": self.fingerprints, "version": holdfast.__version__}

    def document(self, plan: Plan) -> tuple[str, str]:
        """What was run, in words; nothing can be run from it, as the objects themselves are not there."""
        setting, spec = plan.setting(plan.jobs[0]), plan.jobs[0].spec
        topology, data = spec.network.topology, of_seed(spec.problem.dataset, self.seeds[0])
        words: dict[str, Any] = {
            "origin": self.name,
            "rounds": spec.rounds,
            "seeds": list(self.seeds),
            "evaluate_every": spec.evaluate_every,
            "problem": {
                "dataset": data.plain
                if isinstance(data, Choice)
                else data
                if isinstance(data, str | dict)
                else f"own data {self.fingerprints['data'][:8]}",
                "model": type(setting.problem.model.template).__name__,
                "nodes": setting.data.nodes,
                "loss": type(setting.loss).__name__,
                **setting.objective.options,
            },
            "network": {"topology": topology.plain if isinstance(topology, Choice) else "own graph"},
            "algorithm": [{"label": each.title, "method": repr(each.method)} for each in self.methods],
        }
        return "setting.toml", tomli_w.dumps(words)

    def changes(self, summary: Mapping[str, Any]) -> str:
        """The arguments that are not those of the run that ``summary`` is of.

        One that is missing, or None, is at its default.
        """
        if summary.get("origin") != self.name:
            return f"it is not a run of {self.name}, but of {summary.get('origin', 'holdfast run')}"
        before, now = summary["arguments"], self.fingerprints
        known = dict.fromkeys(["algorithm", *leaves(TrainSpec), "seeds", *before])
        del known["rounds"]
        changed = [name for name in (*known, "rounds") if _meant(name, before) != _meant(name, now)]
        if not changed:
            return ""
        shown = ", ".join("seed" if (name, self.name) == ("seeds", "hf.train") else name for name in changed)
        other = f"the run began with other arguments: {shown}; give the same, or choose another run_dir"
        if summary.get("version") == holdfast.__version__:
            return other
        return f"{other} (another version of holdfast began it, which may have described them otherwise)"

    def at_rounds(self, rounds: int, plan: Plan) -> Plan:
        """The same with so many rounds."""
        given = {**self.given, "rounds": rounds}
        where: dict[str, Any] = {"device": plan.device, "data_dir": plan.data_dir}
        return Plan.of_call(self.name, self.methods, given, self.seeds, **where)


# By this name versions before 0.2.0 knew a labelled method in the digests of their runs.
_Contender = type("Contender", (tuple,), {})


def _known_by(each: LabelledMethod) -> Any:
    return _Contender((each.label, each.method, each.axes, each.local_epochs))


def _meant(name: str, digests: Mapping[str, str]) -> str | None:
    """The digest of an argument; None if it is at its default."""
    found, leaf = digests.get(name), leaves(TrainSpec).get(name)
    if leaf is None or found is None:
        return found
    default = leaf.default
    same = (None, default, tuple(default) if isinstance(default, list) else default)
    return None if found in map(fingerprint, same) else found
