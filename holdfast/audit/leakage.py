"""The audit of an experiment: every attack, for every observer that can make it, and its results."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from holdfast.audit.canaries import Bound, insert_canaries, without_noise
from holdfast.audit.inversion import Inversion, invert
from holdfast.audit.membership import Membership, infer
from holdfast.audit.subject import Subject
from holdfast.engines.common.dry_run import planned_accesses
from holdfast.experiments.private_runs import planned_ledger
from holdfast.privacy import DP


@dataclass(frozen=True)
class View:
    """What an observer learns."""

    observer: str  # such as "the server"
    sees: str
    inversion: Inversion | None  # None: it receives no message
    membership: Membership | None  # None: not tried from there


@dataclass(frozen=True)
class Audit:
    """The results for one method."""

    label: str
    protections: list[str]  # in words; none: there is only one list of views
    views: list[View]
    unprotected: list[View]  # the same without the protections
    canaries: Bound | None  # with the promised noise; None: nothing is promised
    canaries_without_noise: Bound | None
    epsilon: float | None  # as the ledger computes it

    def as_dict(self) -> dict[str, Any]:
        """For programs."""

        def view(each: View) -> dict[str, Any]:
            inversion, membership = each.inversion, each.membership
            return {
                "observer": each.observer,
                "sees": each.sees,
                "inversion": None if inversion is None else inversion._asdict(),
                "membership": None
                if membership is None
                else {
                    "auc": membership.auc._asdict(),
                    "tpr": {str(rate): figure._asdict() for rate, figure in membership.tpr.items()},
                },
            }

        return {
            "algorithm": self.label,
            "protections": self.protections,
            "views": [view(each) for each in self.views],
            "unprotected": [view(each) for each in self.unprotected],
            "canaries": None if self.canaries is None else self.canaries._asdict(),
            "canaries_without_noise": None
            if self.canaries_without_noise is None
            else self.canaries_without_noise._asdict(),
            "epsilon": self.epsilon,
        }


def audit(subject: Subject, shadows: int = 16) -> Audit:
    """Attacks ``subject``, with and without its protections; trains ``shadows`` runs each time."""
    protections = subject.protections
    bounds: tuple[Bound | None, Bound | None] = (None, None)
    if isinstance(
        subject.setting.objective.private, DP
    ):  # canaries are samples: they say nothing of whole nodes
        bounds = insert_canaries(subject), insert_canaries(without_noise(subject))
    return Audit(
        label=subject.label,
        protections=protections,
        views=_views(subject, shadows),
        unprotected=_views(subject.unprotected, shadows) if protections else [],
        canaries=bounds[0],
        canaries_without_noise=bounds[1],
        epsilon=promised_epsilon(subject),
    )


def _views(subject: Subject, shadows: int) -> list[View]:
    found = infer(subject, shadows)
    stranger = View("a stranger", "the final model", None, found["model"])
    direct = invert(subject)
    if not subject.setting.network.is_server:
        return [View("a neighbour", "every message of a node", direct, found["messages"]), stranger]
    return [
        View("the server", "every message of a client", direct, found["messages"]),
        View("another client", "what the server made of all messages", invert(subject, of_mean=True), None),
        stranger,
    ]


def promised_epsilon(subject: Subject) -> float | None:
    """The epsilon of single samples after all rounds, as the ledger computes it."""
    ledger = planned_ledger(subject.setting, subject.method, subject.cohort, subject.rounds)
    if ledger is None or not isinstance(ledger.budget, DP):
        return None
    network, seed = subject.setting.network, subject.setting.seed
    return ledger.epsilon_of(planned_accesses(subject.method, network, subject.cohort, subject.rounds, seed))
