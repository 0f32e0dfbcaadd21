"""``holdfast federation remove``, ``add`` and ``replace``: orders of the coordinator to running members."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, Literal

from holdfast.core.errors import HoldfastError
from holdfast.core.files import private_files, write_atomic
from holdfast.engines.deploy.agreement import Decision
from holdfast.engines.deploy.epochs import Epoch, Order, first_epoch
from holdfast.engines.deploy.federation import NodeConfig
from holdfast.engines.deploy.signing import load_key, sign
from holdfast.engines.deploy.wire.credentials import load_credentials
from holdfast.engines.deploy.wire.dialling import open_channel
from holdfast.engines.deploy.wire.listening import require_loopback
from holdfast.engines.deploy.wire.membership import Word, ask
from holdfast.experiments.consent import holds_key
from holdfast.experiments.federation import FederationFile, read_federation

Change = Literal["remove", "add", "replace"]

TIMEOUT = 5.0  # seconds in which a member has to answer


@private_files()
def change_members(
    path: Path,
    change: Change,
    member: str,
    *,
    asker: str | None,
    certs: Path | None,
    samples: int | None,
    output: Path | None,
    insecure: bool,
) -> None:
    """Signs the order for ``member``, NAME or NAME=host:port, writes it, and tells everybody who is there."""
    file, folder = read_federation(path), certs or path.parent / "certs"
    if file.membership is None:
        raise HoldfastError(f"{path} has no [membership]: its members stay as they are")
    if not holds_key(folder, file):
        raise HoldfastError(
            f"{folder} holds no key of the coordinator of {path}: only it can change the members"
        )
    if insecure:
        require_loopback(file, None)
    asker = asker or _with_certificate(file, folder, insecure)
    credentials = None if insecure else load_credentials(folder, asker)
    told = asyncio.run(_tell(file, asker, credentials, None))
    now = max((epoch for epoch in told.values() if epoch is not None), key=lambda e: e.number, default=None)
    if now is None:
        raise HoldfastError("no member could be reached, so nobody knows who takes part now: try again")
    node = _node(file, now, change, member, samples)
    order = Order(federation=file.id, epoch=now.number, change=change, node=node)
    order = order.model_copy(update={"signature": sign("membership", order.document, load_key(folder))})
    output = output or path.parent / f"{change}-{node.name}.json"
    write_atomic(output, order.model_dump_json().encode() + b"\n")
    told = asyncio.run(_tell(file, asker, credentials, order, now))
    took = sorted(name for name, epoch in told.items() if epoch is not None)
    print(f"wrote {output}: {change} {node.name}, in epoch {now.number} of {len(now.nodes)} nodes")
    print(f"told {', '.join(took) or 'nobody'}; they tell the others, and change at a round's border")
    print("where nobody can be told over the network, copy the file to node-NAME/membership/order.json there")


def _node(file: FederationFile, now: Epoch, change: Change, member: str, samples: int | None) -> NodeConfig:
    """Whom the order is about, as it is to be in the next epoch."""
    name, _, address = member.partition("=")
    known = {node.name: node for node in [*file.node, *now.nodes]}
    if change != "add" and name not in now.names:
        raise HoldfastError(f"{name!r} does not take part now; these do: {', '.join(now.names)}")
    if change == "add" and name in now.names:
        raise HoldfastError(f"{name!r} takes part already; if it has lost its folder, use 'replace'")
    before = known.get(name)
    if before is None and not address and file.server is None:
        raise HoldfastError(f"{name}: others have to reach it; give {name}=host:port")
    changes: dict[str, Any] = {"address": address} if address else {}
    if samples is not None:
        changes["samples"] = samples
    given = {"name": name} if before is None else before.model_dump()
    return NodeConfig.of(given | changes)


def _with_certificate(file: FederationFile, folder: Path, insecure: bool) -> str:
    names = [member.name for member in file.members]
    found = names if insecure else [name for name in names if (folder / f"{name}.key").exists()]
    if not found:
        raise HoldfastError(f"{folder} holds no key of a member; name the folder with --certs")
    return found[0]


async def _tell(
    file: FederationFile, asker: str, credentials: Any, order: Order | None, now: Epoch | None = None
) -> dict[str, Epoch | None]:
    """Tells everybody an order, if there is one; the epoch that each is in, None where nobody answers."""
    now = now or first_epoch(file)
    federation = file.in_epoch(now)
    members = [federation.server] if federation.server is not None else federation.node
    secure = credentials is not None

    async def tell(name: str) -> Epoch | None:
        channel, epoch = open_channel(federation, name, credentials), now
        try:
            while True:  # a member tells about a few epochs at a time
                word = Word(federation=file.id, epoch=epoch.number, incarnation="", order=order)
                reply = await ask(channel, asker, word, secure, TIMEOUT)
                if reply is None or reply.epoch <= epoch.number:
                    return None if reply is None else epoch
                later: list[Decision] = [d for d in reply.decisions if d.epoch.number > epoch.number]
                if not later:
                    return epoch
                epoch = later[-1].epoch
        finally:
            await channel.close()

    answers = await asyncio.gather(*(tell(member.name) for member in members))
    return {member.name: answer for member, answer in zip(members, answers, strict=True)}
