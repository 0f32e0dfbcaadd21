"""Golden entries of experiments: runs from TOML and from Python, their folders, and how they are resumed."""

from __future__ import annotations

import csv
import json
import signal
import tomllib
from pathlib import Path
from typing import Any

import torch
from command_line import holdfast
from golden import Entries, Quantities, digest, group
from safetensors.torch import load_file

import holdfast as hf

SMALL = """\
name = "small"
rounds = 4
evaluate_every = 1
metrics = "default"
dtype = "float64"

[problem]
dataset = "digits"
nodes = 4
partition = { name = "dirichlet", h = 0.5 }
model = { name = "mlp", hidden = [8] }
batch_size = 8

[network]
topology = "ring"
"""
TWO = '[{ name = "local-gecl", lr = 0.1, local_steps = 2 }, { name = "gossip", lr = 0.1, local_steps = 2 }]'
CENTRAL = '{ name = "scaffold", lr = 0.1, local_steps = 2 }'
EXPERIMENTS = {
    "two methods": [f"algorithm={TWO}", "evaluate_every=2"],
    "two seeds and a sweep": ['algorithm={name="gossip",lr=[0.1,0.01]}', "seeds=[0,1]", "rounds=2"],
    "other weights": [f"algorithm={TWO}", "network.mixing=laplacian", "network.topology=star"],
    "a random graph": [
        f"algorithm={TWO}",
        'network.topology={name="erdos-renyi",p=0.7}',
        "network.graph_every=2",
    ],
    "sporadic": ['algorithm={name="dspodfl",lr=0.1}', "network.compute=0.6", "network.links=0.5"],
    "a cohort": [f"algorithm={CENTRAL}", "network.topology=server", "network.cohort=2"],
    "local epochs": [
        'algorithm={name="fedavg",lr=0.1,local_epochs=1}',
        "network.topology=server",
        "rounds=2",
    ],
    "compressed": [f"algorithm={TWO}", 'channel={name="top-k",share=0.2}'],
    "attacked": [
        f"algorithm={CENTRAL}",
        "network.topology=server",
        "network.aggregation=median",
        'network.attack={name="sign-flip",nodes=[1]}',
    ],
    "private": [
        f"algorithm={CENTRAL}",
        "network.topology=server",
        "problem.sampling=poisson",
        "problem.private={epsilon=20.0,delta=1e-3,clip=1.0}",
    ],
    "one that diverges": ['algorithm={name="gossip",lr=1e200}', "rounds=3"],
}


def columns(file: Path) -> Quantities:
    """A CSV file as a quantity for each column, but for the time that passed."""
    with file.open(newline="") as text:
        rows = list(csv.DictReader(text))
    return {name: [_cell(row[name]) for row in rows] for name in rows[0] if "seconds" not in name}


def _cell(text: str) -> Any:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text


def _without_times(value: Any) -> Any:
    if isinstance(value, dict):
        left_out = ("seconds", "digest", "executor", "final")  # the last is the last row of metrics.csv
        return {k: _without_times(v) for k, v in value.items() if not k.endswith(left_out)}
    return [_without_times(item) for item in value] if isinstance(value, list) else value


def _flat(tables: dict[str, Any], before: str = "") -> Quantities:
    """Tables in tables as one, its keys with dots."""
    found: Quantities = {}
    for key, value in tables.items():
        found |= _flat(value, f"{before}{key}.") if isinstance(value, dict) else {f"{before}{key}": value}
    return found


def _written(folder: Path) -> Quantities:
    """All that a run left behind, each file by what people and programs read in it."""
    files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    models = {path.stem: load_file(path) for path in sorted((folder / "models").glob("*"))}
    return {
        "files": [name for name in files if not name.startswith("plots/")],
        "plots": sum(name.startswith("plots/") for name in files),
        "summary": _flat(_without_times(json.loads((folder / "summary.json").read_text()))),
        **{
            f"model of {name}": digest(torch.cat([tensors[part].flatten() for part in sorted(tensors)]))
            for name, tensors in models.items()
        },
        **columns(folder / "metrics.csv"),
    }


def _run(folder: Path, *overrides: str) -> Path:
    experiment = folder / "small.toml"
    experiment.write_text(SMALL)
    name = f"run-{len(list(folder.iterdir()))}"
    outcome = holdfast("run", experiment, *overrides, "--runs-dir", folder, "--name", name, "--quiet")
    assert outcome.code in (0, 1, 3), outcome.err
    return folder / name


@group("experiments from files", slow=True)
def experiments_from_files(folder: Path) -> Entries:
    for name, overrides in EXPERIMENTS.items():
        yield name, _written(_run(folder, *overrides))


@group("an experiment from a file")
def an_experiment_from_a_file(folder: Path) -> Entries:
    run = _run(folder, *EXPERIMENTS["two methods"])
    yield "what it left", _written(run)
    yield "with defaults", _flat(tomllib.loads((run / "experiment.toml").read_text()))


class _CtrlC(hf.Callback):
    """Interrupts a run after so many rounds."""

    def __init__(self, rounds: int) -> None:
        self.rounds = rounds

    def on_round(self, job: Any, round: int) -> None:
        if round == self.rounds:
            signal.raise_signal(signal.SIGINT)


@group("resumed and compared")
def resumed_and_compared(folder: Path) -> Entries:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.rand(90, 5, generator=generator, dtype=torch.float64), torch.arange(90) % 3
    model = torch.nn.Linear(5, 3).double()
    with torch.no_grad():
        for parameter in model.parameters():
            count = torch.arange(parameter.numel(), dtype=torch.float64)
            parameter.copy_(torch.cos(count).reshape(parameter.shape))
    options: dict[str, Any] = {
        "model": model,
        "data": hf.partition(x, y, hf.Dirichlet(0.5), nodes=4, seed=0),
        "test": (x[:30], y[:30]),
        "rounds": 6,
        "batch_size": 4,
        "progress": False,
        "dtype": "float64",
    }
    for name, method, more in (
        ("local-gecl", hf.LocalGECL(lr=0.1, local_steps=2), {"topology": "ring"}),
        ("scaffold", hf.SCAFFOLD(lr=0.1, local_steps=2), {"cohort": 2, "channel": hf.TopK(0.5)}),
    ):
        given = options | more | {"run_dir": folder / name, "checkpoint_every": 2, "evaluate_every": 2}
        stopped = hf.train(method, **given, callbacks=[_CtrlC(3)])
        result = hf.train(method, **given, resume=True)
        yield (
            name,
            {
                "stopped": stopped.status,
                "status": result.status,
                "models": digest(result.models),
                **columns(folder / name / "metrics.csv"),
            },
        )
    methods = {"one": hf.SCAFFOLD(lr=0.1, local_steps=2), "two": hf.FedAvg(lr=0.1, local_steps=2)}
    compared = hf.compare(methods, **options, seeds=[0, 1], run_dir=folder / "compared")
    yield (
        "comparison",
        {
            **columns(folder / "compared" / "metrics.csv"),
            "models": [number for name in methods for number in digest(_weights(compared.model(name, 1)))],
        },
    )
    tuned = hf.tune(methods["one"], **options, run_dir=folder / "tuned", values=[0.05, 0.2], widen=1)
    yield (
        "tuning",
        {
            "values": [trial.value for trial in tuned.trials],
            "scores": [trial.score and trial.score.mean for trial in tuned.trials],
            "best": repr(tuned.best),
            "on the edge": tuned.on_edge,
        },
    )


def _weights(module: torch.nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in module.parameters()])
