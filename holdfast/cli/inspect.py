"""``holdfast inspect``: what an experiment will be like, before it is run."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from holdfast.cli.options import (
    AsJson,
    DataDir,
    Device,
    ExperimentPath,
    Overrides,
    print_path,
    split_overrides,
)

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

    from holdfast.experiments.plan import Job, Plan
    from holdfast.experiments.setting import Setting

SHOWN_NODES = 30


def inspect(
    experiment: ExperimentPath = None,
    overrides: Overrides = None,
    data_dir: DataDir = None,
    device: Device = "cpu",
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for the pictures.")] = Path(
        "inspect"
    ),
    as_json: AsJson = False,
) -> None:
    """Look before training: the labels of each node, the graph, how fast it mixes, what a run will cost."""
    import json

    from rich.console import Console

    from holdfast.experiments.plan import Plan
    from holdfast.experiments.spec import read_experiment
    from holdfast.report.format import bytes_text

    path, changes = split_overrides(experiment, overrides)
    plan = Plan(read_experiment(path, changes), data_dir, device)
    plan.check()
    if as_json:
        print(json.dumps(_as_data(plan), indent=2))
        return
    output.mkdir(parents=True, exist_ok=True)
    console = Console()
    first = plan.jobs[0]
    setting = plan.setting(first)
    shared = [job for job in plan.jobs if plan.shares_setting(job, first)]
    if len(shared) < len(plan.jobs):
        console.print(f"{len(plan.jobs)} jobs in all; shown: the setting of the first, {first.title}\n")
    data = setting.data
    console.print(f"partition: {len(data):,} samples on {data.nodes} nodes, {data.unused:,} unused")
    if data.description:
        console.print(f"data: {data.description}")
    console.print(_partition_table(setting, console.width))
    console.print(_network_lines(setting))
    problem = setting.problem
    size = bytes_text(problem.dim * problem.x0.element_size())
    console.print(f"model: {problem.dim:,} parameters = {size}")
    console.print(_cost_table(plan, shared))
    for stem in _save_pictures(setting, output):
        print_path(console, "picture", stem.with_suffix(".png"))


def _as_data(plan: Plan) -> dict[str, Any]:
    """The same figures for programs: in bytes and seconds, not rounded, and without pictures."""
    first = plan.jobs[0]
    setting = plan.setting(first)
    network, problem = setting.network, setting.problem
    jobs = [job for job in plan.jobs if plan.shares_setting(job, first)]
    return {
        "jobs": len(plan.jobs),
        "shown": first.title,
        "nodes": setting.data.nodes,
        "samples": [int(count) for count in setting.data.counts],
        "unused_samples": setting.data.unused,
        "labels": setting.labels.tolist(),
        "network": {
            "server": network.is_server,
            "directed_links": network.directed_links,
            "mixing_parameter": network.mixing_parameter,
            "lambda": network.spectral_lambda,
        },
        "parameters": problem.dim,
        "algorithms": [vars(_cost(plan, job)) | {"label": _title(job)} for job in jobs],
    }


def _partition_table(setting: Setting, width: int) -> Table:
    """Samples of every class on every node, darker for more; with many classes only how many a node holds."""
    from rich.table import Table

    data, labels = setting.data, setting.labels
    most = int(labels.max(initial=1))
    cell = len(f" {most:,} ")
    fits = len("node samples") + cell * labels.shape[1] <= width
    heads = [str(label) for label in range(labels.shape[1])] if fits else ["classes"]
    table = Table(box=None, padding=0)
    for head in ("node", " samples", *(f"{head:>{cell - 1}} " for head in heads)):
        table.add_column(head, justify="right", no_wrap=True)
    for node in range(min(data.nodes, SHOWN_NODES)):
        held = (_heat(n, most) for n in labels[node].tolist()) if fits else [f"{(labels[node] > 0).sum()} "]
        table.add_row(str(node), f"{data.counts[node]:,}", *held)
    if data.nodes > SHOWN_NODES:
        table.caption = f"and {data.nodes - SHOWN_NODES} nodes more"
    return table


def _heat(count: int, darkest: int) -> Text:
    from rich.text import Text

    if count == 0:
        return Text("· ", style="dim")
    shade = 235 - round(155 * (count / darkest) ** 0.5)
    ink = "black" if shade > 140 else "white"
    return Text(f" {count:,} ", style=f"{ink} on rgb({shade},{shade + 10 if shade < 225 else 235},235)")


def _network_lines(setting: Setting) -> str:
    network = setting.network
    if network.is_server:
        return f"\nnetwork: a server and {network.nodes} clients; it averages exactly, p = 1, lambda = 0\n"
    degrees = network.degrees
    if network.period is not None:
        rounds = [network.at(round) for round in range(network.period)]
        degree = max(int(now.degrees.max()) for now in rounds)
        return (
            f"\nnetwork: {network.nodes} nodes whose links change and repeat after {network.period} "
            f"rounds; at most {degree} neighbours at a time\n"
        )
    return (
        f"\nnetwork: {network.nodes} nodes, {network.directed_links // 2} links, "
        f"{degrees.min()} to {degrees.max()} neighbours; mixing parameter "
        f"p = {network.mixing_parameter:.6f}, lambda = {network.spectral_lambda:.6f}\n"
    )


def _cost_table(plan: Plan, jobs: list[Job]) -> Table:
    from rich.table import Table

    from holdfast.report.format import bytes_text, count_text, seconds_text

    table = Table(box=None, pad_edge=False, collapse_padding=True, caption_justify="left")
    table.add_column("algorithm", overflow="fold", vertical="bottom", min_width=10)
    for column in (
        "vectors\n/link",
        "traffic\n/round",
        "traffic\nin all",
        "grads\n/node",
        "memory",
        "time\n/round",
        "time\nin all",
    ):
        table.add_column(column, justify="right", no_wrap=True)
    for job in jobs:
        cost = _cost(plan, job)
        seconds = cost.seconds_per_round
        table.add_row(
            _title(job),
            f"{cost.vectors_per_link:g}",
            bytes_text(cost.bytes_per_round),
            bytes_text(cost.bytes),
            count_text(cost.gradients_per_node_and_round),
            bytes_text(cost.memory_bytes),
            seconds_text(seconds) if seconds >= 1 else f"{1000 * seconds:.3g} ms",
            seconds_text(cost.seconds),
        )
    table.caption = "\nTime is estimated from rounds tried just now; measuring metrics comes on top."
    return table


@dataclass(frozen=True)
class _Cost:
    """What a job will take; seconds are estimated from rounds tried just now, without measuring."""

    vectors_per_link: float
    bytes_per_round: float
    bytes: float
    gradients_per_node_and_round: float
    memory_bytes: int
    seconds_per_round: float
    seconds: float


def _cost(plan: Plan, job: Job) -> _Cost:
    footprint, rounds = plan.footprint(job), job.experiment.rounds
    seconds, bytes_per_number = _tried(plan, job)
    vector = plan.setting(job).problem.dim * bytes_per_number
    return _Cost(
        vectors_per_link=footprint.vectors_per_link,
        bytes_per_round=footprint.vectors_per_round * vector,
        bytes=(footprint.vectors_at_start + rounds * footprint.vectors_per_round) * vector,
        gradients_per_node_and_round=footprint.gradients_per_round,
        memory_bytes=plan.memory(job),
        seconds_per_round=seconds,
        seconds=seconds * rounds,
    )


def _title(job: Job) -> str:
    return " ".join([job.label, *job.axis_labels])


def _tried(plan: Plan, job: Job) -> tuple[float, float]:
    """Seconds of the fastest of three rounds, after one to warm up; bytes of a number on the wire."""
    simulation = plan.simulation(job)
    simulation.step()
    times = []
    for _ in range(3):
        start = time.perf_counter()
        simulation.step()
        float(simulation.models.sum())  # wait for the device
        times.append(time.perf_counter() - start)
    sent = simulation.traffic.numbers  # none yet if a method skips these rounds
    return min(times), simulation.payload_bytes / sent if sent else simulation.problem.x0.element_size()


def _save_pictures(setting: Setting, output: Path) -> list[Path]:
    from holdfast.report.figures import save_figure
    from holdfast.report.setting_figures import network_figure, partition_figure

    network, names = setting.network, setting.data.names
    figures = {"network": network_figure(network.nodes, network.weighted_links(), network.is_server, names)}
    if setting.labels.size:
        figures["partition"] = partition_figure(setting.labels, called=names)
    for name, figure in figures.items():
        save_figure(figure, output / name)
    return [output / name for name in figures]
