"""One description of a run: its options are accepted everywhere, with the same defaults, without a list."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import SMALL, experiment_file, make_plan
from federation_runs import describe

import holdfast as hf
from holdfast.core.fingerprint import fingerprint
from holdfast.experiments import spec
from holdfast.experiments.experiment_file import read_overridden, with_defaults
from holdfast.experiments.option_forms import Choice
from holdfast.experiments.plan import Plan
from holdfast.experiments.runner import Runner
from holdfast.experiments.spec import Count, NetworkSpec, Objective, ProblemSpec, Section, TrainSpec, leaves
from holdfast_deploy.federation_file import CommonProblem, make_federation

X = torch.randn(24, 4, generator=torch.Generator().manual_seed(0))
Y = (X[:, 0] > 0).long()


def step(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    """A user's own."""
    return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])


def flip(samples: Any, key: torch.Tensor) -> Any:
    """A user's own."""
    return samples


# Another value than the default of every option, as a file has it.
OTHERS: dict[str, Any] = {
    "rounds": 2,
    "local_epochs": 1,
    "checkpoint_every": 7,
    "evaluate_every": 3,
    "metrics": ["consensus"],
    "personalize": 1,
    "dtype": "float64",
    "precision": "float32",
    "channel": "half",
    "model": {"name": "mlp", "hidden": [3]},
    "loss": "mse",
    "batch_size": 5,
    "sampling": "epochs",
    "l2": 0.1,
    "l1": 0.1,
    "nonconvex": 0.1,
    "weights": "samples",
    "backend": "loop",
    "buffers": "average",
    "private": {"epsilon": 9.0, "delta": 0.01, "clip": 1.0},
    "data": "breast-cancer",
    "nodes": 4,
    "partition": {"name": "dirichlet", "h": 0.5},
    "test": "held_out.csv",
    "augment": "test_spec:flip",
    "step": "test_spec:step",
    "topology": "complete",
    "mixing": "laplacian",
    "aggregation": "median",
    "attack": {"name": "sign-flip", "nodes": [0]},
    "cohort": 2,
    "graph_every": 2,
    "compute": 0.5,
    "links": 0.5,
    "redraw_every": 2,
    "link_draws": "each-end",
}


def plain(value: Any) -> Any:
    """As a file has it."""
    return value.plain if isinstance(value, Choice) else value


def stored(found: Section, name: str) -> Any:
    """What a spec says of an option."""
    leaf = leaves(TrainSpec)[name]
    table = getattr(found, leaf.table) if leaf.table else found
    return plain(getattr(table, leaf.key))


def expected(name: str) -> Any:
    value = OTHERS[name]
    return hf.DP(**value) if name == "private" else value


def test_every_option_is_tried_here() -> None:
    """A new one needs another value than its default, and nothing else."""
    assert set(OTHERS) == set(leaves(TrainSpec))
    assert not [name for name, leaf in leaves(TrainSpec).items() if OTHERS[name] == leaf.default]


@pytest.mark.parametrize("name", leaves(TrainSpec))
def test_python_files_and_overrides_mean_the_same(name: str, tmp_path: Path) -> None:
    """The same value under the same name; in a file in its table."""
    leaf = leaves(TrainSpec)[name]
    given = {"rounds": 1, "data": "digits"} | {name: OTHERS[name]}
    assert stored(TrainSpec.of_arguments(given), name) == expected(name)
    path = ".".join(filter(None, (leaf.table, leaf.key)))
    tables: dict[str, Any] = {
        "rounds": 1,
        "problem": {"dataset": "digits"},
        "network": {},
        "algorithm": [{"name": "gossip", "lr": 0.1}],
    }
    (tables[leaf.table] if leaf.table else tables)[leaf.key] = OTHERS[name]
    of_file = Plan.of_tables(tables, None, "cpu").jobs[0].spec
    assert stored(of_file, name) == expected(name)
    (tables[leaf.table] if leaf.table else tables).pop(leaf.key)
    file = tmp_path / "minimal.toml"
    file.write_text('rounds = 1\nalgorithm = { name = "gossip", lr = 0.1 }\nproblem.dataset = "digits"\n')
    overridden = read_overridden(file, [f"{path}={_toml(OTHERS[name])}"])
    assert stored(Plan.of_tables(overridden, None, "cpu").jobs[0].spec, name) == expected(name)


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {_toml(inner)}" for key, inner in value.items()) + "}"
    return json.dumps(value)


