"""What the experiments of the paper share."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations
from pathlib import Path

import numpy as np

from holdfast.experiments.experiment_file import read_experiment
from holdfast.experiments.plan import Plan
from holdfast_papers.base import Circumstances, Finding, Layout, Line, Panel, judged_by_seeds
from holdfast_papers.evidence import Curve, Evidence

ON_A_GRAPH = [Line("Local G-ECL", "local-gecl"), Line("D-SCAFFOLD", "d-scaffold"), Line("Gossip", "gossip")]
CORRECTED = ("local-gecl", "d-scaffold")
WITH_A_SERVER = [
    Line("Local G-ECL", "local-gecl-server"),
    Line("SCAFFOLD", "scaffold"),
    Line("FedAvg", "fedavg"),
]

# A small network, few and small steps: seconds per run, where the paper's setting takes a quarter of an hour.
SMALL = (
    "rounds=40",
    "seeds=[0,1,2,3,4]",
    "evaluate_every=20",
    "problem.model.hidden=[50]",
    "problem.batch_size=32",
    "algorithm.local_steps=10",
    "algorithm.lr=0.025",
)


def small(*changes: str) -> list[str]:
    """``SMALL`` with ``changes``, which take the place of the same keys."""
    by_key = {change.partition("=")[0]: change for change in (*SMALL, *changes)}
    return list(by_key.values())


def final_accuracy(curve: Curve) -> np.ndarray:
    """Test accuracy after the last round in percent, [seeds]: differences are points."""
    return 100 * curve.final("test_accuracy")


def in_preset(lines: Sequence[Line], preset: str, **where: object) -> list[Line]:
    """The lines as curves of one preset among several, at one point of its sweep."""
    return [line._replace(preset=preset, where=where) for line in lines]


def accuracy_and_loss(lines: Sequence[Line], each: str = "") -> Layout:
    """Two panels over the rounds; every line once for each value of a swept key, if one is named."""
    panels = [
        Panel("(a) test accuracy", lines, each=each),
        Panel("(b) train loss", lines, y="train_loss", each=each),
    ]
    return Layout(panels, columns=2)


def within(points: float, *values: np.ndarray) -> list[np.ndarray]:
    """Margins, all positive in the mean if the means of ``values``, [seeds] each, are within ``points``."""
    return [points - (one - other) for one, other in permutations(values, 2)]


def ahead(e: Evidence, points: np.ndarray, least: float, ours: str) -> Finding:
    """Whether a lead, [seeds], is at least ``least`` points; at small scale, one point.

    The sign would not tell there: without its dual, Local G-ECL ends up to a tenth of a point from Gossip.
    """
    asked = least if e.full else 1.0
    return judged_by_seeds([points - asked], ours, f"at least {asked:g} point{'s' * (asked != 1)}")


def preset_plan(file: str, overrides: Sequence[str], where: Circumstances) -> Plan:
    """A preset of this paper with changes, for what is computed rather than run: in seconds, on the CPU."""
    raw = read_experiment(Path(__file__).with_name(f"{file}.toml"), list(overrides))
    return Plan.of_tables(raw, where.data_dir, "cpu")
