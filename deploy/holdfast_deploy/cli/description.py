"""A federation in plain words: what it will do at a site, what leaves, who receives it, for how long."""

from __future__ import annotations

from typing import NamedTuple

import holdfast
from holdfast.algorithms import ALGORITHMS
from holdfast.core.validation import quoted
from holdfast.experiments.option_forms import as_choice
from holdfast.privacy import Ledger, NodeDP
from holdfast.privacy.messages import PrivateMessages
from holdfast.report.format import bytes_text
from holdfast_deploy.exposure import as_configured, fewest_in_messages, vectors_per_link
from holdfast_deploy.federation_file import FederationFile
from holdfast_deploy.own_model import describe_identity

MOST_SHOWN = 50  # nodes that are named


class Paragraph(NamedTuple):
    """A heading and the sentences below it."""

    heading: str
    sentences: list[str]


def describe_federation(federation: FederationFile, name: str | None) -> list[Paragraph]:
    """What will run, what leaves the machine of the member ``name``, who receives it, for how long."""
    return [
        Paragraph("What will run on this machine", _running(federation, name)),
        Paragraph("What leaves it", _leaving(federation, name)),
        Paragraph(
            "Who receives it",
            [*_receivers(federation, name), *_passed_on(federation), *_changes(federation)],
        ),
        Paragraph("For how long", _duration(federation)),
    ]


def _running(federation: FederationFile, name: str | None) -> list[str]:
    problem, algorithm = federation.problem, federation.algorithm
    given = ", ".join(f"{key} = {quoted(value)}" for key, value in algorithm.parameters.items())
    method = (ALGORITHMS[algorithm.name].__doc__ or "").strip().splitlines()[0]
    own = federation.own_model
    model = f"the file's model {as_choice('problem.model', problem.model).name!r}"
    loss = as_choice("problem.loss", problem.loss).name
    if own is not None:
        model = f"your own model {describe_identity(own.identity)}, from {own.file}"
    shape = quoted(problem.columns if problem.input_shape is None else problem.input_shape)
    numbers = _numbers(federation)
    counted = "of which nothing has been run yet" if numbers is None else f"{numbers:,} numbers"
    return [
        f"holdfast {holdfast.__version__} trains {model}, {counted}, on samples of shape {shape}, "
        f"in batches of {problem.batch_size}, with the loss {loss!r}.",
        f"The method is {algorithm.name}{f' ({given})' if given else ''}. {method}",
        *_steps(federation, name),
        "The file names only parts of holdfast: it contains no code.",
    ]


def _steps(federation: FederationFile, name: str | None) -> list[str]:
    if "local_steps" not in vars(federation.method):
        return []
    node = name if name in federation.names else None
    within = ""
    if federation.round is not None and federation.round.budget is not None:
        within = f", as many as fit into {federation.round.budget:g} s"
    who = "A node" if node is None else node
    return [f"{who} trains {as_configured(federation, node)}{within}."]


def _leaving(federation: FederationFile, name: str | None) -> list[str]:
    network, numbers = federation.member_network, _numbers(federation)
    per_link = vectors_per_link(federation)
    each = "of as many numbers as your model has, computed from them."
    if numbers is not None:
        volume = bytes_text(int(per_link * numbers * federation.torch_dtype.itemsize))
        each = f"of {numbers:,} numbers that were computed from them ({volume} before compression)."
    sentences = [
        f"Samples and labels stay here. In each round, every receiver gets {per_link:.3g} vectors {each}"
    ]
    if (gradients := fewest_in_messages(federation, name)) <= 1:
        sentences.append(
            "Messages reveal single gradients of your data, from which samples can be reconstructed."
        )
    else:
        sentences.append(
            f"Each message is made of {gradients} gradients or more, which it does not show apart."
        )
    if (channel := as_choice("channel", federation.channel).name) != "identity":
        sentences.append(f"They go through the channel {channel!r}.")
    if not network.aggregation.plain:
        sentences.append(f"They are aggregated by {network.aggregation!r}, not by the mean.")
    sentences += _privacy(federation)
    shared = ", ".join(federation.shared_metrics)
    sentences.append(f"Metrics that other members can see: {shared or 'none'}.")
    if any(federation.counts):
        sentences.append("The file states how many samples each member has.")
    return sentences


