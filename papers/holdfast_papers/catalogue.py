"""Which papers there are. Each is a module with a ``PAPER``, imported when it is asked for."""

from __future__ import annotations

from importlib import import_module

from holdfast.core.errors import unknown
from holdfast_papers.base import Paper, PaperExperiment

MODULES = {
    "local-gecl": "holdfast_papers.local_gecl",
    "net-fleet": "holdfast_papers.net_fleet",
    "dspodfl": "holdfast_papers.dspodfl",
    "dualfl": "holdfast_papers.dualfl",
    "fedpd": "holdfast_papers.fedpd",
    "led": "holdfast_papers.led",
    "base-graphs": "holdfast_papers.base_graphs",
}
PAPERS: dict[str, Paper] = {}


def load_papers() -> dict[str, Paper]:
    """All papers by their id."""
    for id, module in MODULES.items():
        if id not in PAPERS:
            PAPERS[id] = import_module(module).PAPER
    return PAPERS


def find_experiments(wanted: str) -> list[tuple[Paper, PaperExperiment]]:
    """``all``, the experiments of a paper (``local-gecl``) or a single one (``local-gecl/table-3``)."""
    papers = load_papers()
    if wanted == "all":
        return [(paper, experiment) for paper in papers.values() for experiment in paper.experiments]
    name, slash, id = wanted.partition("/")
    if name not in papers:
        raise unknown("paper", name, [*papers, "all"])
    paper = papers[name]
    return [(paper, paper.experiment(id))] if slash else [(paper, each) for each in paper.experiments]
