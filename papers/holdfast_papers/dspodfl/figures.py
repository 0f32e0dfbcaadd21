"""Figs. 1 and 2: accuracy per iteration and per delay, with links as printed and as in the released code."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from holdfast_papers.base import Claim, Finding, Layout, Line, Panel, PaperExperiment, Preset, Table, judged
from holdfast_papers.evidence import Curve, Evidence, mean_text

SPLITS = {"iid": "homogeneous nodes", "classes-per-node": "one class per node"}
READINGS = {"": "links drawn afresh", "-latched": "latched links"}  # added to the preset's name -> in words
METHODS = {
    "dgd": "DGD",
    "sporadic-aggregations": "Sporadic Aggregations",
    "sporadic-sgds": "Sporadic SGDs",
    "dspodfl": "DSpodFL",
}
LINKS_MATTER = ("sporadic-aggregations", "dspodfl")  # only these are in the presets with latched links
AXES = {
    "round": "(i)",
    "tau_trans": "(ii)",
    "tau_proc": "(iii)",
    "tau_total": "(iv)",
}
MARKS = (0.25, 0.5, 1.0)  # of the total delay that all methods reach
Check = Callable[[Evidence], Finding]


class Case(NamedTuple):
    """Curves of one figure: its preset, how the data are split, and how links behave."""

    figure: str
    split: str
    reading: str

    def curve(self, e: Evidence, method: str) -> Curve:
        return e.curve(method, self.preset(method), partition=self.split)

    def preset(self, method: str) -> str:
        return self.figure + (self.reading if method in LINKS_MATTER else "")

    @property
    def words(self) -> str:
        return f"{SPLITS[self.split]}, {READINGS[self.reading]}"


def final_accuracy(curve: Curve) -> np.ndarray:
    """Test accuracy after the last iteration in percent, [seeds]."""
    return 100 * curve.final("test_accuracy")


def accuracy_at(curve: Curve, delay: float, axis: str = "tau_total") -> np.ndarray:
    """Test accuracy in percent at a delay, [seeds], on the line between the two nearest evaluations."""
    paths = zip(curve.path(axis), curve.path("test_accuracy"), strict=True)
    return np.array([100 * np.interp(delay, spent, accuracy) for spent, accuracy in paths])


def ahead_at_equal_delay(case: Case, most: float) -> Check:
    """DSpodFL is at most ``most`` points below the best baseline at the same total delay."""

    def check(e: Evidence) -> Finding:
        curves = {method: case.curve(e, method) for method in METHODS}
        end = min(float(curve.final("tau_total").min()) for curve in curves.values())
        leads, words = [], []
        for mark in MARKS:
            at = {method: accuracy_at(curve, mark * end) for method, curve in curves.items()}
            best = max((m for m in METHODS if m != "dspodfl"), key=lambda m: at[m].mean())
            lead = at["dspodfl"] - at[best]
            leads.append(lead.mean())
            words.append(
                f"{mean_text(lead, 1)} at {mark * end:.0f} ({METHODS[best]} {at[best].mean():.1f} %)"
            )
        ours = f"points over the best baseline: {', '.join(words)}"
        return judged(min(leads) >= -most, ours, f"at least -{most:g} points at each of these total delays")

    return check


def best_per_iteration(case: Case, best: str, rivals: Sequence[str]) -> Check:
    """After the last iteration ``best`` is above each of ``rivals``."""

    def check(e: Evidence) -> Finding:
        own = final_accuracy(case.curve(e, best))
        leads = {rival: own - final_accuracy(case.curve(e, rival)) for rival in rivals}
        ours = ", ".join(f"{mean_text(lead, 1)} over {METHODS[rival]}" for rival, lead in leads.items())
        return judged(min(lead.mean() for lead in leads.values()) > 0, f"points: {ours}", "more than 0")

    return check


def saves_transmission(case: Case) -> Check:
    """Sporadic aggregations get to 95 % of DGD's best accuracy with less transmission delay."""

    def check(e: Evidence) -> Finding:
        own, dgd = case.curve(e, "sporadic-aggregations"), case.curve(e, "dgd")
        needed = []
        for curve in (dgd, own):
            each = enumerate(0.95 * dgd.best("test_accuracy"))
            needed.append([curve.first("tau_trans", "test_accuracy", low=goal)[seed] for seed, goal in each])
        factor = np.array(needed[0]) / np.array(needed[1])  # 0 where it never gets there
        return judged(factor.min() > 1.05, f"{mean_text(factor)} times less", "more than 1.05 in every seed")

    return check


def processing_leads(e: Evidence, figure: str, split: str) -> dict[float, np.ndarray]:
    """Points of sporadic SGDs over DGD at the same processing delays, each [seeds]."""
    own, dgd = (Case(figure, split, "").curve(e, method) for method in ("sporadic-sgds", "dgd"))
    end = min(float(curve.final("tau_proc").min()) for curve in (own, dgd))
    delays = [mark * end for mark in MARKS]
    return {d: accuracy_at(own, d, "tau_proc") - accuracy_at(dgd, d, "tau_proc") for d in delays}


def ahead_at_equal_processing(figure: str, split: str) -> Check:
    """At the same processing delay sporadic SGDs are above DGD."""

    def check(e: Evidence) -> Finding:
        leads = processing_leads(e, figure, split)
        ours = ", ".join(f"{mean_text(lead, 1)} at {delay:.3g}" for delay, lead in leads.items())
        holds = min(lead.mean() for lead in leads.values()) > 0
        return judged(holds, f"points: {ours}", "more than 0 at each of these processing delays")

    return check


