"""Golden entries of deployed federations: members in threads, real sockets and TLS, in float64."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

from federation_runs import DeployedRun, describe, make_data
from golden import Entries, Quantities, digest, group
from golden_runs import columns
from relay_runs import relayed, relaying

from holdfast_deploy.federation_file import make_federation

GECL = {"name": "local-gecl", "lr": 0.1, "local_steps": 2}
SCAFFOLD = {"name": "scaffold", "lr": 0.1, "local_steps": 2}
FEDAVG = {"name": "fedavg", "lr": 0.1, "local_steps": 2}
SERVER = {"topology": "server"}
QUIET = {"noise_multiplier": 1.0, "accountant": "rdp"}  # quickly accounted for
BUDGET = {"epsilon": 50.0, "delta": 1e-3, "clip": 1.0} | QUIET

FEDERATIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "ring": (GECL, {"nodes": 4}),
    "server": (SCAFFOLD, {"network": SERVER}),
    "server, cohorts of two": (SCAFFOLD, {"network": SERVER | {"cohort": 2}, "nodes": 4}),
    "every neighbour something else": (
        {"name": "ecl", "lr": 0.1, "local_steps": 2},
        {"network": {"topology": "star"}, "nodes": 4},
    ),
    "sporadic": (
        {"name": "dspodfl", "lr": 0.1},
        {"network": {"topology": "ring", "links": 0.5, "compute": 0.6}, "nodes": 4},
    ),
    "adamw": ({**GECL, "lr": 0.01, "optimizer": {"name": "adamw", "keep": True}}, {}),
    "top-k": (GECL, {"channel": {"name": "top-k", "share": 0.4}}),
    "half, server": (FEDAVG, {"network": SERVER, "channel": "half"}),
    "lossless": (GECL, {"compression": "lossless"}),
    "masked sums": (SCAFFOLD, {"network": SERVER, "nodes": 4, "secure_aggregation": {}}),
    "a quorum that waits": (
        SCAFFOLD,
        {"network": SERVER, "round": {"quorum": 3, "deadline": "60s"}},
    ),
    "privacy of samples": (
        FEDAVG,
        {
            "network": SERVER,
            "problem": {"sampling": "poisson", "private": BUDGET},
            "node": [{"name": name, "samples": len(make_data(i).x_train)} for i, name in enumerate("abc")],
        },
    ),
    "privacy of nodes": (
        FEDAVG,
        {"network": SERVER, "problem": {"private": BUDGET | {"unit": "node"}}},
    ),
}


def _figures(folder: Path) -> Quantities:
    """A member's metrics.csv, but for bytes that may be on their way while a row is written."""
    if not (folder / "metrics.csv").exists():
        return {}
    left_out = ("algorithm", "seed", "wire_bytes_sent", "wire_bytes_received")
    return {name: cells for name, cells in columns(folder / "metrics.csv").items() if name not in left_out}


def _messages(folder: Path) -> Quantities:
    """Who was given what and who gave what, by the audit log, in an order that no race decides."""
    found: dict[str, set[str]] = {}
    for line in (folder / "audit.jsonl").read_text().splitlines():
        entry = json.loads(line)
        what = f"{entry['event']} {entry['peer']}" if "peer" in entry else entry["event"]
        message = f"{entry['round']}.{entry['exchange']}: {entry['bytes']}" if "exchange" in entry else ""
        found.setdefault(what, set()).add(message)
    return {what: ", ".join(sorted(messages)) for what, messages in found.items()}


def _carried_out(raw: dict[str, Any], folder: Path) -> Entries:
    run = DeployedRun(make_federation(raw, "test"), folder, counted_noise=True)
    with relaying(run) if "relay" in raw else contextlib.nullcontext():
        run.carry_out()
    for error in run.errors.values():
        raise error
    yield "", {"fingerprint": run.federation.id}
    for member in run.federation.members:
        own = folder / member.name
        errors = {
            line["event"] for line in run.log if line["node"] == member.name and line["level"] == "error"
        }
        model = {"model": digest(run.models[member.name])} if member.name in run.models else {}
        yield (
            f", {member.name}",
            {
                **model,
                "errors": sorted(errors),
                "files": sorted({path.name for path in own.iterdir()}),
                **_messages(own),
                **_figures(own),
            },
        )


@group("deployed")
def deployed(folder: Path) -> Entries:
    agreed = make_federation(describe(GECL), "test").agreement
    yield "what members agree on", json.loads(agreed)
    for number, (name, (algorithm, changes)) in enumerate(FEDERATIONS.items()):
        raw = describe(algorithm, **({"rounds": 3, "dtype": "float64"} | changes))
        for member, found in _carried_out(raw, folder / f"{number}"):
            yield name + member, found
    direct = describe(GECL, rounds=3, dtype="float64")
    for member, found in _carried_out(relayed(direct, "ab"), folder / "relayed"):
        yield f"relayed{member}", found
