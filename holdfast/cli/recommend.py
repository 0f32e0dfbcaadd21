"""``holdfast recommend``: what to start with, for the network and budget of an experiment, and why."""

from __future__ import annotations

import json
import shlex
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from holdfast.cli.options import AsJson, DataDir, ExperimentPath, Overrides, split_overrides
from holdfast.core.errors import HoldfastError

if TYPE_CHECKING:
    import numpy as np

    from holdfast.experiments.advice import Advice
    from holdfast.experiments.plan import Job
    from holdfast.experiments.recommendation import Facts
    from holdfast.experiments.setting import Setting
    from holdfast.topology import Network

SITE = "docs"
DEFAULT_STEPS = 8
UNCOMPRESSED = "identity"


@dataclass(frozen=True)
class Proposal:
    """What is advised, and what it sends."""

    facts: Facts
    method: Advice
    control: Advice
    graph: Advice
    compression: Advice
    sent: float  # bytes of all nodes in all rounds
    plain: float  # the same without compression, by the method that is advised then

    @property
    def advice(self) -> list[Advice]:
        return [self.method, self.control, self.graph, self.compression]


def recommend(
    experiment: ExperimentPath = None,
    overrides: Overrides = None,
    data_dir: DataDir = None,
    megabytes: Annotated[
        float | None, typer.Option(help="What all nodes together may send in all rounds.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Say which method, graph and compression to start with on this network, and why; trains nothing."""
    from rich.console import Console

    from holdfast.experiments.plan import Plan

    if megabytes is not None and megabytes <= 0:
        raise HoldfastError(f"--megabytes: should be greater than 0, got {megabytes:g}")
    path, own = split_overrides(experiment, overrides)
    plan = Plan.of_file(path, own, data_dir, "cpu")
    job = plan.jobs[0]
    setting = plan.setting(job)
    proposal = propose(setting, job, None if megabytes is None else 1e6 * megabytes)
    changes = _changes(proposal, job, beside=True)
    refused = _refused(path, [*own, *changes], data_dir)
    command = _command(path, [*own, *changes], data_dir)
    alone = _command(path, [*own, *_changes(proposal, job, beside=False)], data_dir)
    if as_json:
        described = {
            "facts": asdict(proposal.facts),
            "bytes": proposal.plain,
            "bytes_sent": proposal.sent,
            "advice": [asdict(each) for each in proposal.advice],
            "overrides": changes,
            "refused": refused,
            "command": f"holdfast run {command}",
            "tune": f"holdfast tune {alone}",
        }
        print(json.dumps(described, indent=2))
        return
    _show(setting, job, proposal)
    if refused:
        Console().print(f"\nthis does not run as it is: {refused}", soft_wrap=True, markup=False)
        return
    lines = f"\ntry it: holdfast run {command}\nthen tune the step sizes: holdfast tune {alone}"
    Console().print(lines, soft_wrap=True, markup=False, highlight=False)


def propose(setting: Setting, job: Job, budget: float | None) -> Proposal:
    """What the rules say; ``budget`` is in bytes."""
    from holdfast.experiments.advice import advise, compression
    from holdfast.experiments.payload import planned_bytes

    facts = _facts(setting, job)
    graph = advise("graph", facts)
    network = _network(setting, graph)
    # The method and the compression have to fit the graph that is advised.
    facts = replace(facts, least_eigenvalue=_least_eigenvalue(network), links=_links(network))
    method = advise("method", facts)

    def sent(settings: dict[str, Any]) -> float:
        own = {"algorithm": method.settings["algorithm"]} | settings
        return planned_bytes(own, setting, network, job)

    chosen, bytes_sent = compression(facts, budget, sent)
    if "algorithm" in chosen.settings:
        method = replace(chosen, topic="method", why="for the compression below, which says why")
    return Proposal(facts, method, advise("control", facts), graph, chosen, bytes_sent, sent({}))


def _facts(setting: Setting, job: Job) -> Facts:
    from holdfast.experiments.recommendation import Facts

    network, algorithm = setting.network, job.config
    epochs, steps = algorithm.local_epochs, algorithm.parameters.get("local_steps", DEFAULT_STEPS)
    return Facts(
        nodes=network.nodes,
        server=network.is_server,
        cohort=job.cohort not in ("all", network.nodes),
        constant=network.sequence is None,
        sporadic=network.activity is not None,
        mixing_lambda=0.0 if network.is_server else float(network.spectral_lambda),
        least_eigenvalue=_least_eigenvalue(network),
        skew=_skew(setting.labels),
        steps={"local_steps": int(steps)} if epochs is None else {"local_epochs": epochs},
        dim=setting.dim,
        rounds=job.rounds,
        links=_links(network),
        plain=network.trusting and setting.objective.private is None,
    )


def _least_eigenvalue(network: Network) -> float:
    return 0.0 if network.is_server else float(network.least_eigenvalue)


def _links(network: Network) -> float:
    return network.at(0).directed_links / network.nodes


def _skew(labels: np.ndarray) -> float | None:
    """Mean total variation distance of the nodes' labels [n, classes] from all labels, 0 to 1."""
    import numpy as np

    if not labels.size:
        return None
    shares = labels / labels.sum(1, keepdims=True)
    return float(np.abs(shares - labels.sum(0) / labels.sum()).sum(1).mean() / 2)


def _network(setting: Setting, graph: Advice) -> Network:
    from holdfast.experiments.choices import as_network

    chosen = graph.settings.get("network")
    return as_network(chosen["topology"], setting.network.nodes) if chosen else setting.network


def _changes(proposal: Proposal, job: Job, *, beside: bool) -> list[str]:
    """What is advised as overrides; with compression, the same run without it ``beside`` it."""
    from holdfast.experiments.option_forms import as_choice

    both = [_algorithm(proposal.method), _algorithm(proposal.control)]
    found: list[tuple[str, Any]] = [("algorithm", both)]
    if "network" in proposal.graph.settings:
        found.append(("network.topology", proposal.graph.settings["network"]["topology"]))
    if "channel" in proposal.compression.settings:
        channel = proposal.compression.settings["channel"]
        found.append(("channel", [UNCOMPRESSED, channel] if beside else channel))
    elif as_choice("channel", job.spec.channel).name != UNCOMPRESSED:
        found.append(("channel", UNCOMPRESSED))
    return [f"{key}={_toml(value)}" for key, value in found]


def _algorithm(advice: Advice) -> dict[str, Any]:
    own: dict[str, Any] = advice.settings["algorithm"]
    return {"lr": 0.1} | own


def _refused(path: Path | None, overrides: list[str], data_dir: Path | None) -> str:
    """Why the advised experiment cannot run; "" if it can."""
    from holdfast.experiments.plan import Plan

    try:
        Plan.of_file(path, overrides, data_dir, "cpu").check()
    except HoldfastError as error:
        return str(error)
    return ""


def _command(path: Path | None, overrides: list[str], data_dir: Path | None) -> str:
    """The arguments of ``holdfast run``: the user's own changes, then the advised ones, which win."""
    kept = {text.partition("=")[0].strip(): text for text in overrides}
    own = [text for key, text in kept.items() if not key.startswith(("algorithm.", "channel."))]
    folder = [] if data_dir is None else ["--data-dir", str(data_dir)]
    return shlex.join([*([] if path is None else [str(path)]), *own, *folder])


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {_toml(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return json.dumps(value)


def _show(setting: Setting, job: Job, proposal: Proposal) -> None:
    from rich.console import Console
    from rich.table import Table

    facts = proposal.facts
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
    for each in proposal.advice:
        table.add_row(each.topic, _in_words(each))
        table.add_row("", f"{each.why} ({SITE}/{each.source})", style="dim")
    console.print(table)
    fewer = ""
    if "channel" in proposal.compression.settings:
        fewer = f", {proposal.plain / proposal.sent:.1f} times fewer than the same run without compression"
    console.print(f"the method sends {proposal.sent / 1e6:,.2f} MB in all, in {job.rounds} rounds{fewer}")


def _in_words(advice: Advice) -> str:
    if advice.topic == "compression":
        channel = advice.settings.get("channel")
        return "none" if channel is None else f"channel = {_toml(channel)}"
    if "algorithm" in advice.settings:
        return f"algorithm = {_toml(_algorithm(advice))}"
    chosen = advice.settings.get("network")
    return f"network.topology = {_toml(chosen['topology'])}" if chosen else "as it is"
