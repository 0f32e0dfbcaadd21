"""LED's and base graphs' claims: they can fail, and what is cheap to compute holds."""

from __future__ import annotations

import numpy as np
import pytest

from holdfast.algorithms import LED
from holdfast.topology import Network, ring
from holdfast_papers.base import Circumstances, Verdict
from holdfast_papers.base_graphs import graphs
from holdfast_papers.evidence import Evidence
from holdfast_papers.led import theory


def evidence(*rows: dict) -> Evidence:
    return Evidence("small", {}, list(rows))


def test_identities_hold_as_computed():
    found = evidence(*theory.identities())
    for what in ("K = 1 - Exact Diffusion", "complete graph - VRL-SGD"):
        assert theory.identity(what)(found).verdict == Verdict.PASS
    assert theory.identity("a")(evidence({"what": "a", "value": 1e-6})).verdict == Verdict.FAIL


def test_rounds_from_the_spectral_radius_are_those_of_a_run():
    problem, network, method = theory.heterogeneous(8), Network.of(ring(8)), LED(lr=0.03, local_steps=4)
    needed = theory.rounds_needed(method, problem, network)
    errors = (theory.path(method, problem, network, 300) - problem.optimum).norm(dim=(1, 2)).numpy()
    measured = -6 * np.log(10) / np.polyfit(np.arange(60, 200), np.log(errors[60:200]), 1)[0]
    assert needed == pytest.approx(measured, rel=0.05)
    assert theory.rounds_needed(LED(lr=2.0, local_steps=4), problem, network) == np.inf


@pytest.mark.parametrize(("led", "kgt", "verdict"), [(1, 2, Verdict.PASS), (2, 2, Verdict.FAIL)])
def test_the_dependence_on_the_graph_can_fail(led, kgt, verdict):
    rows = [
        {"what": f"{name} on rings", "n": n, "rounds": float(n**power)}
        for name, power in (("LED", led), ("K-GT", kgt))
        for n in theory.SIZES
    ]
    assert theory.network_dependence(evidence(*rows)).verdict == verdict


@pytest.mark.parametrize(("last", "verdict"), [(100.0, Verdict.PASS), (400.0, Verdict.FAIL)])
def test_local_steps_may_not_help(last, verdict):
    rows = [{"what": "the same small step", "K": K, "rounds": r} for K, r in ((1, 500.0), (8, last))]
    assert theory.local_steps_help(evidence(*rows)).verdict == verdict


def test_consensus_on_base_graphs_holds_as_computed():
    found = Evidence("small", {}, graphs.finite_time(Circumstances("small", "cpu", None)))
    for claim in graphs.CONSENSUS.claims:
        assert claim.check(found).verdict == Verdict.PASS, claim.says
    worse = [{**row, "left": 1e-3, "over": 1.0, "links": 1} for row in found.rows]
    failing = graphs.CONSENSUS.claims[:3]
    assert [claim.check(evidence(*worse)).verdict for claim in failing] == [Verdict.FAIL] * 3


def learned(**changed: float) -> Evidence:
    """What the claims about learning ask for, of every graph, with some figures changed."""
    bias = {"ring": 8, "torus": 3, "Base-2": 4, "Base-3": 3.5, "Base-4": 2.5, "Base-5": 1.5}
    rows = [
        {
            "graph": name,
            "bias": float(bias.get(name, 1)),
            "K-GT rounds": float(bias.get(name, 1)),
            "K-GT vectors": 100.0 if name == "equi-dynamic" else 300.0,
            "LED rounds": 50.0,
            "LED vectors": 200.0,
            **(changed if name == "Base-5" else {}),
        }
        for name in graphs.networks()
    ]
    return evidence(*rows)


def test_claims_about_learning_can_fail():
    counted = [claim for claim in graphs.LEARNING.claims if claim.kind == "paper"]
    verdicts = [claim.check(learned()).verdict for claim in counted]
    assert verdicts == [Verdict.PASS] * 3 + [Verdict.NOT_COMPARABLE]
    assert [claim.check(learned(bias=9.0)).verdict for claim in counted][1:3] == [Verdict.FAIL] * 2
    header, lines = graphs.LEARNING.table(learned())
    assert all(len(line) == len(header) for line in lines)
