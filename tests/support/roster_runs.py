"""The simulator with the rosters that a deployed federation went through, and members in threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from federation_runs import PATIENCE, make_data
from torch import Tensor

from holdfast.data.federated import FederatedData
from holdfast.engines.common.simulation import Simulation
from holdfast.problem.losses import LOSSES
from holdfast.problem.model_problem import ModelProblem
from holdfast_deploy.federation import LimitsConfig
from holdfast_deploy.federation_file import FederationFile
from holdfast_deploy.member.lifetime import run_through_rosters
from holdfast_deploy.member.node import open_node
from holdfast_deploy.member.server import open_server
from holdfast_deploy.member.session import Session
from holdfast_deploy.member.waiting import Stopped
from holdfast_deploy.membership.agreement import Decision
from holdfast_deploy.membership.kept_models import KeptModels, all_pinned
from holdfast_deploy.membership.roster import Roster, first_roster
from holdfast_deploy.ops.events import Events
from holdfast_deploy.site import initial_model, open_site
from holdfast_deploy.wire.authority import make_certificates
from holdfast_deploy.wire.credentials import Credentials, load_credentials

DRAWING = threading.Lock()  # initial models are drawn with torch's own generator, of which a process has one
ALPHABET = "abcdefghijklmnop"  # a member's data are those of its letter, whoever else takes part


def problem_of(federation: FederationFile) -> ModelProblem:
    problem, shape = federation.problem, tuple(federation.problem.input_shape or ())
    data = [make_data(ALPHABET.index(name), shape) for name in federation.names]
    return ModelProblem(
        initial_model(federation),
        LOSSES.build(problem.loss.name, problem.loss.parameters),
        FederatedData.of_nodes([(d.x_train, d.y_train) for d in data]),
        batch_size=None if problem.batch_size == "full" else problem.batch_size,
        seed=federation.seed,
        weights=problem.weights,
    )


def simulate_rosters(file: FederationFile, rosters: list[Roster]) -> dict[str, Tensor]:
    """The simulator's models after all rounds, by name."""
    simulation, now, lasting = None, first_roster(file), list[Roster]()
    for roster in rosters:  # all that came after the round that everybody goes back to is forgotten
        lasting = [*(before for before in lasting if before.first <= roster.first), roster]
    for roster in [now, *lasting]:
        federation = file.in_roster(roster)
        cohort: Any = federation.network.cohort
        if simulation is None:
            simulation = Simulation(
                federation.method,
                problem_of(federation),
                federation.member_network,
                seed=federation.seed,
                cohort=cohort,
                channel=federation.wire_channel.chosen,
            )
        else:
            while simulation.round < roster.first:
                simulation.step()
            network = federation.member_network
            donors = [
                0 if federation.led else now.names.index(roster.donor(n, network)) for n in roster.names
            ]
            simulation = simulation.with_members(problem_of(federation), network, donors, cohort)
        now = roster
    assert simulation is not None
    while simulation.round < file.rounds:
        simulation.step()
    return dict(zip(now.names, simulation.models, strict=True))


def rosters_of(folder: Path) -> list[Roster]:
    """Those that a member has written down."""
    paths = sorted((folder / "membership").glob("roster-*.json"), key=lambda path: int(path.stem[7:]))
    return [Decision.model_validate_json(path.read_bytes()).roster for path in paths]


def last_model(folder: Path, rosters: list[Roster]) -> Tensor:
    """A node's model after its last round, in full precision: the newest that it keeps."""
    place = folder / f"roster-{rosters[-1].number}" if rosters else folder
    kept = KeptModels(place, 0, all_pinned, LimitsConfig())
    file = kept.find(kept.rounds[-1])
    assert file is not None
    (spec,) = file.header.tensors
    model: Tensor = file.read(torch.empty(spec.shape, dtype=torch.float64), torch.device("cpu"))
    return model


