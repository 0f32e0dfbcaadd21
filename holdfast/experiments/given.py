"""Jobs described by Python objects: what ``hf.train``, ``hf.compare`` and ``hf.tune`` run."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import tomli_w

from holdfast.contract import IDENTITY, Channel, Method
from holdfast.core.errors import HoldfastError
from holdfast.core.fingerprint import fingerprint
from holdfast.core.validation import Cohort
from holdfast.core.world import ALONE, World
from holdfast.engines.common.simulation import Simulation
from holdfast.experiments.assembly import Setting, convexity_warning
from holdfast.experiments.callbacks import JobInfo
from holdfast.experiments.choices import Named, as_method, own_epochs
from holdfast.experiments.config import Cadence
from holdfast.experiments.networks import bias_warning
from holdfast.experiments.planned import KeptSettings
from holdfast.experiments.record import SETTING_FILES
from holdfast.experiments.record_files import short
from holdfast.experiments.runner import Runner


class Contender(NamedTuple):
    """A method under the name that tables and plots give it."""

    label: str
    method: Method
    axes: Mapping[str, Any] = {}  # what is swept: dotted key -> value
    local_epochs: int | None = None  # instead of its local_steps, and of the plan's local_epochs

    @classmethod
    def of(cls, algorithm: Method | Named, label: str = "") -> Contender:
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
    contenders: Sequence[Contender]
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
            self._job(index, contender, seed)
            for index, contender in enumerate(self.contenders)
            for seed in self.seeds
        ]

    def _job(self, index: int, contender: Contender, seed: int) -> GivenJob:
        number = f"{index:03d}-" if len(self.contenders) > 1 else ""
        return GivenJob(
            id=f"{number}{file_name(contender.title)}-seed{seed}",
            label=contender.label,
            seed=seed,
            method=contender.method,
            rounds=self.rounds,
            evaluate_every=self.evaluate_every,
            checkpoint_every=self.checkpoint_every,
            title=f"{contender.title} seed {seed}" if len(self.seeds) > 1 else contender.title,
            axes=contender.axes,
            local_epochs=self.local_epochs if contender.local_epochs is None else contender.local_epochs,
        )

    @property
    def axes(self) -> list[str]:
        return list(dict.fromkeys(axis for contender in self.contenders for axis in contender.axes))

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
            "algorithm": [{"label": each.title, "method": repr(each.method)} for each in self.contenders],
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


def _of_beginning(path: Path) -> bool:
    """Whether a run that was killed before its first round may have left this."""
    return path.name in (*SETTING_FILES, "setting.toml", "metrics.csv") or path.name.endswith(".partial")


def open_run(plan: GivenPlan, run_dir: Path, *, resume: bool, lasting: bool = True) -> Runner:
    """The runner of ``plan`` in ``run_dir``: a new one, or the one that is there if it may be resumed.

    ``lasting``: whether it may be resumed later.
    """
    if (run_dir / "summary.json").is_file():
        if not resume:
            raise HoldfastError(
                f"run_dir: {run_dir} holds a run; go on with it by resume=True, or choose another folder"
            )
        return Runner.reopen(plan, run_dir, extend=True)
    if run_dir.exists() and not (run_dir.is_dir() and all(map(_of_beginning, run_dir.iterdir()))):
        raise HoldfastError(f"run_dir: {run_dir} exists and is no run of holdfast; choose another folder")
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise HoldfastError(f"cannot make the run directory {run_dir}: {error.strerror}") from None
    return Runner.begin(plan, run_dir, lasting=lasting)
