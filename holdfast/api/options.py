"""The arguments of ``hf.train`` that ``hf.compare`` and ``hf.tune`` pass on, as editors see them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, TypedDict

import torch

from holdfast.channels import Channel
from holdfast.core.precision import Precision
from holdfast.core.validation import Cohort
from holdfast.data import Partitioner
from holdfast.data.test_sets import Tests
from holdfast.experiments.choices import Named
from holdfast.experiments.config import BatchSize, Cadence, Metrics, Weighting
from holdfast.experiments.networks import Topology
from holdfast.privacy import DP, NodeDP
from holdfast.problem.augmentation import Augment
from holdfast.problem.gradients.backend import BackendName
from holdfast.problem.losses import Loss, LossFunction, Step
from holdfast.problem.sampling import SamplingName
from holdfast.problem.statistics import Buffers
from holdfast.robust import Aggregation, Attack


class TrainOptions(TypedDict, total=False):
    """As in ``hf.train``, with its defaults."""

    nodes: int | None
    partition: Partitioner | Named | None
    data_dir: str | Path | None
    topology: Topology
    local_epochs: int | None
    batch_size: BatchSize
    sampling: SamplingName
    augment: Augment | str | None
    loss: Loss | LossFunction | Named
    step: Step | None
    test: Tests | None
    l2: float
    l1: float
    nonconvex: float
    weights: Weighting
    private: DP | NodeDP | None
    backend: BackendName
    buffers: Buffers
    aggregation: Aggregation | Named | None
    attack: Attack | Named | None
    cohort: Cohort
    channel: Channel | Named
    evaluate_every: Cadence
    metrics: Metrics | dict[str, Any] | tuple[str | dict[str, Any], ...]
    personalize: int
    device: str | torch.device
    dtype: torch.dtype | Literal["float32", "float64"]
    precision: Precision
