"""Golden entries of training in one process: ``hf.minimize`` and ``hf.train``, all in float64."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from golden import Entries, Quantities, digest, group
from test_conformance import CASES, Case, case_id

import holdfast as hf

NODES, DIM = 5, 4


def _named(case: Case) -> dict[str, Any]:
    rate = {} if case.rate is None else {case.rate: case.options.get(case.rate, 0.05)}
    return {"name": case.name, **case.options, **rate}


def _functions(nodes: int) -> list[Any]:
    """Quadratics of different shapes, with different minimisers."""
    rng = np.random.default_rng(5)
    matrices = torch.tensor(rng.uniform(-0.5, 0.5, (nodes, DIM, DIM)))
    minimisers = torch.tensor(3 * rng.standard_normal((nodes, DIM)))
    return [
        lambda x, A=A, b=b: ((A @ (x - b)) ** 2).sum() / 2 + ((x - b) ** 2).sum() / 4
        for A, b in zip(matrices, minimisers, strict=True)
    ]


def _history(result: Any) -> Quantities:
    """Every figure, round by round, but for the time that passed."""
    names = {name: None for row in result.history.rows for name in row if "seconds" not in name}
    columns = {name: [row.get(name) for row in result.history.rows] for name in names}
    return {"status": result.status, **columns}


def _last(result: Any) -> Quantities:
    """The figures after the last round."""
    row = result.history.rows[-1]
    return {"status": result.status, **{name: row[name] for name in row if "seconds" not in name}}


def _minimized(algorithm: Any, nodes: int = NODES, rounds: int = 6, **options: Any) -> Quantities:
    start = [1.0, -1.0, 2.0, 0.5]
    result = hf.minimize(_functions(nodes), start, algorithm, rounds, seed=3, progress=False, **options)
    return {"x": digest(result.x), **_last(result)}


def _samples(nodes: int = NODES) -> Any:
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((160, 6)), rng.integers(0, 3, 160)
    return hf.partition(x + y[:, None], y, hf.Dirichlet(0.5), nodes=nodes, seed=0)


def _test_samples() -> tuple[torch.Tensor, torch.Tensor]:
    rng = np.random.default_rng(1)
    x, y = rng.standard_normal((40, 6)), rng.integers(0, 3, 40)
    return torch.tensor(x + y[:, None]), torch.tensor(y)


def _by_formula(model: torch.nn.Module) -> torch.nn.Module:
    """Weights that no generator and no initialisation of torch has a part in."""
    with torch.no_grad():
        for parameter in model.parameters():
            count = torch.arange(parameter.numel(), dtype=torch.float64)
            parameter.copy_((torch.sin(1 + 1.7 * count) / 2).reshape(parameter.shape))
    return model


def _network(outputs: int = 3) -> torch.nn.Module:
    layers = [torch.nn.Linear(6, 5), torch.nn.Tanh(), torch.nn.Linear(5, outputs)]
    return _by_formula(torch.nn.Sequential(*layers).double())


def _trained(algorithm: Any, **options: Any) -> Quantities:
    given: dict[str, Any] = {
        "model": _network(),
        "data": _samples(),
        "test": _test_samples(),
        "rounds": 3,
        "batch_size": 8,
        "seed": 3,
        "progress": False,
        "dtype": "float64",
    }
    result = hf.train(algorithm, **(given | options))
    return {"models": digest(result.models), **_last(result)}


GECL = hf.LocalGECL(lr=0.1, local_steps=2)
SCAFFOLD = hf.SCAFFOLD(lr=0.1, local_steps=2)
FEDAVG = hf.FedAvg(lr=0.1, local_steps=2)


@group("methods on quadratics")
def methods_on_quadratics(folder: Path) -> Entries:
    for case in CASES:
        topology = "server" if case.server else "ring"
        yield case_id(case), _minimized(_named(case), topology=topology)


@group("methods on minibatches")
def methods_on_minibatches(folder: Path) -> Entries:
    for case in CASES:
        topology = "server" if case.server else "ring"
        found = _trained(_named(case), topology=topology)
        yield (
            case_id(case),
            {name: found[name] for name in ("models", "status", "train_loss", "payload_bytes")},
        )


TOPOLOGIES: dict[str, Any] = {
    **{name: name for name in ("ring", "double-ring", "complete", "star", "line", "exponential", "server")},
    "torus": "torus",
    "hypercube": "hypercube",
    "erdos-renyi": {"name": "erdos-renyi", "p": 0.5},
    "random-geometric": {"name": "random-geometric", "radius": 0.6},
    "base-graph": "base-graph",
    "base-graph of degree 2": {"name": "base-graph", "degree": 2},
    "one-peer-exponential": "one-peer-exponential",
    "equi-static": {"name": "equi-static", "shifts": 2},
    "equi-dynamic": "equi-dynamic",
    "weights laplacian": hf.Network.of(hf.ring(6), mixing="laplacian"),
    "changing": hf.Network.varying(lambda epoch: hf.erdos_renyi(6, p=0.5, seed=epoch), every=2),
    "sporadic": hf.Network.of(hf.ring(6)).sporadic(0.6, 0.5, seed=1),
}


@group("topologies")
def topologies(folder: Path) -> Entries:
    for name, topology in TOPOLOGIES.items():
        nodes = 8 if name == "hypercube" else 6
        method = hf.DSpodFL(lr=0.05) if name == "sporadic" else hf.KGT(lr=0.05, local_steps=2)
        yield name, _minimized(method, nodes, topology=topology)


CHANNELS: dict[str, hf.Channel] = {
    "half": hf.Half(),
    "half with feedback": hf.Half(feedback=True),
    "bfloat16": hf.BFloat16(),
    "top-k": hf.TopK(0.3),
    "random-k": hf.RandomK(0.5),
    "natural": hf.Natural(4, dithered=True),
    "uniform": hf.Uniform(8),
    "uniform, one bit": hf.Uniform(1),
    "low-rank": hf.LowRank(2),
    "chain": hf.chain(hf.TopK(0.3), hf.Uniform(8)),
}


@group("channels")
def channels(folder: Path) -> Entries:
    for name, channel in CHANNELS.items():
        yield f"{name}, graph", _trained(GECL, topology="ring", channel=channel)
        yield f"{name}, server", _trained(FEDAVG, channel=channel)
        yield f"{name}, cohort", _trained(SCAFFOLD, channel=channel, cohort=2, rounds=4)


@group("privacy")
def privacy(folder: Path) -> Entries:
    loud = hf.DP(epsilon=50.0, delta=1e-3, clip=1.0, noise_multiplier=1.0)
    yield "samples, Poisson", _trained(GECL, topology="ring", sampling="poisson", private=loud)
    yield "samples, all data", _trained(FEDAVG, batch_size="full", private=loud)
    noises = {f"nodes, noise of {noise}": {"noise": noise} for noise in ("server", "clients", "distributed")}
    quantile = {"quantile": 0.5, "noise_multiplier": 0.3, "epsilon": 1e4}
    for name, changes in (noises | {"nodes, a quantile clips": quantile}).items():
        given: dict[str, Any] = {"epsilon": 50.0, "delta": 1e-3, "clip": 0.1, "noise_multiplier": 1.0}
        budget = hf.NodeDP(**(given | changes), accountant="rdp")  # which is quick
        yield name, _trained(FEDAVG, private=budget)


@group("privacy that is planned", slow=True)
def privacy_that_is_planned(folder: Path) -> Entries:
    samples = hf.DP(epsilon=20.0, delta=1e-3, clip=1.0)
    yield "samples", _trained(GECL, topology="ring", sampling="poisson", private=samples)
    nodes = hf.NodeDP(epsilon=9.0, delta=1e-3, clip=0.1)
    yield "nodes", _trained(FEDAVG, private=nodes)
    yield "nodes, Poisson cohorts", _trained(FEDAVG, private=replace(nodes, cohorts="poisson"), cohort=3)


@group("cohorts and attacks")
def cohorts_and_attacks(folder: Path) -> Entries:
    central: tuple[Any, ...] = (
        FEDAVG,
        SCAFFOLD,
        hf.Ditto(lr=0.1, local_steps=2),
        hf.FedDyn(lr=0.1, alpha=1.0, local_steps=2),
        hf.TAMUNA(lr=0.1, p=0.5, copies=2),
    )
    for method in central:
        yield f"cohort of 3, {type(method).__name__}", _trained(method, cohort=3, rounds=5)
    rules = (hf.Median(), hf.TrimmedMean(1), hf.Krum(1))
    attacks = (hf.SignFlip([1]), hf.InnerProduct([1]), hf.LittleIsEnough([1]), hf.LabelFlip([1]))
    for rule in rules:
        for attack in attacks:
            yield f"{rule!r} {attack!r}", _trained(FEDAVG, aggregation=rule, attack=attack)
    for gossip in (hf.ClippedGossip(radius=0.5), hf.NearestNeighbours(1)):
        yield (
            f"{gossip!r}",
            _trained(hf.Gossip(lr=0.1), topology="complete", aggregation=gossip, attack=hf.SignFlip([1])),
        )


def _shifted(samples: Any, key: Any) -> Any:
    return samples._replace(x=samples.x + 0.1 * hf.random_uniform(key, samples.x.shape))


OPTIONS: dict[str, dict[str, Any]] = {
    "as they are": {},
    "sampling in epochs": {"sampling": "epochs"},
    "sampling by chance": {"sampling": "poisson"},
    "all data": {"batch_size": "full"},
    "local epochs": {"algorithm": hf.SCAFFOLD(lr=0.1), "local_epochs": 1},
    "penalties": {"l2": 0.1, "l1": 0.01, "nonconvex": 0.02},
    "every sample counts alike": {"weights": "samples"},
    "one node after the other": {"backend": "loop"},
    "personal models": {"personalize": 2, "metrics": ("default", "personal_accuracy")},
    "every second round": {"evaluate_every": 2, "rounds": 5},
    "on a ring": {"topology": "ring"},
    "another seed": {"seed": 4},
    "a test set for every node": {"test": [_test_samples()] * NODES},
    "more figures": {
        "l2": 0.1,
        "model": _by_formula(torch.nn.Linear(6, 3).double()),
        "metrics": ("grad_norm2", "stationarity", "rel_energy", "optimum_distance"),
    },
}


@group("options of training")
def options_of_training(folder: Path) -> Entries:
    for name, options in OPTIONS.items():
        usual = GECL if options.get("topology") == "ring" else SCAFFOLD
        yield name, _trained(**({"algorithm": usual} | options))
    yield "augmented", _trained(SCAFFOLD, augment=_shifted)
    real = torch.tensor(np.random.default_rng(3).standard_normal((160, 1)))
    for loss in ("mse", "huber", "l1"):
        data = hf.partition(_samples().x, real, hf.IID(), nodes=NODES, seed=0)
        given = {"data": data, "model": _network(1), "test": None, "loss": loss}
        yield f"loss {loss}", _trained(SCAFFOLD, **given)
    yield "loss hinge", _trained(SCAFFOLD, loss="hinge")
    batch_norm = torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 3))
    for buffers in ("local", "average"):
        yield (
            f"batch norm, {buffers}",
            _trained(SCAFFOLD, model=_by_formula(batch_norm.double()), buffers=buffers),
        )
    for optimizer in (
        "sgd",
        "momentum",
        "adamw",
        "clip",
        "fedadam",
        "fedyogi",
        "fedadagrad",
        "warmup-cosine",
    ):
        yield (
            f"optimizer {optimizer}",
            _trained(
                {"name": "local-gecl", "lr": 0.05, "local_steps": 2, "optimizer": optimizer}, topology="ring"
            ),
        )
    for schedule in (hf.constant(0.1), hf.halving(0.1, 2), hf.cosine(0.1, 3, 0.01), hf.linear(0.1, 3, 0.01)):
        yield f"schedule {schedule!r}", _trained(hf.Gossip(lr=schedule, local_steps=2), topology="ring")
    yield (
        "history",
        _history(
            hf.train(
                SCAFFOLD,
                model=_network(),
                data=_samples(),
                test=_test_samples(),
                rounds=4,
                evaluate_every=1,
                progress=False,
                dtype="float64",
            )
        ),
    )


@group("data and solvers")
def data_and_solvers(folder: Path) -> Entries:
    rng = np.random.default_rng(2)
    x, y = rng.standard_normal((120, 3)), rng.integers(0, 4, 120)
    splits = {
        "iid": hf.IID(),
        "dirichlet": hf.Dirichlet(0.3),
        "shards": hf.Shards(2, size=15),
        "classes-per-node": hf.ClassesPerNode(2),
        "unequal": hf.Unequal(),
    }
    for name, split in splits.items():
        data = hf.partition(x, y, split, nodes=4, seed=1)
        counts = [int(count) for count in data.counts]
        yield f"partition {name}", {"counts": counts, "x": digest(data.x), "y": digest(data.y)}
    for name in ("digits", "breast-cancer"):
        dataset = hf.DATASETS.build(name, {})
        parts = ("x_train", "y_train", "x_test", "y_test")
        yield f"dataset {name}", {part: digest(getattr(dataset, part)) for part in parts}
    solvers: tuple[Any, ...] = (
        hf.Newton(),
        hf.LBFGS(),
        hf.FISTA(stop="gradient", tolerance=1e-6),
        hf.AOGM(stop="gradient", tolerance=1e-6),
        hf.GradientDescent(lr=0.02, max_steps=3),
        hf.StochasticGradientDescent(lr=0.02, steps=3),
    )
    for solver in solvers:
        yield f"solver {solver!r}", _minimized(hf.PDMM(gamma=1.0, solver=solver), topology="ring")
