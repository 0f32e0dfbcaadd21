"""What tests of all papers ask: the jobs of their presets, and verdicts on made-up figures."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from holdfast.algorithms.load import build_algorithm
from holdfast.experiments.plan import Job
from holdfast_papers.base import Circumstances, Paper, PaperExperiment, Preset, Verdict
from holdfast_papers.evidence import Evidence, Scale
from holdfast_papers.execution import Task


def planned(paper: Paper, experiment: PaperExperiment, scale: Scale) -> Iterator[tuple[Preset, list[Job]]]:
    """Every preset of an experiment with its jobs; nothing is run."""
    for preset in experiment.presets:
        task = Task(paper, experiment, preset, Circumstances(scale, "cpu", None), Path())
        yield preset, task.plan().jobs


def build_every_method(paper: Paper, experiment: PaperExperiment, scale: Scale) -> None:
    for _, jobs in planned(paper, experiment, scale):
        for job in jobs:
            build_algorithm(job.config.name, job.config.parameters)


def verdicts(experiment: PaperExperiment, evidence: Evidence) -> list[Verdict]:
    return [claim.check(evidence).verdict for claim in experiment.claims]


def failing(experiment: PaperExperiment, evidence: Evidence) -> list[int]:
    """The places of the claims that fail."""
    found = verdicts(experiment, evidence)
    return [place for place, verdict in enumerate(found) if verdict == Verdict.FAIL]
