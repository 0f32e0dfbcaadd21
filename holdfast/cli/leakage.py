"""``holdfast audit``: what others learn about the samples of an experiment, in sentences."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from holdfast.cli.options import AsJson, DataDir, ExperimentPath, Overrides, split_overrides

if TYPE_CHECKING:
    from holdfast.audit import Audit
    from holdfast.audit.leakage import View
    from holdfast.audit.membership import Figure

RECOVERED = 0.1  # a relative error below which a sample can be recognised


def audit(
    experiment: ExperimentPath = None,
    overrides: Overrides = None,
    data_dir: DataDir = None,
    shadows: Annotated[
        int, typer.Option(min=4, help="Runs on a random half of the data, for membership inference.")
    ] = 16,
    as_json: AsJson = False,
) -> None:
    """Attack an experiment: what a neighbour, a server and a stranger learn about its samples.

    Tries to rebuild samples from messages and to tell which were in the training data, with and without what
    protects the experiment, and measures epsilon from below where it is private.

    [bold]holdfast audit mine.toml rounds=20 problem.batch_size=1[/bold]
    """
    from holdfast.audit import Subject
    from holdfast.audit import audit as attack
    from holdfast.experiments.plan import Plan
    from holdfast.experiments.spec import read_experiment

    path, changes = split_overrides(experiment, overrides)
    plan = Plan(read_experiment(path, changes), data_dir, "cpu")
    plan.check()
    # each algorithm with its first seed, at the first point of a sweep
    first = {job.label: job for job in reversed(plan.jobs)}
    subjects = [Subject.of(plan, job) for job in reversed(first.values())]
    found = []
    for subject in subjects:
        if not as_json:
            print(f"auditing {subject.label}: {shadows} shadow runs ...", file=sys.stderr)
        found.append(attack(subject, shadows))
    if as_json:
        print(json.dumps([each.as_dict() for each in found], indent=2))
    else:
        print("\n\n".join("\n".join(lines(each)) for each in found))


def lines(found: Audit) -> Iterator[str]:
    """The audit of one method in sentences."""
    yield f"{found.label}: {', '.join(found.protections) or 'nothing protects the messages'}"
    for title, views in (("as configured", found.views), ("without protection", found.unprotected)):
        if not views:
            continue
        yield f"  {title if found.protections else 'what others learn'}:"
        for view in views:
            yield f"    {view.observer} ({view.sees})"
            yield from (f"      {sentence}" for sentence in _sentences(view))
    if found.canaries is not None and found.canaries_without_noise is not None:
        bound, bare = found.canaries, found.canaries_without_noise
        yield (
            f"  canaries: {bound.right} of {bound.guesses} guesses right, so epsilon is at least "
            f"{bound.epsilon:.2f} (95 %); the ledger says {found.epsilon:.2f} at most"
        )
        yield f"    without noise: {bare.right} of {bare.guesses} right, epsilon at least {bare.epsilon:.2f}"
    yield "  Attacks that fail prove nothing: a stronger one may succeed. Only epsilon is a promise."


def _sentences(view: View) -> Iterator[str]:
    if view.inversion is not None:
        errors, tried = view.inversion.errors, len(view.inversion.errors)
        recovered = sum(error < RECOVERED for error in errors)
        spread = f"{min(errors):.2g}" if tried == 1 else f"{min(errors):.2g} to {max(errors):.2g}"
        yield (
            f"one message: a sample recovered in {recovered} of {tried}, its class in "
            f"{view.inversion.labels}; relative error {spread}"
        )
        yield f"  (attack: {view.inversion.attack}; the mean of all samples has {view.inversion.guess:.2g})"
    if view.membership is not None:
        shares = ", ".join(
            f"{_percent(figure)} of members at {100 * rate:g} % false alarms"
            for rate, figure in view.membership.tpr.items()
        )
        auc = view.membership.auc
        yield f"was a sample trained on? AUC {auc.value:.3f} [{auc.low:.3f}, {auc.high:.3f}]; finds {shares}"


def _percent(figure: Figure) -> str:
    return f"{100 * figure.value:.1f} % [{100 * figure.low:.1f}, {100 * figure.high:.1f}]"
