"""``holdfast recommend``: what to start with, for the network and budget of an experiment, and why."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from holdfast.algorithms.load import build_algorithm
from holdfast.core.errors import HoldfastError
from holdfast.engines.common.dry_run import dry_run
from holdfast.experiments.assembly import Setting
from holdfast.experiments.config import read_experiment
from holdfast.experiments.networks import as_network
from holdfast.experiments.plan import Job, Plan
from holdfast.experiments.recommendation import FULL, Advice, Facts, advise
from holdfast.problem.reference.curvature import why_not_convex
from holdfast.report.format import bytes_text
from holdfast.topology import Network

SITE = "docs"
DEFAULT_STEPS = 8


def recommend_experiment(
    path: Path | None,
    overrides: list[str],
    data_dir: Path | None,
    *,
    megabytes: float | None = None,
    as_json: bool = False,
) -> None:
    """Looks at the data, the model and the network of the experiment's first job; trains nothing."""
    plan = Plan(read_experiment(path, overrides), data_dir, "cpu")
    job = plan.jobs[0]
    setting = plan.setting(job)
    facts = _facts(setting, job)
    graph = advise("graph", facts)
    network = _network(setting, graph)
    facts = replace(
        facts, least_eigenvalue=_least_eigenvalue(network)
    )  # the method has to fit what is advised
    method = advise("method", facts)
    total = _bytes(method, setting, network, job)
    if megabytes is not None:
        if megabytes <= 0:
            raise HoldfastError(f"--megabytes: should be greater than 0, got {megabytes:g}")
        facts = replace(facts, over_budget=total / (1e6 * megabytes))
    control = advise("control", facts)
    advice = [method, control, graph, advise("compression", facts)]
    both = [value for each in (method, control) for _, value in _keys(each)]
    keys = [("algorithm", both), *_keys(graph), *_keys(advice[-1])]
    overrides_text = [f"{key}={_toml(value)}" for key, value in keys]
    if as_json:
        described = {"facts": asdict(facts), "bytes": total, "advice": [asdict(each) for each in advice]}
        print(json.dumps(described | {"overrides": overrides_text}, indent=2))
        return
    _show(setting, facts, advice, total, job)
    command = " ".join(f"'{text}'" for text in overrides_text)
    Console().print(f"\ntry it: holdfast tune {path or ''} {command}".replace("  ", " "), soft_wrap=True)


def _facts(setting: Setting, job: Job) -> Facts:
    network, terms = setting.network, setting.terms
    steps = job.experiment.algorithm.parameters.get("local_steps", DEFAULT_STEPS)
    return Facts(
        nodes=network.nodes,
        server=network.is_server,
        cohort=job.cohort not in ("all", network.nodes),
        constant=network.sequence is None,
        sporadic=network.activity is not None,
        mixing_lambda=0.0 if network.is_server else float(network.spectral_lambda),
        least_eigenvalue=_least_eigenvalue(network),
        skew=_skew(setting.labels),
        strongly_convex=terms.l2 > 0 and why_not_convex(setting.problem) is None,
        exact_gradients=terms.batch_size == "full",
        local_steps=int(steps),
    )


def _least_eigenvalue(network: Network) -> float:
    return 0.0 if network.is_server else float(network.least_eigenvalue)


def _skew(labels: np.ndarray) -> float | None:
    """Mean total variation distance of the nodes' labels [n, classes] from all labels, 0 to 1."""
    if not labels.size:
        return None
    shares = labels / labels.sum(1, keepdims=True)
    return float(np.abs(shares - labels.sum(0) / labels.sum()).sum(1).mean() / 2)


def _network(setting: Setting, graph: Advice) -> Network:
    chosen = graph.settings.get("network")
    return as_network(chosen["topology"], setting.network.nodes) if chosen else setting.network


def _bytes(method: Advice, setting: Setting, network: Network, job: Job) -> float:
    """What all send in all rounds, not compressed."""
    given = {k: v for k, v in method.settings["algorithm"].items() if k not in ("name", "curvature")}
    needed = {"nu": 1.0} if "curvature" in method.settings["algorithm"] else {"lr": 0.1}
    footprint = dry_run(
        build_algorithm(method.settings["algorithm"]["name"], needed | given), network, job.cohort
    )
    vectors = footprint.vectors_at_start + job.rounds * footprint.vectors_per_round
    return vectors * setting.dim * FULL


def _keys(advice: Advice) -> list[tuple[str, Any]]:
    """Its settings as the keys of an experiment file."""
    if "network" in advice.settings:
        return [("network.topology", advice.settings["network"]["topology"])]
    if "algorithm" in advice.settings:
        own = advice.settings["algorithm"]
        return [("algorithm", own if "curvature" in own else {"lr": 0.1} | own)]
    return list(advice.settings.items())


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {_toml(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return json.dumps(value)


def _show(setting: Setting, facts: Facts, advice: list[Advice], total: float, job: Job) -> None:
    if facts.server:
        where = "a server" + (f", {job.cohort} of them in a round" if facts.cohort else "")
    else:
        kind = "a graph" if facts.constant else "a graph whose links change"
        where = f"{kind}, lambda = {facts.mixing_lambda:.3f}"
    skew = "" if facts.skew is None else f"; labels differ by {facts.skew:.2f} of 1"
    console = Console()
    console.print(f"you have: {facts.nodes} nodes, {where}{skew}; a model of {setting.dim:,} parameters")
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True, vertical="top")
    table.add_column(overflow="fold")
    for each in advice:
        said = ", ".join(f"{key} = {_toml(value)}" for key, value in _keys(each)) or "as it is"
        table.add_row(each.topic, said)
        table.add_row("", f"{each.why} ({SITE}/{each.source})", style="dim")
    console.print(table)
    console.print(f"all nodes send {bytes_text(total)} in {job.rounds} rounds, before compression")