def _privacy(federation: FederationFile) -> list[str]:
    """What of a privacy budget is spent, and who is kept out."""
    plan = federation.protection
    if plan is None:
        return ["There is no differential privacy: models and gradients can reveal training samples."]
    if isinstance(plan.budget, NodeDP):
        return _privacy_of_nodes(federation, plan, plan.budget)
    return [
        f"All of it together is differentially private for each of your samples: {_spent(plan)}. Gradients "
        f"of samples are clipped at {plan.budget.clip:g}, and noise of {plan.multiplier:.3g} times what one "
        "sample can change is added, drawn from a key that stays here."
    ]


def _spent(plan: Ledger) -> str:
    budget, planned = plan.budget, plan.epsilon_of(plan.safe)
    return f"epsilon at most {budget.epsilon:g} at delta {budget.delta:g} ({planned:.3g} is planned)"


def _privacy_of_nodes(federation: FederationFile, plan: Ledger, budget: NodeDP) -> list[str]:
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


def _receivers(federation: FederationFile, name: str | None) -> list[str]:
    address = {member.name: member.address for member in federation.members}
    if federation.server is not None:
        hub = federation.server.name
        masked = []
        if federation.secure_aggregation is not None:
            masked = [
                "Messages are masked (secure aggregation): the server can read only the sum over a round's "
                f"{federation.cohort} nodes."
            ]
        return [
            f"The server {hub} {_where(federation, name or '', hub, address[hub])} receives what every node "
            f"sends, and sends the aggregate to all of them. Nodes: {_some(federation.names)}.",
            *masked,
        ]
    network, names = federation.member_network, federation.names
    sentences = []
    asked = names[:MOST_SHOWN] if name is None else [name]
    for i, node in enumerate(names):
        if node in asked:
            peers = [names[j] for j in network.neighbours(i)]
            receivers = _some([f"{peer} {_where(federation, node, peer, address[peer])}" for peer in peers])
            sentences.append(f"{node} sends to {receivers or 'nobody'}.")
    if len(names) > MOST_SHOWN and name is None:
        sentences.append(f"There are {len(names) - MOST_SHOWN} other nodes; give yours with --name.")
    if network.sequence is not None:
        sentences.append("The links change in later rounds.")
    return sentences


def _some(names: list[str]) -> str:
    """All of them, or the first and how many more."""
    more = len(names) - MOST_SHOWN
    return ", ".join(names if more <= 0 else [*names[:MOST_SHOWN], f"and {more} more"])


def _where(federation: FederationFile, asker: str, peer: str, address: str) -> str:
    return "through the relay" if federation.relayed(asker, peer) else f"at {address}"


def _passed_on(federation: FederationFile) -> list[str]:
    relay = federation.relay
    if relay is None:
        return []
    return [
        f"The relay {relay.name} at {relay.address} forwards messages between members that cannot dial each "
        "other. It cannot read or change them: they are sealed from member to member. It sees who talks to "
        "whom, when and how much, and can withhold everything.",
    ]


def _changes(federation: FederationFile) -> list[str]:
    rules = federation.membership
    if rules is None:
        return []
    sentences = [
        "The coordinator may add, replace and remove members while the federation runs; new members may then "
        f"receive what you send. There are never fewer than {rules.minimum} nodes. The coordinator "
        "may also have all go back to an earlier round."
    ]
    if rules.remove_after is not None:
        sentences.append(f"A member that has been silent for {rules.remove_after:.0f} s is dropped.")
    if rules.rejoin:
        sentences.append("A member that was dropped and comes back with its certificate is readmitted.")
    return sentences


def _duration(federation: FederationFile) -> list[str]:
    late = []
    if (rule := federation.round) is not None and rule.deadline is not None:
        late = [
            f"After {rule.deadline:g} s of a round, the server continues with {rule.quorum} answers or more. "
            "Later answers are received, but do not count."
        ]
    return [
        f"{federation.rounds} rounds. A member that waits for longer than {federation.limits.wait:.0f} s "
        "stops, and can be restarted. You can stop at any time with Ctrl-C.",
        "Receivers keep messages for two rounds. They may keep the models computed from them for good.",
        *late,
    ]


def _numbers(federation: FederationFile) -> int | None:
    return None if federation.sizes is None else sum(federation.sizes.values())
