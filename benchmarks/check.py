"""The speed guard: what a few rounds, measurements and an exchange take, against what they took before.

python benchmarks/check.py [--devices cpu cuda] [--cases "round, softmax"] [--write]

Every case is a ratio to a reference that is timed in turn with it, so that the machine cancels out: for
rounds and exchanges the same products in plain torch (on a GPU, recorded as a graph), for measuring the same
rounds without. ``check.toml`` keeps the ratios. A case fails, by name, if its ratio is above the kept one by
more than the device's band, or above its bar in ``at_most``, if it has one. ``--write`` keeps what was
measured; bars are written by hand, and hold then, too.
"""

from __future__ import annotations

import argparse
import sys
import time
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path

import evaluation
import numpy as np
import tomli_w
import torch
from torch import Tensor
from workloads import METHODS, Workload, cnn, linear, make_simulation, mlp

import holdfast as hf
from holdfast.engines.common.simulation import Simulation
from holdfast.engines.common.trial import ZeroProblem
from holdfast.engines.simulate.choice import executor_for
from holdfast.topology import Network

KEPT = Path(__file__).parent / "check.toml"
LONG_RUN = 10**4  # rounds to prepare for: on a GPU, compiling pays
MEASURED = {"cpu": 16, "cuda": 128}  # rounds that a run that measures is timed over
REPEATS = 9  # times that a case and its reference are timed in turn; the median ratio counts
NODES, NUMBERS = 100, 10**5  # of the exchange

Step = Callable[[], object]


@dataclass(frozen=True)
class Case:
    """What is timed: ``make`` gives, for a device, the ratio of a case to its reference."""

    title: str
    make: Callable[[str], float]
    devices: tuple[str, ...] = ("cpu", "cuda")


def of_rounds(load: Workload, method: str, device: str) -> float:
    """A round over its products in plain torch."""
    simulation = make_simulation(load, method, device, executor=executor_for(torch.device(device)))
    simulation.prepare(LONG_RUN if device == "cuda" else 1)
    return ratio(simulation.step, recorded(products(load, device), device), device)


def of_an_exchange(device: str) -> float:
    """A round of gossip, of which nearly all is the exchange, over a product with the mixing matrix."""
    network, problem = Network.of(hf.ring(NODES)), ZeroProblem(NODES, NUMBERS)
    problem.x0 = problem.x0.to(device, torch.float32)
    executor = executor_for(torch.device(device))
    simulation = Simulation(hf.DSGD(lr=0.1), problem, network, executor=executor)
    simulation.prepare(LONG_RUN if device == "cuda" else 1)
    assert network.weights is not None
    weights = torch.as_tensor(network.weights.toarray()).to(problem.x0)
    x = torch.randn(NODES, NUMBERS, device=device)
    mixed = torch.empty_like(x)
    return ratio(simulation.step, recorded(lambda: torch.mm(weights, x, out=mixed), device), device)


def of_measuring(load: Workload, case: str, device: str) -> float:
    """A run that measures over the same rounds without measuring."""
    ready = evaluation.setting(load, device, "local-gecl")
    ratios = []
    for _ in range(REPEATS // 3):
        times = [
            evaluation.once(ready, METHODS["local-gecl"](load.steps), one, MEASURED[device], device)[0]
            for one in (case, "bare")
        ]
        ratios.append(times[0] / times[1])
    return float(np.median(ratios))


def products(load: Workload, device: str) -> Step:
    """The products of a round's gradients, with gathering and updates, of a stack of dense layers."""
    rng = torch.Generator().manual_seed(0)
    widths = [int(np.prod(load.shape)), *load.options.get("hidden", []), 10]
    layers = [
        (0.05 * torch.randn(load.nodes, wide, narrow, generator=rng)).to(device)
        for narrow, wide in pairwise(widths)
    ]
    samples = torch.rand(load.nodes * load.samples_per_node, widths[0], generator=rng).to(device)
    picks = torch.randint(len(samples), (load.steps, load.nodes * load.batch), generator=rng).to(device)
    right = torch.eye(10, device=device)[torch.randint(10, (load.nodes, load.batch), generator=rng)]

    def round() -> None:
        for step in range(load.steps):
            entered: list[Tensor] = [samples.index_select(0, picks[step]).view(load.nodes, load.batch, -1)]
            for layer in layers[:-1]:
                entered.append(torch.bmm(entered[-1], layer.mT).relu_())
            slopes = torch.bmm(entered[-1], layers[-1].mT).softmax(-1).sub_(right)
            for layer, before in zip(reversed(layers), reversed(entered), strict=True):
                gradient = torch.bmm(slopes.mT, before)
                if before is not entered[0]:
                    slopes = torch.bmm(slopes, layer).mul_(before > 0)
                layer.sub_(gradient, alpha=0.01)

    return round


def recorded(step: Step, device: str) -> Step:
    """``step`` as a CUDA graph; on a CPU, as it is."""
    if device != "cuda":
        return step
    warm = torch.cuda.Stream()
    with torch.cuda.stream(warm):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=warm):
        step()

    def replay(alive: Step = step) -> None:  # the graph reads what the step holds
        graph.replay()

    return replay


