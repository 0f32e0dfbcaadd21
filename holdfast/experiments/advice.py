"""What the rules of ``recommendation.py`` say for a network and a budget."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from holdfast.experiments.recommendation import RULES, Facts, Rule, Topic, why_not_known


@dataclass(frozen=True)
class Advice:
    """The rule that applies, with K filled in."""

    topic: Topic
    rule: str
    why: str
    source: str
    settings: dict[str, Any] = field(default_factory=dict)


def applicable(topic: Topic, facts: Facts) -> list[Advice]:
    """What all rules of ``topic`` that apply say, in their order."""
    rules = [rule for rule in RULES if rule.topic == topic and rule.when(facts)]
    return [Advice(topic, rule.name, rule.why, rule.source, _filled(rule, facts)) for rule in rules]


def advise(topic: Topic, facts: Facts) -> Advice:
    """The first rule of ``topic`` that applies."""
    return applicable(topic, facts)[0]


def _filled(rule: Rule, facts: Facts) -> dict[str, Any]:
    settings = dict(rule.settings)
    own = settings.get("algorithm")
    if own is not None and own.get("local_steps") == "K":
        settings["algorithm"] = {key: v for key, v in own.items() if key != "local_steps"} | facts.steps
    return settings


def compression(
    facts: Facts, budget: float | None, sent: Callable[[dict[str, Any]], float]
) -> tuple[Advice, float]:
    """The first compression whose bytes, ``sent(settings)``, are within the ``budget``, and these bytes.

    If none is, the last, which sends least, and says that it is too much; or none, if nothing is known.
    """
    advice, bytes_sent = advise("compression", facts), sent({})
    if budget is None or bytes_sent <= budget:
        return advice, bytes_sent
    for advice in applicable("compression", facts)[1:]:
        bytes_sent = sent(advice.settings)
        if bytes_sent <= budget:
            return advice, bytes_sent
    beyond = f"the budget of {_megabytes(budget)} is not met"
    if not advice.settings:
        why = why_not_known(facts) or "no channel was measured with the method"
        why = f"{beyond}, and what compression would cost in accuracy is not known here: {why}"
        return replace(advice, rule="not known", why=why, source="which.md#compression"), bytes_sent
    why = (
        f"{beyond}. This sends {_megabytes(bytes_sent)}, and nothing that sends less is known to end within "
        "2 points of the same run without compression. Allow as much, or take fewer rounds, which is another "
        f"run. As to this one: {advice.why}"
    )
    return replace(advice, why=why), bytes_sent


def _megabytes(value: float) -> str:
    return f"{value / 1e6:,.3g} MB"