def test_files_and_python_have_the_same_defaults() -> None:
    minimal = {"rounds": 1, "problem": {"dataset": "digits"}, "algorithm": {"name": "gossip", "lr": 0.1}}
    of_file = Plan.of_tables(minimal, None, "cpu").jobs[0].spec
    of_call = TrainSpec.of_arguments({"rounds": 1, "data": "digits"})
    assert {name: stored(of_file, name) for name in leaves(TrainSpec)} == {
        name: stored(of_call, name) for name in leaves(TrainSpec)
    }
    assert (of_call.evaluate_every, stored(of_call, "topology")) == ("auto", "server")
    assert of_call.metrics == ["default", "minibatch_loss"]


@pytest.mark.parametrize("function", [hf.train, hf.compare, hf.tune])
def test_calls_show_every_option(function: Any) -> None:
    shown = inspect.signature(function).parameters
    said = inspect.getdoc(function) or ""
    assert set(leaves(TrainSpec)) <= set(shown)
    for name, leaf in leaves(TrainSpec).items():
        if name not in ("model", "data", "rounds"):
            assert shown[name].default == leaf.default
            assert f"``{name}``: {spec.meanings(_owner(name))[leaf.key][:40]}" in " ".join(said.split())


def _owner(name: str) -> type[Section]:
    return {"problem": ProblemSpec, "network": NetworkSpec, "": TrainSpec}[leaves(TrainSpec)[name].table]


@pytest.mark.parametrize("name", leaves(TrainSpec))
def test_calls_take_every_option(name: str) -> None:
    """What is refused is refused for what it is, not for its name."""
    small: dict[str, Any] = {"model": torch.nn.Linear(4, 2), "data": [(X, Y)] * 3, "rounds": 1}
    wrong = {**small, name: object()}
    for call, method in ((hf.train, hf.FedAvg(lr=0.1)), (hf.compare, {"a": hf.FedAvg(lr=0.1)})):
        with pytest.raises(hf.HoldfastError) as caught:
            call(method, **wrong)
        assert "unknown argument" not in str(caught.value)
    with pytest.raises(hf.HoldfastError) as caught:
        hf.tune(hf.FedAvg(lr=0.1), **wrong)
    assert "unknown argument" not in str(caught.value)


def test_an_unknown_option_is_refused_with_the_nearest() -> None:
    with pytest.raises(hf.HoldfastError, match=r"unknown argument of hf.train 'batchsize'.*batch_size"):
        hf.train(hf.FedAvg(lr=0.1), model=torch.nn.Linear(4, 2), data=[(X, Y)], rounds=1, batchsize=3)


def test_federations_share_the_sections_with_the_same_defaults() -> None:
    assert issubclass(CommonProblem, Objective)
    federation = make_federation(describe({"name": "local-gecl", "lr": 0.1}), "test")
    assert isinstance(federation.network, NetworkSpec)
    own = {"model", "batch_size"}  # which the file gives
    for name, field in Objective.model_fields.items():
        assert CommonProblem.model_fields[name].default == field.default
        if name not in own:
            assert getattr(federation.problem, name) == field.default
    raw = describe({"name": "fedavg", "lr": 0.1}, network={"topology": "server"})
    del raw["network"]["topology"]
    assert make_federation(raw, "test").topology.name == "server"
    with pytest.raises(hf.HoldfastError, match=r"needs a .server. with a name and an address; or choose"):
        make_federation({**describe({"name": "local-gecl", "lr": 0.1}), "network": {}}, "test")


class Wider(Objective):
    """The options of a problem with one more."""

    patience: Count = 3  # how long it takes


def test_a_new_option_is_one_line() -> None:
    """Its name, type, default and meaning are those of its line, wherever they are needed."""

    class Problem(Wider, ProblemSpec):
        """As a spec would have it."""

    class Spec(TrainSpec):
        """As a spec would have it."""

        problem: Problem

    class Federated(CommonProblem, Wider):
        """As a federation file would have it."""

    given = {"rounds": 1, "data": "digits"}
    assert Spec.of_arguments(given).problem.patience == 3
    assert Spec.of_arguments({**given, "patience": 5}).problem.patience == 5
    assert Spec.of({"rounds": 1, "problem": {"dataset": "digits", "patience": 5}}).problem.patience == 5
    assert Federated.of({"patience": 5, "input_shape": [2]}).patience == 5
    with pytest.raises(hf.HoldfastError, match=r"^patience: should be greater than or equal to 1, got 0$"):
        Spec.of_arguments({**given, "patience": 0})

    @spec.takes_options(Spec)
    def call(data: Any, **options: Any) -> None:
        """Does something.

        {options}
        """

    assert inspect.signature(call).parameters["patience"].default == 3
    assert "``patience``: how long it takes." in (call.__doc__ or "")


