"""What the experiments of the paper share."""

from __future__ import annotations

import numpy as np

from holdfast_papers.base import Line, Panel
from holdfast_papers.evidence import Curve

SPLITS = {"iid": "homogeneous nodes", "shards": "heterogeneous nodes"}

# Few nodes, a small network without convolutions and larger steps: seconds per run instead of minutes.
SMALL = (
    "rounds=60",
    "problem.nodes=10",
    'problem.model={name="mlp",hidden=[32]}',
    "evaluate_every=10",
)


def final_accuracy(curve: Curve, column: str = "average_accuracy") -> np.ndarray:
    """Test accuracy after the last round in percent, [seeds]: differences are points."""
    return 100 * curve.final(column)


def both_splits(
    lines: list[Line], each: str = "", x: str = "round", x_label: str = "", letters: str = "ab"
) -> list[Panel]:
    """A panel for homogeneous and one for heterogeneous nodes, as in all the paper's figures."""
    return [
        Panel(
            f"({letter}) {words}",
            [line._replace(where={"partition": split}) for line in lines],
            y="average_accuracy",
            x=x,
            x_label=x_label,
            each=each,
        )
        for letter, (split, words) in zip(letters, SPLITS.items(), strict=True)
    ]