class Threads:
    """Members of a federation whose members may change, in threads of this process, with certificates."""

    def __init__(self, file: FederationFile, folder: Path, extra: str = "") -> None:
        self.file, self.folder = file, folder
        self.members: dict[str, Session] = {}
        self.models: dict[str, Tensor] = {}
        self.errors: dict[str, BaseException] = {}
        self.threads: dict[str, threading.Thread] = {}
        self.log: list[dict[str, Any]] = []
        self.limit = file.rounds + 1
        self.certs = folder / "certs"
        make_certificates(self.certs, file.name, [*(m.name for m in file.certified), *extra], days=1)

    def credentials(self, name: str) -> Credentials:
        return load_credentials(self.certs, name, self.file.coordinator)

    def start(self, name: str, file: FederationFile | None = None, folder: str = "") -> None:
        self.threads[name] = threading.Thread(
            target=self._run, args=[name, file or self.file, self.folder / (folder or name)], daemon=True
        )
        self.threads[name].start()

    def _run(self, name: str, file: FederationFile, folder: Path) -> None:
        serves = file.server is not None and file.server.name == name
        addresses = {member.name: member.address for member in file.members}
        listen = addresses.get(name) or None if serves or file.server is None else None

        def make(now: FederationFile, hosting: Any) -> Any:
            with DRAWING:
                if serves:
                    return open_server(now, folder, initial_model(now), **hosting)
                data = make_data(ALPHABET.index(name), tuple(now.problem.input_shape or ()))
                return open_node(now, name, folder, open_site(now, name, data), **hosting)

        def run(member: Any) -> Any:
            self.members[name] = member
            member.open(listen)
            return member.run()

        events = Events(name, self.write)
        try:
            credentials = self.credentials(name)
            model = run_through_rosters(file, name, folder, credentials, events, make, run, listen=listen)
            if model is not None:
                self.models[name] = model
        except BaseException as error:
            self.errors[name] = error

    def write(self, entry: dict[str, Any]) -> None:
        """A log line; whoever has finished round ``limit`` is held until the limit is raised."""
        self.log.append(entry)
        while (
            entry["event"] == "round done"
            and entry["round"] >= self.limit
            and not self.leaving(entry["node"])
        ):
            time.sleep(0.005)

    def leaving(self, name: str) -> bool:
        """Whether the member is to stop, or to go on in another roster."""
        waiting = self.members[name].waiting if name in self.members else None
        return waiting is not None and (waiting.stopping or waiting.failure is not None)

    def hold(self, rounds: int) -> None:
        """Lets all go on to the end of so many rounds, and waits until somebody is there."""
        self.limit = rounds
        self.until(lambda: any(e["event"] == "round done" and e["round"] == rounds for e in self.log))

    def agreed(self, roster: int) -> None:
        """Waits until everybody who is here knows that a roster is decided."""

        def knows(name: str) -> bool:
            about = {"event": "a new roster", "roster": roster, "node": name}
            return any(about.items() <= entry.items() for entry in list(self.log))

        self.until(lambda: all(knows(name) for name, thread in self.threads.items() if thread.is_alive()))

    def until(self, what: Callable[[], bool], patience: float = PATIENCE) -> None:
        deadline = time.monotonic() + patience
        while not what():
            assert time.monotonic() < deadline, (self.errors, self.log[-20:])
            time.sleep(0.005)

    def stop(self, name: str) -> None:
        """As by Ctrl-C."""
        self.members[name].stop()
        self.threads[name].join(PATIENCE)
        assert isinstance(self.errors.pop(name), Stopped)

    def end(self) -> None:
        for name, thread in self.threads.items():
            thread.join(PATIENCE)
            assert not thread.is_alive(), (name, self.log[-20:])
        if self.errors:
            raise next(iter(self.errors.values()))

    def check(self, names: str) -> list[Roster]:
        """All who are left agree about the rosters, and have the simulator's models of them."""
        rosters = rosters_of(self.folder / names[0])
        for name in names:
            assert rosters_of(self.folder / name) == rosters
        simulated = simulate_rosters(self.file, rosters)
        assert sorted(simulated) == sorted(names)
        for name in names:
            difference = (self.models[name] - simulated[name]).abs().max()
            assert difference <= 1e-12 * simulated[name].abs().max(), (name, float(difference))
        assert torch.stack([self.models[name] for name in names]).isfinite().all()
        return rosters