# --- what was called otherwise ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ({"evaluation": {"every": 2}}, r"\[evaluation\]: write evaluate_every and metrics at the top"),
        ({"network": {"latched_links": True}}, 'network.latched_links: write link_draws = "latched"'),
    ],
)
def test_keys_of_older_files_say_what_to_write(tables: dict[str, Any], message: str) -> None:
    with pytest.raises(hf.HoldfastError, match=message):
        with_defaults({"rounds": 1, "problem": {"dataset": "digits"}, "algorithm": "gossip", **tables})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"evaluation": {"every": 2}}, r"\[evaluation\]: write evaluate_every and shared_metrics at the top"),
        ({"network": {"latched_links": True}}, 'network.latched_links: write link_draws = "latched"'),
        ({"compression": "fp16"}, 'write channel = "half"'),
    ],
)
def test_keys_of_older_federation_files_say_what_to_write(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(hf.HoldfastError, match=message):
        make_federation({**describe({"name": "local-gecl", "lr": 0.1}), **changes}, "test")


# --- runs that were begun before there was an option ----------------------------------------------------


def test_a_run_directory_without_a_later_option_is_continued(tmp_path: Path) -> None:
    """Its file lacks the option, which is at its default; the digest in its summary is of that file."""
    whole = Runner.start(make_plan(tmp_path), tmp_path)
    whole.execute()
    tables = read_overridden(experiment_file(tmp_path, SMALL), [])
    early = with_defaults(tables)
    del early["precision"], early["problem"]["buffers"]
    older = Plan.of_tables(early, None, "cpu")
    begun = Runner.start(older, tmp_path)
    begun.summary["digest"] = _digest(early)
    begun.write_summary()
    again = Runner.reopen(Plan.of_tables(early, None, "cpu"), begun.folder)
    again.execute()
    assert again.rows[-1]["train_loss"] == whole.rows[-1]["train_loss"]
    other = Plan.of_tables({**early, "precision": "float32"}, None, "cpu")
    with pytest.raises(hf.HoldfastError, match=r"experiment.toml was changed since the run began"):
        Runner.reopen(other, begun.folder)


def _digest(raw: dict[str, Any]) -> str:
    import hashlib

    return hashlib.sha256(json.dumps(raw, sort_keys=True, default=str).encode()).hexdigest()


def test_a_run_from_python_without_a_later_option_is_continued(tmp_path: Path) -> None:
    options: dict[str, Any] = {"model": torch.nn.Linear(4, 2), "data": [(X[i::3], Y[i::3]) for i in range(3)]}
    hf.train(hf.FedAvg(lr=0.1), **options, rounds=2, run_dir=tmp_path / "run")
    file = tmp_path / "run/summary.json"
    summary = json.loads(file.read_text())
    assert "l2" not in summary["arguments"]
    nothing = hf.train(hf.FedAvg(lr=0.1), **options, rounds=2, l2=0.0, run_dir=tmp_path / "run", resume=True)
    assert nothing.status == "done"
    with pytest.raises(hf.HoldfastError, match=r"began with other arguments: l2; give .* run_dir$"):
        hf.train(hf.FedAvg(lr=0.1), **options, rounds=2, l2=0.1, run_dir=tmp_path / "run", resume=True)
    del summary["version"]  # as 0.1.0 wrote it, which also noted defaults, some of them as None
    defaults = {name: leaf.default for name, leaf in leaves(TrainSpec).items()}
    noted = {"nodes": None, "partition": None, "aggregation": None, "metrics": ("default", "minibatch_loss")}
    for name, value in {**defaults, **noted}.items():
        summary["arguments"].setdefault(name, fingerprint(value))
    file.write_text(json.dumps(summary))
    again = hf.train(hf.FedAvg(lr=0.1), **options, rounds=2, run_dir=tmp_path / "run", resume=True)
    assert torch.equal(again.models, nothing.models)
    with pytest.raises(
        hf.HoldfastError, match=r"arguments: l2; .* run_dir .another version of holdfast began it"
    ):
        hf.train(hf.FedAvg(lr=0.1), **options, rounds=2, l2=0.1, run_dir=tmp_path / "run", resume=True)
