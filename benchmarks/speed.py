"""Time per round: a plain loop over clients, the stacked simulator, and our executor; ratios in one run.

python benchmarks/speed.py [--device cuda] [--models mlp cnn] [--nodes 100] [--output table.json]
"""

from __future__ import annotations

import argparse
import gc
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import get_args

import torch
from workloads import (
    METHODS,
    Workload,
    cnn,
    device_rates,
    lenet,
    linear,
    make_problem,
    make_simulation,
    mlp,
    plain_loop,
    round_bytes,
    round_flops,
    seconds,
)

from holdfast.core.precision import Precision
from holdfast.engines.simulate.choice import executor_for

WORKLOADS = {
    "linear": [linear(10), linear(100), linear(1000), linear(10_000)],
    "mlp": [mlp(10), mlp(100), mlp(1000)],
    "cnn": [cnn(10), cnn(50, steps=5), cnn(100), cnn(1000)],
    "lenet": [lenet(10), lenet(100), lenet(1000)],
}
LOOPED_CLIENTS = 100  # of more clients, this many are timed and the time is scaled: a loop is linear in them
LONG_RUN = 10**4  # rounds to prepare for: compiling pays


@dataclass(frozen=True)
class Result:
    """Times in milliseconds per round of all nodes."""

    workload: str
    method: str
    ratio: float  # loop / ours
    loop_ms: float
    stacked_ms: float
    ours_ms: float
    tflops: float  # achieved by ours
    gbytes: float  # per second, of the least traffic with memory
    roofline: float  # the time the device would take at its own rates, over ours
    peak_mib: float
    note: str


def measure(
    load: Workload, method: str, loop_s: float, rates: tuple[float, float], given: argparse.Namespace
) -> Result:
    device, cuda = given.device, given.device.startswith("cuda")
    eager = make_simulation(load, method, device, given.precision, backend="stacked")
    stacked = seconds(eager.step, device, 3)
    del eager
    held = 0
    if cuda:
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()  # by the workloads before
    executor = executor_for(torch.device(device))
    simulation = make_simulation(load, method, device, given.precision, executor)
    note = simulation.prepare(LONG_RUN)
    ours = seconds(simulation.step, device, given.rounds)
    peak = (torch.cuda.max_memory_allocated() - held) / 2**20 if cuda else float("nan")
    flops, traffic = round_flops(load, simulation.problem), round_bytes(load, simulation.problem)
    floor = max(flops / rates[0], traffic / rates[1])
    return Result(
        load.title,
        method,
        loop_s / ours,
        1e3 * loop_s,
        1e3 * stacked,
        1e3 * ours,
        flops / ours / 1e12,
        traffic / ours / 1e9,
        floor / ours,
        peak,
        note,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=20, help="of which the median time is taken")
    parser.add_argument("--precision", default="tf32", choices=get_args(Precision))
    parser.add_argument("--models", nargs="+", default=list(WORKLOADS), choices=WORKLOADS)
    parser.add_argument("--nodes", nargs="+", type=int, help="only workloads of so many nodes")
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    parser.add_argument("--output", type=Path, help="JSON file for the table")
    given = parser.parse_args()
    rates = device_rates(given.device, given.precision)
    print(f"{given.device}: {rates[0] / 1e12:.2f} TFLOP/s in products, {rates[1] / 1e9:.0f} GB/s in copies")
    columns = ["loop/ours", "loop ms", "stacked", "ours ms", "roofline"]
    print(f"{'workload':30} {'method':10}", *(f"{column:>9}" for column in columns))
    results = []
    for load in [load for name in given.models for load in WORKLOADS[name]]:
        if given.nodes and load.nodes not in given.nodes:
            continue
        clients = min(load.nodes, LOOPED_CLIENTS)
        problem = make_problem(load, given.device, given.precision)
        loop_s = seconds(plain_loop(load, problem, clients), given.device, 2) * load.nodes / clients
        del problem
        for method in given.methods:
            result = measure(load, method, loop_s, rates, given)
            results.append(asdict(result))
            print(
                f"{load.title:30} {method:10} {result.ratio:9.1f} {result.loop_ms:9.1f} "
                f"{result.stacked_ms:9.2f} {result.ours_ms:9.3f} {result.roofline:9.0%}  {result.note}",
                flush=True,
            )
            if given.output:
                table = {"flops": rates[0], "bytes": rates[1], "torch": torch.__version__, "rows": results}
                given.output.write_text(json.dumps(table, indent=2) + "\n")


if __name__ == "__main__":
    main()
