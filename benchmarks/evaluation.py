"""What measuring costs: the time of ``hf.train`` over that of the same rounds alone, in one run.

python benchmarks/evaluation.py [--device cuda] [--rounds 64] [--repeats 5] [--cases bare default]

Every figure is a median of times that were taken in turn. On a CPU it is the time of the process, all threads
together, so that a busy machine does not count.
``default`` is ``hf.train`` as it is called without a word. ``every`` evaluates the test set at all nodes'
models after every round; ``every, average`` only at the average model. All test sets have 1,000 samples.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from workloads import METHODS, Workload, cnn, linear, network_of, synchronize

import holdfast as hf
from holdfast.contract import Method
from holdfast.data.samples import Pair
from holdfast.experiments.callbacks import JobInfo
from holdfast.experiments.execution import Execution
from holdfast.experiments.metrics import Evaluation, choose_metrics
from holdfast.experiments.option_forms import Cadence, Metrics
from holdfast.experiments.setting import Setting
from holdfast.experiments.spec import TrainSpec
from holdfast.models import MODELS
from holdfast.problem.losses import CrossEntropy

WORKLOADS = {"softmax": linear(100), "cnn": cnn(50, steps=5)}
TEST_SAMPLES = 1000
LONG_RUN = 10**4  # rounds to prepare for: on a GPU, compiling pays
WARM_UP = 4  # rounds before time counts: on a GPU, the second measurement is recorded
CASES: dict[str, tuple[Cadence, Metrics]] = {
    "bare": (10**9, []),
    "default": ("auto", ("default", "minibatch_loss")),
    "every": (1, ["test_accuracy", "worst_accuracy", "average_accuracy", "average_loss", "minibatch_loss"]),
    "every, average": (1, ["average_accuracy", "average_loss", "minibatch_loss"]),
    "every, everything": (1, ("default", "minibatch_loss")),
}


@dataclass(frozen=True)
class Result:
    """Milliseconds per round, and ratios to those of ``bare``."""

    workload: str
    method: str
    case: str
    ms: float
    ratio: float
    every: int  # rounds between measurements


def setting(load: Workload, device: str, rounds_of: str) -> Setting:
    """Random images: only the time matters."""
    rng = torch.Generator().manual_seed(0)
    total = load.nodes * load.samples_per_node + TEST_SAMPLES
    x = torch.rand(total, *load.shape, generator=rng)
    y = torch.randint(0, 10, (total,), generator=rng)
    counts = np.full(load.nodes, load.samples_per_node)
    torch.manual_seed(0)
    model = MODELS.build(load.model, load.options, input_shape=load.shape, outputs=10)
    given = {"rounds": LONG_RUN, "data": "own", "batch_size": load.batch, "metrics": []}
    return Setting(
        spec=TrainSpec.of_arguments(given),
        data=hf.FederatedData(x[TEST_SAMPLES:], y[TEST_SAMPLES:], counts),
        test_data=Pair(x[:TEST_SAMPLES], y[:TEST_SAMPLES]),
        network=network_of(rounds_of, load.nodes),
        loss=CrossEntropy(),
        make_module=lambda: model,
        seed=0,
        device=device,
    )


class Until(hf.Callback):
    """Ends a run after a round."""

    late = True

    def __init__(self, last: int) -> None:
        self.last = last

    def on_round(self, job: JobInfo, round: int) -> None:
        if round == self.last:
            raise hf.Stop


class Timer(hf.Callback):
    """Times the rounds from ``first`` to ``last``, when all that is made once has been made."""

    late = True

    def __init__(self, first: int, last: int, device: str) -> None:
        self.first, self.last, self.device = first, last, device
        # On a CPU the time of this process alone counts, as others may be at work there.
        self.clock = time.process_time if device == "cpu" else time.perf_counter
        self.times: dict[int, float] = {}

    def on_round(self, job: JobInfo, round: int) -> None:
        if round in (self.first, self.last):
            synchronize(self.device)
            self.times[round] = self.clock()

    @property
    def ms(self) -> float:
        """Per round."""
        return 1e3 * (self.times[self.last] - self.times[self.first]) / (self.last - self.first)


def once(given: Setting, method: Method, case: str, rounds: int, device: str) -> tuple[float, int]:
    """Milliseconds per round, and rounds between measurements."""
    cadence, wanted = CASES[case]
    metrics = choose_metrics(wanted, has_test=True, classes=3)
    simulation = given.simulation(method, "all", rounds=1)
    run = Execution(simulation, LONG_RUN, cadence, Evaluation(metrics, given.test))
    whole = -(-max(rounds, run.every) // run.every) * run.every if case != "bare" else rounds
    # From one measurement to another, so that every cadence gets its share.
    first = -(-WARM_UP // run.every) * run.every if case != "bare" else WARM_UP
    timer = Timer(first, first + whole, device)
    run.execute(JobInfo("benchmark", case, run.rounds), [timer, Until(timer.last)])
    return timer.ms, run.every


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--models", nargs="+", default=list(WORKLOADS), choices=WORKLOADS)
    parser.add_argument("--methods", nargs="+", default=["local-gecl"], choices=METHODS)
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=CASES)
    parser.add_argument("--rounds", type=int, default=16, help="of one measurement of time")
    parser.add_argument("--repeats", type=int, default=5, help="of which the median is taken")
    parser.add_argument("--output", type=Path, help="JSON file for the table")
    given = parser.parse_args()
    results: list[Result] = []
    print(f"{'workload':28} {'method':10} {'case':18} {'ms/round':>9} {'ratio':>6} {'every':>6}")
    for load in [WORKLOADS[name] for name in given.models]:
        for method in given.methods:
            ready = setting(load, given.device, method)
            times: dict[str, list[float]] = {case: [] for case in given.cases}
            every: dict[str, int] = {}
            for _ in range(given.repeats):
                for case in given.cases:
                    ms, every[case] = once(
                        ready, METHODS[method](load.steps), case, given.rounds, given.device
                    )
                    times[case].append(ms)
            bare = float(np.median(times["bare"]))
            for case, taken in times.items():
                ms = float(np.median(taken))
                results.append(Result(load.title, method, case, ms, ms / bare, every[case]))
                print(
                    f"{load.title:28} {method:10} {case:18} {ms:9.2f} {ms / bare:6.2f} {every[case]:6}",
                    flush=True,
                )
    if given.output:
        given.output.write_text(json.dumps([asdict(result) for result in results], indent=2) + "\n")


if __name__ == "__main__":
    main()
