"""A node's models: measured on its own data, and written down for its operators."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from holdfast.engines.common.counters import Work
from holdfast.problem.statistics import from_moments
from holdfast_deploy.federation import Federation
from holdfast_deploy.member.batch_norm import averaged, statistics_like
from holdfast_deploy.member.session import Session
from holdfast_deploy.site import Site
from holdfast_deploy.storage.messages import DamagedError
from holdfast_deploy.storage.results import read_results, write_model


class NodeModels:
    """What a node measures and leaves behind; ``neighbours``: all that it ever exchanges with."""

    def __init__(self, session: Session, site: Site, neighbours: Sequence[str]) -> None:
        self.session, self.site, self.neighbours = session, site, neighbours
        self.federation: Federation = session.federation

    def measure(self, row: Tensor, work: Work) -> None:
        """Figures of the node's own model, on its own data, into metrics.csv."""
        session, rounds = self.session, self.federation.rounds
        r = session.exchange.message_round
        if r % self.federation.evaluate_every and r < rounds:
            return
        session.accounts.metrics = self.site.measure(row.detach())
        links = 1 if self.federation.member_network.is_server else len(self.neighbours)
        session.accounts.record_round(min(r, rounds), work, links)
        if session.accounts.record.is_best():
            self._keep_best(row.detach())

    def _keep_best(self, row: Tensor) -> None:
        """Writes down the model [1, d], or with statistics, that did best on the node's own test split."""
        session, problem = self.session, self.site.problem
        if row.shape[-1] == problem.model.dim:
            row = problem.tester.complete(row, problem.here)
        notes = {
            "federation": self.federation.name,
            "node": session.name,
            "round": session.exchange.message_round,
        }
        notes |= session.accounts.metrics
        session.exchange.retry_while_full(
            partial(write_model, session.folder, problem.model, row[0], notes, "best")
        )

    def write(self, model: Tensor, personal: Tensor | None, work: Work) -> None:
        """The model and the personal one, if any, as their modules' states, and the report of this node."""
        session, problem, rows = self.session, self.site.problem, {"model": model}
        notes = {"federation": self.federation.name, "node": session.name, "rounds": self.federation.rounds}
        if personal is not None:
            rows["personal"] = personal
        complete = self._complete([row.to(problem.x0) for row in rows.values()], work)
        for name, row in zip(rows, complete, strict=True):
            session.exchange.retry_while_full(
                partial(write_model, session.folder, problem.model, row, notes, name)
            )
        session.write_report(rows)

    def _complete(self, rows: list[Tensor], work: Work) -> list[Tensor]:
        """Finished models [d] with BatchNorm's statistics, if any: the node's own, or all nodes' average.

        Figures by round are of models with the node's own; those of the last round are measured again.
        """
        session, problem, federation = self.session, self.site.problem, self.federation
        if statistics_like(federation, problem.model) is None:
            return [problem.tester.complete(row[None], problem.here)[0] for row in rows]
        session.exchange.message_round, session.exchange.phase = federation.rounds + 1, "averaging statistics"
        own = torch.cat([problem.tester.moments(row[None], problem.here) for row in rows])
        mean = averaged(
            own, federation, self.site.node, self.neighbours, session.accounts.costs.traffic, session.exchange
        )
        complete = torch.cat([torch.stack(rows), from_moments(mean).flatten(1)], 1)
        self.measure(complete[:1], work)
        return list(complete)

    def read(self) -> Tensor | None:
        """The model, [d], of a node that has finished: the server may be gone since.

        None if it has not, or if a file is damaged: then the model comes from the state, or from the server.
        """
        session = self.session
        if not (session.folder / "report.json").exists():
            return None
        try:
            model, session.accounts.metrics = read_results(session.folder, self.site.problem.model)
        except DamagedError as error:
            session.events.complain("a file is damaged", reason=f"{error}: it is written again")
            return None
        session.exchange.done = self.federation.rounds
        return model.to(session.x0)
