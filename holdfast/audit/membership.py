"""Membership inference with likelihood ratios (LiRA, Carlini et al. 2022): was a sample trained on?

Shadow runs train on a random half of every node's samples. For each sample, its confidence in runs with it
and in runs without it gives two normal distributions; a run is judged by the ratio of their densities. Every
run takes its turn as the one that is attacked, the others being the shadows.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from holdfast.audit.subject import Subject, overheard
from holdfast.data import FederatedData

RATES = (0.01, 0.001)  # of false alarms
RESAMPLED = 100

Scores = NDArray[np.float64]  # [S, N]: of every sample in every run
Members = NDArray[np.bool_]  # [S, N]: whether it was trained on


class Figure(NamedTuple):
    """An estimate and its 95 % interval, by resampling runs."""

    value: float
    low: float
    high: float


class Membership(NamedTuple):
    """How well members are told from others; guessing reaches an area of 0.5 and the rates themselves."""

    auc: Figure
    tpr: dict[float, Figure]  # share of members found, by the share of others that are taken for members


def infer(subject: Subject, shadows: int) -> dict[str, Membership]:
    """What the final common model ("model") and the nodes' last messages ("messages") reveal."""
    rng = np.random.default_rng(subject.setting.seed)
    data, members = subject.data, []
    confidences: dict[str, list[Tensor]] = {"model": [], "messages": []}
    for number in range(shadows):
        member = halves(data, rng)
        members.append(member)
        common, own = trained(subject.with_data(chosen(data, member), subject.setting.seed + 1 + number))
        confidences["model"].append(confidence(subject, common.expand(data.nodes, -1)))
        confidences["messages"].append(confidence(subject, own))
    known = np.stack(members)
    return {view: judged(torch.stack(runs).double().numpy(), known) for view, runs in confidences.items()}


def halves(data: FederatedData, rng: np.random.Generator) -> NDArray[np.bool_]:
    """[N]: a random half of every node's samples."""
    member = np.zeros(len(data), dtype=bool)
    for start, count in zip(data.starts, data.counts, strict=True):
        member[start + rng.permutation(count)[: (count + 1) // 2]] = True
    return member


def chosen(data: FederatedData, member: NDArray[np.bool_]) -> FederatedData:
    """``data`` with the samples in ``member`` [N] only."""
    assert data.y is not None
    rows = torch.as_tensor(np.flatnonzero(member))
    counts = np.bincount(data.owners[member], minlength=data.nodes)
    return replace(data, x=data.x[rows], y=data.y[rows], counts=counts)


def trained(subject: Subject) -> tuple[Tensor, Tensor]:
    """The common model [d] after all rounds, and the nodes' own [n, d] according to the last messages."""
    simulation = subject.simulation()
    own = simulation.models.clone()
    for _ in range(subject.rounds):
        heard = overheard(simulation)
        own = torch.where(heard.sent.unsqueeze(1), heard.models, own)
    return simulation.models.mean(0), own


def confidence(subject: Subject, models: Tensor) -> Tensor:
    """[N]: log(p / (1 - p)) of every sample's class by the model [n, d] of its node; p is exp(-loss)."""
    problem, found = subject.problem, []
    for node in range(subject.data.nodes):
        samples = subject.data.node(node)
        losses = [
            problem.loss.values(outputs[0], targets)
            for outputs, targets in problem.tester.outputs(models[node : node + 1], samples)
        ]
        found.append(torch.cat(losses))
    return -torch.expm1(torch.cat(found).double().clamp(min=1e-12, max=300)).log()


def judged(confidences: Scores, members: Members) -> Membership:
    """How well the likelihood ratios of all runs tell members from others."""
    ratios = likelihood_ratios(confidences, members)
    rng, runs = np.random.default_rng(0), len(ratios)
    picks = [np.arange(runs), *(rng.integers(runs, size=runs) for _ in range(RESAMPLED))]
    figures = np.array([_figures(ratios[pick], members[pick]) for pick in picks])
    low, high = np.percentile(figures[1:], [2.5, 97.5], axis=0)
    each = [Figure(*map(float, part)) for part in zip(figures[0], low, high, strict=True)]
    return Membership(each[0], dict(zip(RATES, each[1:], strict=True)))


def likelihood_ratios(confidences: Scores, members: Members) -> Scores:
    """[S, N]: log density with the sample less log density without it, from all runs but the one judged.

    As the authors do with few runs, one variance is used for all samples. 0 where a sample has no run of a
    kind.
    """
    ratios = np.zeros_like(confidences)
    for run in range(len(confidences)):
        others = np.arange(len(confidences)) != run
        density = []
        for kind in (members[others], ~members[others]):
            count = np.maximum(kind.sum(0), 1)
            mean = (confidences[others] * kind).sum(0) / count
            spread = ((confidences[others] - mean) ** 2 * kind).sum() / max(
                1, int((kind.sum(0) - 1).clip(0).sum())
            )
            density.append(
                -((confidences[run] - mean) ** 2) / (2 * spread + 1e-12) - np.log(spread + 1e-12) / 2
            )
        both = members[others].any(0) & (~members[others]).any(0)
        ratios[run] = np.where(both, density[0] - density[1], 0.0)
    return ratios


def _figures(ratios: Scores, members: Members) -> list[float]:
    scores, labels = ratios.ravel(), members.ravel()
    others = np.sort(scores[~labels])
    # The area under the curve is the chance that a member scores higher than another sample; ties count half.
    below, above = np.searchsorted(others, scores[labels]), np.searchsorted(others, scores[labels], "right")
    found = [float((below + above).mean() / (2 * len(others)))]
    for rate in RATES:
        threshold = others[-1 - min(int(rate * len(others)), len(others) - 1)]
        found.append(float((scores[labels] > threshold).mean()))
    return found