def ahead_more_if_heterogeneous(figure: str) -> Check:
    """That lead is larger with one class per node than with homogeneous nodes."""

    def check(e: Evidence) -> Finding:
        iid, skewed = (np.mean([*processing_leads(e, figure, split).values()], 0) for split in SPLITS)
        ours = f"{mean_text(skewed, 1)} against {mean_text(iid, 1)} points, mean of these delays"
        return judged(skewed.mean() > iid.mean(), ours, "more with one class per node")

    return check


def aggregations_poor(case: Case) -> Check:
    """With one class per node, sporadic aggregations end below DGD after the same iterations."""

    def check(e: Evidence) -> Finding:
        gap = final_accuracy(case.curve(e, "sporadic-aggregations")) - final_accuracy(case.curve(e, "dgd"))
        return judged(gap.mean() < 0, f"{mean_text(gap, 1)} points from DGD", "less than 0")

    return check


def _claims(figure: str, words: str, total_slack: float, others: list[Claim]) -> list[Claim]:
    """What the paper says of both figures, in both readings where links matter."""
    total = [
        Claim(
            f"(iv) {case.words}: at equal total delay DSpodFL is as good as the best baseline",
            words,
            ahead_at_equal_delay(case, total_slack),
        )
        for split in SPLITS
        for case in (Case(figure, split, reading) for reading in READINGS)
    ]
    transmission = [
        Claim(
            f"(ii) {case.words}: sporadic aggregations get as far as DGD with less transmission delay",
            "within a lower transmission time",
            saves_transmission(case),
        )
        for case in (Case(figure, "iid", reading) for reading in READINGS)
    ]
    processing = [
        Claim(
            f"(iii) {SPLITS[split]}: at equal processing delay sporadic SGDs are above DGD",
            "higher accuracy, lower processing time",
            ahead_at_equal_processing(figure, split),
        )
        for split in SPLITS
    ]
    more = Claim(
        "(iii) Their lead is larger with heterogeneous nodes than with homogeneous ones",
        "heterogeneous nodes benefit more",
        ahead_more_if_heterogeneous(figure),
    )
    return [*total, *transmission, *processing, more, *others]


def _panels(figure: str) -> list[Panel]:
    """A row of four for each split and reading; in the delay panels the axis ends with the first curve."""
    panels = []
    for split in SPLITS:
        for reading in READINGS:
            case = Case(figure, split, reading)
            lines = [Line(name, m, {"partition": split}, case.preset(m)) for m, name in METHODS.items()]
            panels += [
                Panel(f"{number} {case.words}", lines, x=axis, common_x=axis != "round")
                for axis, number in AXES.items()
            ]
    return panels


def accuracies_at_end(figure: str) -> Callable[[Evidence], Table]:
    """Accuracy and delays after the last iteration, in both readings."""

    def table(e: Evidence) -> Table:
        header = ["after the last iteration", "split", "accuracy (%)", "processing", "transmission"]
        lines = []
        for split in SPLITS:
            for reading, links in READINGS.items():
                for method, name in METHODS.items():
                    if reading and method not in LINKS_MATTER:
                        continue
                    curve = Case(figure, split, reading).curve(e, method)
                    delays = [mean_text(curve.final(axis), 0) for axis in ("tau_proc", "tau_trans")]
                    label = f"{name}, {links}" if method in LINKS_MATTER else name
                    lines.append([label, SPLITS[split], mean_text(final_accuracy(curve), 1), *delays])
        return header, lines

    return table


def _dgd_best(figure: str, split: str) -> list[Claim]:
    rivals = [method for method in METHODS if method != "dgd"]
    return [
        Claim(
            f"(i) {case.words}: DGD is the best per iteration",
            "outperforms the others",
            best_per_iteration(case, "dgd", rivals),
        )
        for case in (Case(figure, split, reading) for reading in READINGS)
    ]


READINGS_NOTE = (
    "Two readings side by side: links drawn afresh in every iteration, as printed, and latched links, as in "
    "the released code, where a link that was available once stays so. DGD and sporadic SGDs use all links "
    "always and are the same in both."
)
SMALL_1 = ("rounds=500", "seeds=[0]", "evaluate_every=20")
SMALL_2 = (
    "rounds=200",
    "evaluate_every=10",
    "algorithm.lr=0.05",
    'problem.model={name="mlp",hidden=[32]}',
)


def _figure(id: str, title: str, small: Sequence[str], claims: list[Claim]) -> PaperExperiment:
    return PaperExperiment(
        id=id,
        title=title,
        presets=[Preset(id + reading, small) for reading in READINGS],
        claims=claims,
        layout=Layout(_panels(id), columns=4),
        table=accuracies_at_end(id),
        note=READINGS_NOTE,
    )


FIGURE_1 = _figure(
    "figure-1",
    "Fig. 1: a linear support vector machine on Fashion-MNIST, 10 nodes",
    SMALL_1,
    _claims(
        "figure-1",
        "matches the highest",
        1.0,
        [*_dgd_best("figure-1", "iid"), *_dgd_best("figure-1", "classes-per-node")],
    ),
)

FIGURE_2 = _figure(
    "figure-2",
    "Fig. 2: a convolutional network on Fashion-MNIST, 10 nodes",
    SMALL_2,
    _claims(
        "figure-2",
        "surpasses the baselines",
        0.5,
        [
            *_dgd_best("figure-2", "iid"),
            Claim(
                "(i) one class per node: sporadic SGDs are better than DGD per iteration",
                "an improvement",
                best_per_iteration(Case("figure-2", "classes-per-node", ""), "sporadic-sgds", ["dgd"]),
            ),
            *(
                Claim(
                    f"(ii) {case.words}: sporadic aggregations do poorly",
                    "performing poorly",
                    aggregations_poor(case),
                )
                for case in (Case("figure-2", "classes-per-node", reading) for reading in READINGS)
            ),
        ],
    ),
)
