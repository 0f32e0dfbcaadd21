"""One assembly line: Python, experiment files and federation files mean the same by the same names."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from command_line import make_plan
from federation_runs import describe, make_data
from torch import nn

import holdfast as hf
from holdfast.contract import ALGORITHMS
from holdfast.core.validation import parameters
from holdfast.experiments.execution import Execution
from holdfast.experiments.experiment_file import with_defaults
from holdfast_deploy.federation_file import make_federation
from holdfast_deploy.site import open_site

X, Y = torch.linspace(0, 1, 24).reshape(12, 2), torch.arange(12) % 3
CALL = {"model": nn.Linear(2, 3), "data": [(X[:6], Y[:6]), (X[6:], Y[6:])], "rounds": 1}


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("problem.batch_size=full", "problem.l1=0.01", "dtype=float64"),
        (
            "network.topology=server",
            "network.cohort=2",
            'algorithm={name="scaffold",lr=0.1}',
            "evaluate_every=3",
        ),
        (
            "evaluate_every=auto",
            "personalize=2",
            'metrics=["minibatch_loss","toy_scores:top",{high="toy_scores:top"},"p10_high","personal_loss"]',
        ),
    ],
)
def test_train_gives_the_numbers_of_an_experiment(overrides: tuple[str, ...], tmp_path: Path) -> None:
    plan = make_plan(tmp_path, *overrides)
    job = plan.jobs[0]
    setting, experiment = plan.setting(job), job.spec
    run = Execution(plan.simulation(job), job.rounds, experiment.evaluate_every, setting.evaluation)
    assert run.execute(job.info).status == "done"
    problem, network = experiment.problem, experiment.network
    result = hf.train(
        plan.method(job),
        model=setting.make_module(),
        data=setting.data,
        topology=network.topology.name,
        rounds=job.rounds,
        batch_size=problem.batch_size,
        l2=problem.l2,
        l1=problem.l1,
        test=setting.test_data,
        seed=job.seed,
        cohort=network.cohort,
        evaluate_every=experiment.evaluate_every,
        metrics=experiment.metrics,
        personalize=experiment.personalize,
        dtype=experiment.dtype,
    )
    for mine, theirs in zip(result.history.rows, run.rows, strict=True):
        assert {**mine, "seconds": 0} == {**theirs, "seconds": 0}
    assert torch.equal(result.models, run.simulation.models)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch_size": None}, "batch_size: should be a valid integer or 'full', got None"),
        ({"cohort": None}, "cohort: should be a valid integer or 'all', got None"),
        ({"metrics": None}, "metrics: should be a valid list or 'default', got None"),
    ],
)
def test_python_refuses_what_files_cannot_say(changes: dict, message: str) -> None:
    with pytest.raises(hf.HoldfastError) as caught:
        hf.train(hf.FedAvg(lr=0.1), **CALL, **changes)
    assert str(caught.value) == message


def test_files_refuse_names_of_the_past() -> None:
    with pytest.raises(
        hf.HoldfastError, match=r"\[evaluation\]: write evaluate_every and metrics at the top"
    ):
        with_defaults({"rounds": 1, "evaluation": {"every": 2}})
    with pytest.raises(hf.HoldfastError, match=r"\[evaluation\]: write evaluate_every and shared_metrics"):
        make_federation({**describe({"name": "gossip", "lr": 0.1}), "evaluation": {"every": 2}}, "")


def test_a_site_hears_of_a_problem_that_is_not_convex() -> None:
    server = {"network": {"topology": "server"}}
    for model, reason in (("linear", None), ({"name": "mlp", "hidden": [4]}, "the model is not linear")):
        raw = describe({"name": "scaffnew", "lr": 0.1, "p": 0.5}, problem={"model": model}, **server)
        warning = open_site(make_federation(raw, "test"), "a", make_data(0)).warning
        assert (warning is None) if reason is None else (warning is not None and reason in warning)


def test_types_of_numbers_by_name() -> None:
    for dtype in ("float64", torch.float64):
        assert hf.train(hf.FedAvg(lr=0.1), **CALL, dtype=dtype).models.dtype == torch.float64
    with pytest.raises(hf.HoldfastError, match=r"dtype: should be .*, got 'double'"):
        hf.train(hf.FedAvg(lr=0.1), **CALL, dtype="double")


def test_minimize_refuses_a_path_that_does_not_fit_into_memory() -> None:
    with pytest.raises(hf.HoldfastError, match=r"the path of FedAvg on 1 nodes needs about .* GiB of memory"):
        hf.minimize([lambda x: (x**2).sum()], [1.0], hf.FedAvg(lr=0.1), rounds=10**14)


@pytest.mark.parametrize("name", list(ALGORITHMS))
def test_methods_declare_what_they_use(name: str) -> None:
    maker = ALGORITHMS[name]
    assert maker.declared.uses_solver == ("solver" in parameters(maker))
    assert maker.declared.uses_curvature == ("for_problem" in vars(maker))
