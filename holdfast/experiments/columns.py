"""The columns of ``metrics.csv`` beside the metrics, and which way a metric is better."""

from __future__ import annotations

import re
from typing import Literal, cast

from holdfast.core.errors import HoldfastError, did_you_mean

COST_COLUMNS = [
    "payload_bytes",
    "payload_bytes_per_link",
    "gradient_evaluations",
    "sample_gradients",
    "seconds",
]
MEMBER_COLUMNS = ["wire_bytes_sent", "wire_bytes_received", "waiting_seconds"]  # in a deployed federation
DELAY_COLUMNS = ["tau_proc", "tau_trans", "tau_total", "tau_raw"]  # where nodes or links are sporadic
SOLVER_COLUMNS = ["value_evaluations", "unfinished_solves"]  # for methods with a local solver
EPSILON_COLUMN = "epsilon"  # spent by the node that spent most, where samples are private

Mode = Literal["max", "min"]
"""Whether more or less of a metric is better."""

FALLING = (
    *("consensus", "grad_norm2", "stationarity", "rel_energy"),
    *("optimum_distance", "dual_error", "unfinished_solves"),
)
OF_TRAINING = (  # computed from training data, not from models and test samples alone
    *("train_loss", "minibatch_loss", "grad_norm2", "stationarity", "rel_energy"),
    *("optimum_distance", "dual_error"),
)
ONE_OF_SEVERAL = r"_(node|class)\d+$"  # the end of a column's name, such as that of accuracy_node3


def better(metric: str, mode: Mode | None) -> Mode:
    """``mode``, or what is known of the metric."""
    if (chosen := checked_mode(mode)) is not None:
        return chosen
    figure = re.sub(ONE_OF_SEVERAL, "", metric)
    if figure.endswith("accuracy"):
        return "max"
    if figure in FALLING or figure.endswith("loss"):
        return "min"
    known = (*FALLING, "train_loss", "minibatch_loss", "test_accuracy", "worst_accuracy", "average_accuracy")
    hint = did_you_mean(metric, known)
    hint += "If not, " if hint else ""
    raise HoldfastError(f"metric {metric!r}: {hint}say mode='max' if it should rise, or mode='min'")


def check_choosing(metric: str, who: str) -> None:
    """Refuses to have ``who`` choose by a ``metric`` of training data that are private."""
    if re.sub(ONE_OF_SEVERAL, "", metric) in OF_TRAINING:
        raise HoldfastError(
            f"private: {who} would choose by {metric}, which is computed from private data without noise, "
            "and the choice gives them away; take a metric of test samples that are not private"
        )


def checked_mode(mode: str | None) -> Mode | None:
    """``mode``, if it is one."""
    if mode in (None, "max", "min"):
        return cast("Mode | None", mode)
    raise HoldfastError(f"mode: should be 'max' or 'min', got {mode!r}")
