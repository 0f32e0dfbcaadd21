"""The papers that there are: their presets can be read, and they claim something."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.experiments.plan import Plan
from holdfast_papers.base import Circumstances, Paper, PaperExperiment, Preset
from holdfast_papers.catalogue import find_experiments, load_papers
from holdfast_papers.execution import Task

ALL = find_experiments("all")
PRESETS = [
    pytest.param(paper, experiment, preset, scale, id=f"{paper.id}-{preset.file}-{scale}")
    for paper, experiment in ALL
    for preset in experiment.presets
    for scale in ("small", "full")
]


@pytest.mark.parametrize(("of", "experiment", "preset", "scale"), PRESETS)
def test_every_preset_is_an_experiment_of_the_library(
    of: Paper, experiment: PaperExperiment, preset: Preset, scale: str, tmp_path: Path
) -> None:
    task = Task(of, experiment, preset, Circumstances(scale, "cpu", None), tmp_path)
    assert Plan.of_tables(task.raw, None, "cpu").jobs


@pytest.mark.parametrize("paper", load_papers().values(), ids=lambda paper: paper.id)
def test_every_preset_file_belongs_to_one_experiment(paper: Paper) -> None:
    files = [preset.file for experiment in paper.experiments for preset in experiment.presets]
    assert sorted(files) == sorted(path.stem for path in paper.folder.glob("*.toml"))
    assert len({experiment.id for experiment in paper.experiments}) == len(paper.experiments)


@pytest.mark.parametrize("experiment", [each for _, each in ALL], ids=lambda each: each.id)
def test_every_experiment_makes_claims_and_shows_something(experiment: PaperExperiment) -> None:
    assert experiment.claims
    assert experiment.layout or experiment.table