def ratio(ours: Step, reference: Step, device: str) -> float:
    """The median ratio of the times of both, taken in turn."""
    for step in (ours, reference):
        step()
        seconds(step, 1, device)
    often = max(1, int(0.1 / seconds(reference, 1, device)))
    return float(
        np.median([seconds(ours, often, device) / seconds(reference, often, device) for _ in range(REPEATS)])
    )


def seconds(step: Step, times: int, device: str) -> float:
    """The time of one of so many calls; on a CPU, of this process alone, as others may be at work there."""
    clock = time.process_time if device == "cpu" else time.perf_counter
    if device == "cuda":
        torch.cuda.synchronize()
    start = clock()
    for _ in range(times):
        step()
    if device == "cuda":
        torch.cuda.synchronize()
    return (clock() - start) / times


CASES = [
    Case("round, softmax n=100, FedAvg", partial(of_rounds, linear(100), "fedavg")),
    Case("round, softmax n=100, Local G-ECL", partial(of_rounds, linear(100), "local-gecl")),
    Case("round, MLP n=10, Local G-ECL", partial(of_rounds, mlp(10, steps=4), "local-gecl"), ("cpu",)),
    Case("round, MLP n=100, FedAvg", partial(of_rounds, mlp(100), "fedavg"), ("cuda",)),
    Case("round, MLP n=100, Local G-ECL", partial(of_rounds, mlp(100), "local-gecl"), ("cuda",)),
    Case("exchange, ring n=100, d=100,000", of_an_exchange),
    Case("measuring by default, softmax n=100", partial(of_measuring, linear(100), "default")),
    Case("measuring the average, softmax n=100", partial(of_measuring, linear(100), "every, average")),
    Case("measuring all nodes, softmax n=100", partial(of_measuring, linear(100), "every"), ("cuda",)),
    Case(
        "measuring the average, CNN n=50",
        partial(of_measuring, cnn(50, steps=5), "every, average"),
        ("cuda",),
    ),
    Case("measuring all nodes, CNN n=50", partial(of_measuring, cnn(50, steps=5), "every"), ("cuda",)),
]


def slower(found: Mapping[str, float], kept: Mapping[str, float], band: float) -> list[str]:
    """What is to be said of the cases whose ratio is above ``band`` times the kept one, or unknown."""
    complaints = []
    for title, now in found.items():
        if title not in kept:
            complaints.append(f"{title}: no ratio is kept; keep this one, {now:.3f}, with --write")
        elif now > band * kept[title]:
            complaints.append(
                f"{title}: {now:.3f} of its reference, {now / kept[title]:.2f} times the {kept[title]:.3f} "
                f"that are kept (at most {band:.2f} times is let pass)"
            )
    return complaints


def above(found: Mapping[str, float], at_most: Mapping[str, float]) -> list[str]:
    """What is to be said of the cases whose ratio is above their bar."""
    return [
        f"{title}: {now:.3f} of its reference; the bar is {at_most[title]:.2f}"
        for title, now in found.items()
        if now > at_most.get(title, float("inf"))
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    here = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    parser.add_argument("--devices", nargs="+", default=here, choices=["cpu", "cuda"])
    parser.add_argument("--cases", nargs="+", default=[""], help="only those that begin with one of these")
    parser.add_argument("--write", action="store_true", help="keep what was measured")
    given = parser.parse_args()
    torch.set_num_threads(1)
    table = tomllib.loads(KEPT.read_text())
    complaints = []
    for device in given.devices:
        kept, found = table[device]["ratios"], {}
        for case in CASES:
            if device in case.devices and case.title.startswith(tuple(given.cases)):
                found[case.title] = case.make(device)
                before = f"{kept[case.title]:.3f}" if case.title in kept else "–"
                print(f"{device:5} {case.title:40} {found[case.title]:7.3f}   kept {before}", flush=True)
        complaints += above(found, table[device].get("at_most", {}))
        if not given.write:
            complaints += slower(found, kept, table[device]["band"])
        kept |= {title: round(now, 3) for title, now in found.items()}
    if given.write:
        KEPT.write_text(tomli_w.dumps(table))
    if complaints:
        sys.exit("\n".join(complaints))


if __name__ == "__main__":
    main()
