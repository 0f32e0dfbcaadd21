"""The jobs of a call from Python, checked: what ``hf.train``, ``hf.compare`` and ``hf.tune`` share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from holdfast.api.calls import checked_call, number_type
from holdfast.api.node_data import NodeData, nodes_data
from holdfast.core.errors import HoldfastError
from holdfast.core.precision import Precision
from holdfast.core.validation import Count, Seed, Whole, check, quoted
from holdfast.data import Partitioner
from holdfast.data.test_sets import Tests
from holdfast.experiments.assembly import Setting
from holdfast.experiments.choices import Named, as_augment, as_channel, as_loss, as_module
from holdfast.experiments.config import BatchSize, Cadence, Metrics, Terms, Weighting
from holdfast.experiments.given import Contender, GivenPlan
from holdfast.experiments.networks import Topology, as_network
from holdfast.experiments.setting import label_table
from holdfast.privacy import DP, NodeDP
from holdfast.problem.augmentation import Augment
from holdfast.problem.gradients.backend import BackendName
from holdfast.problem.losses import Loss, LossFunction, OwnStep, Step
from holdfast.problem.sampling import SamplingName
from holdfast.problem.statistics import Buffers
from holdfast.robust import Aggregation, Attack

OF_THIS_MACHINE = ("device", "evaluate_every", "data_dir")  # what a run may be resumed with another of


def given_plan(
    origin: str,
    contenders: Sequence[Contender],
    make_model: Callable[[int], nn.Module | Named],
    make_data: Callable[[int], NodeData],
    *,
    seeds: Sequence[int],
    rounds: int,
    checkpoint_every: int,
    options: dict[str, Any],
) -> GivenPlan:
    """Every method with every seed, checked; ``make_model`` and ``make_data`` are called with a seed.

    ``options``: all arguments of ``hf.train`` that ``TrainOptions`` names.
    """
    rounds, cohort = checked_call(rounds, options["cohort"])
    if not isinstance(seeds, Sequence) or not seeds:
        raise HoldfastError(f"seeds: expected a list such as [0, 1, 2] or range(3), got {quoted(seeds)}")
    seeds = [check("seed", Seed, seed) for seed in seeds]
    if len(set(seeds)) < len(seeds):
        raise HoldfastError(f"seeds: each once, got {quoted(seeds)}")
    checkpoint_every = check("checkpoint_every", Count, checkpoint_every)

    def make_setting(seed: int) -> Setting:
        return _setting(make_model(seed), make_data(seed), seed, **options)

    plan = GivenPlan(
        origin=origin,
        name=origin.removeprefix("hf."),
        contenders=contenders,
        seeds=seeds,
        rounds=rounds,
        evaluate_every=check("evaluate_every", Cadence, options["evaluate_every"]),
        checkpoint_every=checkpoint_every,
        make_setting=make_setting,
        arguments=lambda: {
            "algorithm": contenders,
            "model": make_model(seeds[0]),
            "data": make_data(seeds[0]),
            **{name: value for name, value in options.items() if name not in OF_THIS_MACHINE},
        },
        device=str(options["device"]),
        cohort=cohort,
        channel=as_channel(options["channel"]),
        local_epochs=check("local_epochs", Count | None, options["local_epochs"]),
    )
    plan.check()
    return plan


def _setting(
    model: nn.Module | Named,
    data: NodeData,
    seed: int,
    *,
    nodes: int | None,
    partition: Partitioner | Named | None,
    data_dir: str | Path | None,
    topology: Topology,
    batch_size: BatchSize,
    sampling: SamplingName,
    augment: Augment | str | None,
    loss: Loss | LossFunction | Named,
    step: Step | None,
    test: Tests | None,
    l2: float,
    l1: float,
    nonconvex: float,
    weights: Weighting,
    private: DP | NodeDP | None,
    backend: BackendName,
    buffers: Buffers,
    aggregation: Aggregation | Named | None,
    attack: Attack | Named | None,
    evaluate_every: Cadence,
    metrics: Any,
    personalize: int,
    device: str | torch.device,
    dtype: torch.dtype | Literal["float32", "float64"],
    precision: Precision,
    **of_methods: Any,
) -> Setting:
    """What all methods meet alike; the arguments are those of ``train``."""
    for name, annotation, value in (
        ("evaluate_every", Cadence, evaluate_every),
        ("personalize", Whole, personalize),
        ("precision", Precision, precision),
    ):
        check(name, annotation, value)
    wanted: Metrics = check("metrics", Metrics, metrics)
    numbers = number_type(dtype)
    weighed: dict[str, Any] = {"l2": l2, "l1": l1, "nonconvex": nonconvex, "weights": weights}
    weighed["private"] = private
    computed = {"backend": backend, "buffers": buffers}
    terms = Terms.of({"batch_size": batch_size, "sampling": sampling, **computed, **weighed})
    if step is not None and loss != "cross-entropy":
        raise HoldfastError("step: it computes the loss itself; leave loss= out, or step=")
    chosen_loss = as_loss(loss) if step is None else OwnStep(step)
    given = nodes_data(data, nodes, partition, data_dir, test, seed).that_count(chosen_loss.counted)
    split = given.train
    module = as_module(model, split, given.classes, chosen_loss, seed)
    return Setting(
        data=split,
        test_data=given.test,
        test_counts=given.test_counts,
        network=as_network(topology, split.nodes, seed, aggregation, attack),
        loss=chosen_loss,
        wanted=wanted,
        classes=given.classes or 0,
        personalize=personalize,
        make_module=lambda: module,
        augment=as_augment(augment),
        terms=terms,
        seed=seed,
        device=str(device),
        dtype=numbers,
        precision=precision,
        mean=given.mean,
        std=given.std,
        labels=label_table(split, given.classes),
    )
