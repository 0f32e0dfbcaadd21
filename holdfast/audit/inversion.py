"""Gradient inversion: samples from one message.

Where the first layer is linear with a bias, every row of its gradient is a weighted sum of inputs, and the
gradient of the bias is the sum of the same weights: of one sample, their quotient is the input itself. No
scale has to be known, so a change of the model after one step does as well as a gradient. For other models,
and for larger batches, inputs are found whose gradient points where the message does (Geiping et al. 2020).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from holdfast.audit.subject import Overheard, Subject, overheard
from holdfast.data.samples import Pair
from holdfast.problem.model_problem import ModelProblem
from holdfast.problem.source import Batch

MOST_NODES = 5  # nodes whose messages are tried
MOST_SAMPLES = 4  # samples that are reconstructed together by optimisation
STEPS = 300
SMALL = 200_000  # parameters up to which optimisation is tried


class Inversion(NamedTuple):
    """How close an attacker comes to a node's samples: Euclidean distance over the sample's own norm."""

    errors: list[float]  # of the best candidate of each node that was tried
    labels: int  # the number of nodes whose sample's class was guessed, too
    guess: float  # the error of the mean of all samples, without any message
    attack: str


class Layer(NamedTuple):
    """Where weights [rows, columns] and bias [rows] of a linear layer stand in the model's vector."""

    weight: slice
    bias: slice
    rows: int

    def split(self, vector: Tensor) -> tuple[Tensor, Tensor]:
        return vector[self.weight].view(self.rows, -1), vector[self.bias]


def invert(subject: Subject, of_mean: bool = False) -> Inversion:
    """Tries the first round's messages of a few nodes; ``of_mean``: only what the server made of them."""
    heard = overheard(subject.simulation())
    if of_mean:
        heard = heard._replace(messages=heard.after[None])
    nodes = [0] if of_mean else torch.nonzero(heard.sent)[:MOST_NODES, 0].tolist()
    problem, found = subject.problem, []
    for row in nodes:
        owners = range(problem.nodes) if of_mean else [row]
        inputs, targets = (
            torch.cat(parts) for parts in zip(*(_samples(problem, i) for i in owners), strict=True)
        )
        found.append(_best(subject, heard, row, inputs, targets, of_mean))
    all_samples = [_samples(problem, i)[0] for i in range(problem.nodes)]
    guess = min(_distance(torch.cat(all_samples).mean(0), all_samples[row]).min().item() for row in nodes)
    attacks = {attack for _, _, attack in found}
    return Inversion(
        [error for error, _, _ in found],
        sum(right for _, right, _ in found),
        guess,
        " and ".join(sorted(attacks)),
    )


def _best(
    subject: Subject, heard: Overheard, row: int, inputs: Tensor, targets: Tensor, of_mean: bool
) -> tuple[float, bool, str]:
    """Relative error of the best candidate, whether its class was guessed, and the attack that found it."""
    problem = subject.problem
    first, last = linear_layers(problem)
    best = (float("inf"), False, "nothing")
    for vector in directions(heard, row):
        if first is not None:
            for candidate, label in analytic(vector, first, last):
                error, right = _compared(candidate, label, inputs, targets)
                best = min(best, (error, right, "analytic"), key=lambda each: each[0])
    batch, senders = subject.setting.objective.batch_size, problem.nodes if of_mean else 1
    done = best[0] < 0.01 or row > 0  # it takes long, so it is tried on one node's message
    if not done and problem.dim <= SMALL and batch != "full" and batch * senders <= MOST_SAMPLES:
        for vector in directions(heard, row):
            for candidate, label in optimised(
                problem, heard.before[row], vector, last, batch * senders, inputs[0]
            ):
                error, right = _compared(candidate, label, inputs, targets)
                best = min(best, (error, right, "optimisation"), key=lambda each: each[0])
    return best


def directions(heard: Overheard, row: int) -> list[Tensor]:
    """Candidates for a gradient up to its scale: vectors as they were sent, and minus the model before."""
    both = [vector for sent in heard.messages for vector in (sent[row], sent[row] - heard.before[row])]
    return [vector for vector in both if vector.isfinite().all() and vector.norm() > 0]


