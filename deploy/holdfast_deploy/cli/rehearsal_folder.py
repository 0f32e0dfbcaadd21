"""The folder of a rehearsal: the federation file, certificates, and the data that each node trains on."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tomli_w
import torch

from holdfast.core.errors import HoldfastError
from holdfast.core.files import write_atomic
from holdfast.core.tree import leaves, tree_map
from holdfast.data import DATASETS, IID, Dataset, partition
from holdfast.data.samples import Pair
from holdfast.data.tables import Columns, write_columns
from holdfast_deploy.consent import signature_path
from holdfast_deploy.federation_file import FederationFile
from holdfast_deploy.keys import make_key, public_key
from holdfast_deploy.site import read_data
from holdfast_deploy.wire.authority import make_certificates

SOON = 10.0  # seconds after which a member that is lost in a rehearsal is left out
RANDOM_SAMPLES = 64  # per node, where there are no data to rehearse with


class Trial(NamedTuple):
    """What happens to the members of a rehearsal, when a third of the rounds are done."""

    lose: str | None = None  # the node that is killed, and left out by the others
    remove: str | None = None  # the node that is removed by an order of the coordinator
    relay: bool = False  # whether only a relay can be dialled, from the beginning

    @property
    def changes(self) -> bool:
        """Whether members change."""
        return self.lose is not None or self.remove is not None


def lay_out(
    original: FederationFile,
    raw: dict[str, Any],
    trial: Trial,
    path: Path,
    folder: Path,
    data: str | None,
    *,
    write: bool,
) -> None:
    """Makes what the members need in ``folder``: data if ``write``, certificates, and the file.

    ``raw`` is the content of the file ``path``; it is changed for what is to be rehearsed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if write:
        _write_data(original, data, folder)
    change_for(raw, trial, folder / "certs")
    _on_loopback(raw)
    certified = [*raw["node"], *(raw[role] for role in ("server", "relay") if role in raw)]
    make_certificates(folder / "certs", original.name, [m["name"] for m in certified], days=7)
    write_atomic(folder / "federation.toml", tomli_w.dumps(raw).encode())
    if signature_path(path).exists() and not trial.changes:  # addresses are no part of what is signed
        write_atomic(signature_path(folder / "federation.toml"), signature_path(path).read_bytes())


def change_for(raw: dict[str, Any], trial: Trial, certs: Path) -> None:
    """Changes the file ``raw`` for what is to be rehearsed."""
    if trial.changes:  # the coordinator has not signed this one; here the rehearsal is the coordinator
        raw["coordinator"] = public_key(make_key(certs))
    if trial.lose is not None:
        raw["membership"]["remove_after"] = SOON
    elif trial.remove is not None:  # by the order alone
        raw["membership"].pop("remove_after", None)
    if trial.relay:
        raw.setdefault("relay", {"name": "relay", "address": "127.0.0.1:1"})
        raw["node"] = [{k: v for k, v in node.items() if k != "address"} for node in raw["node"]]


def _on_loopback(raw: dict[str, Any]) -> None:
    """All members with an address get a free port of this machine."""
    all_members = [*raw["node"], *(raw[role] for role in ("server", "relay") if role in raw)]
    members = [member for member in all_members if "address" in member]
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in members]
    for member, taken in zip(members, sockets, strict=True):
        member["address"] = f"127.0.0.1:{taken.getsockname()[1]}"
    for taken in sockets:
        taken.close()


def _write_data(federation: FederationFile, data: str | None, folder: Path) -> None:
    """One npz file for each node, as the sites would have it."""
    for i, (name, part) in enumerate(zip(federation.names, _split(federation, data), strict=True)):
        count, own = federation.node[i].samples, len(next(leaves(part.train)))
        if count is not None and own < count:
            raise HoldfastError(f"{name}: the file says {count} samples, the rehearsal has {own}")
        train = tree_map(lambda column, count=count: column[:count], part.train)
        if isinstance(train, Pair):
            test = {} if part.test is None else {"x_test": part.test.x, "y_test": part.test.y}
            np.savez(folder / f"{name}.npz", x_train=train.x, y_train=train.y, **test)
        else:
            write_columns(folder / f"{name}.npz", Columns(train, part.test))


class Part(NamedTuple):
    """What a node has in a rehearsal: trees of samples."""

    train: Any
    test: Any


def _split(federation: FederationFile, data: str | None) -> list[Part]:
    nodes, seed, problem = len(federation.node), federation.seed, federation.problem
    if data is None:
        if problem.input_shape is None:
            raise HoldfastError("columns cannot be made up: give --data, an npz file like a node's own")
        rng = np.random.default_rng(seed)
        parts = []
        for node in federation.node:
            count = (node.samples or RANDOM_SAMPLES) + RANDOM_SAMPLES // 4
            x = torch.from_numpy(rng.standard_normal((count, *problem.input_shape)).astype(np.float32))
            y = rng.standard_normal(count).astype(np.float32)
            labels = torch.from_numpy(
                y if problem.classes is None else rng.integers(0, problem.classes, count)
            )
            cut = count - RANDOM_SAMPLES // 4
            parts.append(Part(Pair(x[:cut], labels[:cut]), Pair(x[cut:], labels[cut:])))
        return parts
    dataset = read_data(Path(data)) if Path(data).suffix == ".npz" else _registered(data, nodes, seed)
    if isinstance(dataset, Columns):
        train, test = dataset.train, dataset.test
        order = np.random.default_rng(seed).permutation(len(next(leaves(train))))
        rows = [torch.from_numpy(np.sort(own)) for own in np.array_split(order, nodes)]
        return [Part(tree_map(lambda column, own=own: column[own], train), test) for own in rows]
    split = partition(dataset.x_train, dataset.y_train, IID(), nodes=nodes, seed=seed)
    return [Part(split.node(i), Pair(dataset.x_test, dataset.y_test)) for i in range(nodes)]


def _registered(data: str, nodes: int, seed: int) -> Dataset:
    found = DATASETS.build(data, {}, nodes=nodes, seed=seed)
    if not isinstance(found, Dataset):
        raise HoldfastError(f"--data {data}: a rehearsal divides arrays only; give an npz file")
    return found
