"""What ``holdfast federation show`` says of differential privacy: what is spent, and who is kept out."""

from __future__ import annotations

from holdfast.privacy import Ledger, NodeDP
from holdfast.privacy.messages import PrivateMessages
from holdfast_deploy.federation_file import FederationFile


def privacy_sentences(federation: FederationFile) -> list[str]:
    """In plain words, for the operators of a node."""
    plan = federation.protection
    if plan is None:
        return ["There is no differential privacy: models and gradients can reveal training samples."]
    if isinstance(plan.budget, NodeDP):
        return _of_nodes(federation, plan, plan.budget)
    return [
        f"All of it together is differentially private for each of your samples: {_spent(plan)}. Gradients "
        f"of samples are clipped at {plan.budget.clip:g}, and noise of {plan.multiplier:.3g} times what one "
        "sample can change is added, drawn from a key that stays here."
    ]


def _spent(plan: Ledger) -> str:
    budget, planned = plan.budget, plan.epsilon_of(plan.safe)
    return f"epsilon at most {budget.epsilon:g} at delta {budget.delta:g} ({planned:.3g} is planned)"


def _of_nodes(federation: FederationFile, plan: Ledger, budget: NodeDP) -> list[str]:
    method, masked = federation.member_method, federation.secure_aggregation is not None
    assert isinstance(method, PrivateMessages)
    promised = f"differentially private for your node as a whole, with all its data: {_spent(plan)}"
    clipped = f"Each of your messages is clipped to a norm of {budget.clip:g}"
    if budget.quantile is not None:
        clipped += f" at first, and later to the {budget.quantile:.0%} quantile of all messages' norms"
    noise = f"noise of {plan.multiplier:.3g} times that norm"
    if budget.noise == "clients":
        return [
            f"All of it together is {promised}. This also protects you from the server.",
            f"{clipped}, and {noise} is added, drawn from a key that stays here. Your node keeps "
            "the privacy ledger.",
        ]
    if budget.noise == "distributed":
        enough = method.contributors
        return [
            f"What the server sees, sums over {enough + 1} nodes or more, is {promised}.",
            f"{clipped}. Your node adds noise of {plan.multiplier / enough**0.5:.3g} times that norm to it, "
            f"drawn from a key that stays here, and {enough} nodes together add the planned "
            f"{plan.multiplier:.3g} times. Your node keeps the privacy ledger.",
            "This still holds if one other member tells the server its own noise. Each further such member "
            f"removes {1 / enough:.0%} of the variance.",
        ]
    sees = "the sums of a round's clipped messages" if masked else "your clipped messages"
    sentences = [
        f"What everybody except the server sees, the model, is {promised}.",
        f"{clipped}. The server adds {noise} to their sum, drawn from its own key, and keeps the "
        "privacy ledger.",
        f"The server itself sees {sees} without noise: you trust it with them.",
    ]
    if federation.secret_cohorts:
        sentences.append(
            f"In each round, the server asks every node with probability {federation.cohort} / "
            f"{len(federation.node)}, and tells nobody which; otherwise more would be spent. Anybody who "
            "finds out in which rounds you were asked, for instance by watching your connection, learns more "
            "than epsilon says."
        )
    return sentences