def analytic(vector: Tensor, first: Layer, last: Layer | None) -> list[tuple[Tensor, int | None]]:
    """Inputs, flat, with the class of a single sample, as the last bias shows it."""
    weight, bias = first.split(vector)
    strong = torch.nonzero(bias.abs() > 1e-9 * bias.abs().max())[:, 0]
    label = None if last is None else odd_one(vector[last.bias])
    return [(weight[row] / bias[row], label) for row in strong]


def odd_one(gradient: Tensor) -> int | None:
    """The class whose entry [C] differs in sign from all others: probabilities, minus 1 at the class."""
    for signs in (gradient < 0, gradient > 0):
        if int(signs.sum()) == 1:
            return int(signs.nonzero()[0, 0])
    return None


def optimised(
    problem: ModelProblem, x: Tensor, vector: Tensor, last: Layer | None, count: int, like: Tensor
) -> list[tuple[Tensor, int | None]]:
    """``count`` inputs whose mean gradient at ``x`` is parallel to ``vector``, by Adam on 1 - |cosine|."""
    torch_state = torch.Generator().manual_seed(0)
    inputs = 0.1 * torch.randn(count, *like.shape, generator=torch_state, dtype=like.dtype)
    inputs.requires_grad_()
    pull = vector[last.bias] if last is not None else torch.zeros(2)
    labels = pull.abs().topk(min(count, len(pull))).indices
    labels = labels.repeat(-(-count // len(labels)))[:count]
    optimiser = torch.optim.Adam([inputs], lr=0.05)
    row, weight, key = (
        x.clone().requires_grad_(),
        x.new_full((count,), 1 / count),
        torch.zeros(4, dtype=torch.int64),
    )
    for _ in range(STEPS):
        optimiser.zero_grad()
        value = problem.row_loss.value(row, Batch(Pair(inputs, labels), weight), key)
        (gradient,) = torch.autograd.grad(value, row, create_graph=True)
        away = 1 - torch.cosine_similarity(gradient, vector, dim=0).abs()
        (inputs.grad,) = torch.autograd.grad(away, inputs)
        optimiser.step()
    return [(each.detach().flatten(), int(label)) for each, label in zip(inputs, labels, strict=True)]


def linear_layers(problem: ModelProblem) -> tuple[Layer | None, Layer | None]:
    """The layer that reads the inputs, and the one that makes the outputs, if they are linear with a bias."""
    with_parameters = [
        (name, module)
        for name, module in problem.model.template.named_modules()
        if any(True for _ in module.parameters(recurse=False))
    ]
    starts, place = {}, 0
    for name, numbers in problem.model.numbers.items():
        starts[name] = slice(place, place + numbers)
        place += numbers

    def layer(name: str, module: nn.Module) -> Layer | None:
        if not isinstance(module, nn.Linear) or module.bias is None:
            return None
        prefix = f"{name}." if name else ""
        return Layer(starts[f"{prefix}weight"], starts[f"{prefix}bias"], module.out_features)

    first, last = (layer(*with_parameters[place]) for place in (0, -1))
    numbers = _samples(problem, 0)[0][0].numel()
    fits = first is not None and first.weight.stop - first.weight.start == first.rows * numbers
    return first if fits else None, last


def _samples(problem: ModelProblem, node: int) -> tuple[Tensor, Tensor]:
    """All samples of ``node`` as the model sees them: inputs [N, ...] and classes [N]."""
    inputs, targets = [], []
    for batch in problem.source.all_of(torch.tensor([node]), 2**20):
        kept = batch.weight[0] > 0
        inputs.append(batch.samples.x[0][kept])
        targets.append(batch.samples.y[0][kept])
    return torch.cat(inputs), torch.cat(targets)


def _distance(candidate: Tensor, inputs: Tensor) -> Tensor:
    """[N]: how far ``candidate`` is from each of ``inputs`` [N, ...], relative to its norm."""
    flat = inputs.flatten(1)
    away: Tensor = (flat - candidate.flatten()).norm(dim=1) / flat.norm(dim=1).clamp(min=1e-12)
    return away


def _compared(candidate: Tensor, label: int | None, inputs: Tensor, targets: Tensor) -> tuple[float, bool]:
    away = _distance(candidate, inputs)
    nearest = int(away.argmin())
    return float(away[nearest]), label is not None and label == int(targets[nearest])
