"""Losses: of class labels, of real targets, and the user's own."""

from holdfast.problem.losses.base import LOSSES, Loss
from holdfast.problem.losses.classification import CrossEntropy, Hinge, Logistic
from holdfast.problem.losses.own import LossFunction, OwnLoss, OwnStep, Step, as_loss
from holdfast.problem.losses.regression import (
    AbsoluteError,
    BinaryCrossEntropy,
    Huber,
    MeanSquaredError,
    SquaredError,
)

__all__ = [
    "LOSSES",
    "AbsoluteError",
    "BinaryCrossEntropy",
    "CrossEntropy",
    "Hinge",
    "Huber",
    "Logistic",
    "Loss",
    "LossFunction",
    "MeanSquaredError",
    "OwnLoss",
    "OwnStep",
    "SquaredError",
    "Step",
    "as_loss",
]
