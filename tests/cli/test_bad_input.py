"""Mistakes: one line with the field, what was given and what is allowed; exit code 2; nothing written."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest
from command_line import SMALL, experiment_file, holdfast, process

OVERRIDES = {
    # unknown names, with the nearest that exists
    "rounds: unknown key": (["round=3"], r"unknown key in the experiment 'round': did you mean 'rounds'?"),
    "section": (["problems.nodes=3"], "'problems': did you mean 'problem'?"),
    "problem key": (["problem.node=3"], "unknown key in [problem] 'node': did you mean 'nodes'?"),
    "network key": (["network.topolgy=ring"], "unknown key in [network] 'topolgy': did you mean 'topology'?"),
    "problem key at the top": (
        ["l2=0.3"],
        "unknown key in the experiment 'l2': did you mean 'problem.l2'? choose",
    ),
    "network key in the problem": (
        ["problem.cohort=3"],
        "unknown key in [problem] 'cohort': did you mean 'network.cohort'? choose",
    ),
    "key of the top in a table": (
        ["problem.rounds=3"],
        "unknown key in [problem] 'rounds': did you mean 'rounds', above all tables? choose",
    ),
    "evaluation key": (
        ["evaluate_evry=2"],
        "unknown key in the experiment 'evaluate_evry': did you mean 'evaluate_every'?",
    ),
    "algorithm key": (["algorithm.gossip.lrr=1"], "key in algorithm 'gossip' 'lrr': did you mean 'lr'?"),
    "model key": (["problem.model.hiden=[8]"], "unknown key in model 'mlp' 'hiden': did you mean 'hidden'?"),
    "partition key": (
        ["problem.partition.hh=1"],
        "unknown key in partition 'dirichlet' 'hh': did you mean 'h'?",
    ),
    "topology key": (["network.topology.p=1"], "unknown key in topology 'ring' 'p'"),
    "dataset key": (["problem.dataset.split=1"], "unknown key in dataset 'digits' 'split'"),
    "algorithm": (['algorithm={name="gosip",lr=1}'], "unknown algorithm 'gosip': did you mean 'gossip'?"),
    "dataset": (["problem.dataset=digit"], "unknown dataset 'digit': did you mean 'digits'?"),
    "model": (["problem.model=mpl"], "unknown model 'mpl': did you mean 'mlp'?"),
    "loss": (["problem.loss=hing"], "unknown loss 'hing': did you mean 'hinge'?"),
    "topology": (["network.topology=rin"], "unknown topology 'rin': did you mean 'ring'?"),
    "mixing": (["network.mixing=metropolys"], "unknown mixing 'metropolys': did you mean 'metropolis'?"),
    "metric": (
        ['metrics=["test_acc"]'],
        "unknown metric 'test_acc': did you mean 'test_accuracy'?",
    ),
    "schedule": (['algorithm.lr={schedule="halvin"}'], "unknown schedule 'halvin': did you mean 'halving'?"),
    # types and ranges
    "rounds 0": (["rounds=0"], "rounds: should be greater than or equal to 1, got 0"),
    "rounds text": (["rounds=many"], "rounds: should be a valid integer, got 'many'"),
    "rounds fraction": (["rounds=1.5"], "rounds: should be a valid integer, got 1.5"),
    "lr 0": (["algorithm.lr=0"], "algorithm 'local-gecl'.lr: should be greater than 0, got 0"),
    "lr negative": (
        ["algorithm.gossip.lr=-0.1"],
        "algorithm 'gossip'.lr: should be greater than 0, got -0.1",
    ),
    "lr nan": (["algorithm.lr=nan"], "algorithm 'local-gecl'.lr: should be a finite number, got nan"),
    "lr text": (["algorithm.lr=fast"], "algorithm 'local-gecl'.lr: should be a valid number, got 'fast'"),
    "lr in a sweep": (
        ["algorithm.lr=[0.1,-1]"],
        "algorithm 'local-gecl'.lr: should be greater than 0, got -1",
    ),
    "lr missing": (["algorithm=gossip"], "algorithm 'gossip': the value 'lr' is missing"),
    "K 0": (["algorithm.local_steps=0"], ".local_steps: should be greater than or equal to 1, got 0"),
    "K true": (["algorithm.local_steps=true"], ".local_steps: should be a valid integer, got True"),
    "schedule value": (
        ['algorithm.lr={schedule="halving",start=-1,every=2}'],
        "algorithm 'local-gecl'.lr: schedule 'halving'.start: should be greater than 0, got -1",
    ),
    "batch 0": (
        ["problem.batch_size=0"],
        "problem.batch_size: should be greater than or equal to 1 or 'full'",
    ),
    "batch text": (["problem.batch_size=all"], "should be a valid integer or 'full', got 'all'"),
    "h 0": (["problem.partition.h=0"], "partition 'dirichlet'.h: should be greater than 0, got 0"),
    "l2": (["problem.l2=-1"], "problem.l2: should be greater than or equal to 0, got -1"),
    "weights": (["problem.weights=size"], "problem.weights: should be 'uniform' or 'samples', got 'size'"),
    "dtype": (["dtype=float16"], "dtype: should be 'float32' or 'float64', got 'float16'"),
    "hidden": (
        ["problem.model.hidden=[0]"],
        "model 'mlp'.hidden: should be greater than or equal to 1, got 0",
    ),
    "no hidden": (["problem.model.hidden=[]"], "model 'mlp'.hidden: should have at least 1 item, got []"),
    "name": (["name=a/b"], "name: should match pattern"),
    "no seed": (["seeds=[]"], "seeds: should have at least 1 item, got []"),
    "seed": (["seeds=[-1]"], "seeds.0: should be greater than or equal to 0, got -1"),
    "seed twice": (["seeds=[1,1]"], "seeds: every seed should stand there once, got [1, 1]"),
    "swept twice": (
        ["algorithm.lr=[0.1,0.1]"],
        "algorithm.lr: a list is a sweep over its elements, but 0.1 stands",
    ),
    "section value": (["problem=3"], "problem: expected a table, got 3"),
    "no algorithm": (["algorithm=[]"], "algorithm: give at least one"),
    "algorithm number": (["algorithm=3"], "algorithm: expected a name or a table with a name, got 3"),
    "same algorithm": (
        ['algorithm=[{name="gossip",lr=0.1},{name="gossip",lr=0.2}]'],
        "algorithm: 'gossip' stands in the experiment twice; give each a 'label' of its own",
    ),
    # overrides that are none
    "no value": (["rounds"], "override 'rounds': expected key.path=value"),
    "no key": (["=3"], "override '=3': expected key.path=value"),
    "no table": (["rounds.x=3"], "override 'rounds.x=3': 'rounds' is not a table"),
    "no parameter": (["algorithm.gossip=3"], "expected a parameter, such as algorithm.gossip.lr=0.1"),
    "absent algorithm": (
        ["algorithm.fedavg.lr=1"],
        "algorithm 'fedavg' is not in the experiment, which has local-",
    ),
    # data and network that do not fit
    "nodes": (["problem.nodes=5000"], "5000 nodes but only 1437 samples: use at most 1437 nodes"),
    "min_samples": (
        ["problem.nodes=150"],
        "150 nodes with at least min_samples = 10 each need more than the 1437",
    ),
    "groups": (
        ["problem.partition=groups"],
        "partition 'groups': these data do not say who owns which sample",
    ),
    "torus": (["network.topology=torus", "problem.nodes=5"], "topology 'torus': 5 nodes do not fill"),
    "unlikely graph": (
        ['network.topology={name="erdos-renyi",p=0.0001}'],
        "200 draws gave no connected graph; raise p",
    ),
    "uniform mixing": (["network.mixing=uniform"], "mixing 'uniform' needs a complete graph"),
    "server needed": (
        ['algorithm={name="fedavg",lr=0.1}'],
        "FedAvg needs a server: use the topology 'server'",
    ),
    "cohort on a graph": (["network.cohort=2"], "cohort: LocalGECL needs every node in every round"),
    "cohort of a method for all": (
        ["network.topology=server", "network.cohort=2", 'algorithm={name="local-gecl-server",lr=0.1}'],
        "cohort: LocalGECLServer needs every node in every round",
    ),
    "cohort too large": (
        ["network.topology=server", "network.cohort=5", 'algorithm={name="fedavg",lr=0.1}'],
        "cohort: should be between 1 and the number of nodes 4, got 5",
    ),
    "loss of two classes": (
        ["problem.loss=logistic"],
        "takes two classes, this data has 10: use 'cross-entropy'",
    ),
    "no classes": (
        ["problem.dataset=quadratics", "problem.partition=groups"],
        "needs class labels, this data has none: use 'squared-error'",
    ),
    "no test set": (
        [
            "problem.dataset=quadratics",
            "problem.partition=groups",
            "problem.loss=squared-error",
            'metrics=["test_accuracy"]',
        ],
        "metric 'test_accuracy' needs a test set",
    ),
    "small images": (["problem.model=lenet"], "model 'lenet' needs larger images than 8x8"),
    # models of the user's own
    "no module": (["problem.model=no_such_module:Net"], "cannot import 'no_such_module'"),
    "no class": (
        ["problem.model=torch.nn:Lineer"],
        "unknown name in module 'torch.nn' 'Lineer': did you mean",
    ),
    "no model": (["problem.model=json:JSONDecoder"], "expected a subclass of torch.nn.Module, got"),
    "missing argument": (["problem.model=torch.nn:Linear"], "missing a required argument: 'in_features'"),
    "failing constructor": (
        ['problem.model={name="torch.nn:Linear",in_features=-3,out_features=2}'],
        "model 'torch.nn:Linear' cannot be made (RuntimeError: Trying to create tensor with negative",
    ),
    "failing forward": (
        ['problem.model={name="torch.nn:Linear",in_features=3,out_features=2}'],
        "the model (Linear) fails on a batch of shape (2, 1, 8, 8)",
    ),
    "nothing to train": (["problem.model=torch.nn:ReLU"], "the model has no parameter to train"),
    # machine
    "device": (["--device", "tpu"], "device: should be 'cpu', 'cuda' or 'cuda:N', got 'tpu'"),
    "no such GPU": (["--device", "cuda:99"], "device: 'cuda:99' was asked for, but torch sees"),
    "memory of a model": (["problem.model.hidden=[1000000000]"], "local-gecl on 4 nodes needs about 1"),
    "memory of two layers": (["problem.model.hidden=[200000,200000]"], "GiB of memory, but cpu has only"),
    "memory of data": (
        ["problem.dataset={name='quadratics',dim=3000}", "problem.nodes=1000000"],
        "dataset 'quadratics' with 1000000 nodes and dim = 3000 needs about",
    ),
    "memory of a graph": (
        [
            "problem.dataset=quadratics",
            "problem.partition=groups",
            "problem.nodes=100000",
            "network.topology=complete",
        ],
        "topology 'complete' with 100000 nodes needs about",
    ),
}


def refused(*arguments: object) -> str:
    """The one line in which a command refuses."""
    outcome = holdfast(*arguments)
    assert outcome.code == 2
    assert outcome.out == ""
    assert outcome.err.startswith("error: ")
    assert outcome.err.count("\n") == 1
    return outcome.err


@pytest.mark.parametrize(("overrides", "message"), OVERRIDES.values(), ids=OVERRIDES)
def test_run_refuses(overrides: list[str], message: str, tmp_path: Path) -> None:
    start = time.monotonic()
    given = refused("run", experiment_file(tmp_path), *overrides, "--runs-dir", tmp_path / "runs")
    assert message in given
    assert not (tmp_path / "runs").exists()
    assert time.monotonic() - start < 60  # before any large thing is made


FILES = {
    "TOML": ("rounds = ", "small.toml is not valid TOML: "),
    "bytes": ("rounds = 4 \ud800", "small.toml is not valid TOML: "),
    "rounds": (SMALL.replace("rounds = 4\n", "", 1), "rounds: is missing"),
    "dataset": (SMALL.replace('dataset = "digits"\n', "", 1), "problem.dataset: is missing"),
    "dataset name": (
        SMALL.replace('"digits"', '{ nam = "digits" }', 1),
        "problem.dataset: expected a name",
    ),
    "algorithm": (SMALL[: SMALL.index("[[algorithm]]")], "algorithm: give at least one"),
}


@pytest.mark.parametrize(("text", "message"), FILES.values(), ids=FILES)
def test_files_that_are_no_experiments(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "small.toml"
    path.write_bytes(text.encode(errors="surrogatepass"))
    for command in ("run", "inspect"):
        assert message in refused(command, path)


def test_a_process_ends_with_one_line_and_code_2(tmp_path: Path) -> None:
    running = process("run", "rounds=0", cwd=tmp_path)
    out, err = running.communicate(timeout=120)
    assert running.returncode == 2
    assert (out, err) == ("", "error: rounds: should be greater than or equal to 1, got 0\n")
    assert not list(tmp_path.iterdir())


def test_files_and_folders_that_are_not_there(tmp_path: Path) -> None:
    assert "cannot read the experiment" in refused("run", tmp_path / "nothing.toml")
    assert "cannot read the experiment" in refused("run", tmp_path)
    assert "is not a run directory" in refused("report", tmp_path)
    assert "is not a run directory" in refused("report", tmp_path / "nothing")
    assert "is not a folder" in refused("init", tmp_path / "nothing" / "experiment.toml")


def test_a_runs_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file")
    given = refused("run", experiment_file(tmp_path), "--runs-dir", tmp_path / "taken" / "runs")
    assert "cannot make the run directory" in given
    assert "taken" in refused("inspect", experiment_file(tmp_path), "-o", tmp_path / "taken" / "pictures")


def test_a_graph_in_two_parts(tmp_path: Path) -> None:
    (tmp_path / "links.txt").write_text("0 1\n2 3\n")
    path = tmp_path / "links.txt"
    given = refused("run", experiment_file(tmp_path), f'network.topology={{name="edge-list",path="{path}"}}')
    assert "the graph is not connected" in given


# --- data files --------------------------------------------------------------------------------------------


def arrays(**changes: np.ndarray) -> dict[str, np.ndarray]:
    good = {
        "x_train": np.zeros((40, 3), np.float32),
        "y_train": np.arange(40) % 2,
        "x_test": np.zeros((4, 3), np.float32),
        "y_test": np.arange(4) % 2,
    }
    return good | changes


def spoiled(value: float) -> np.ndarray:
    x = np.zeros((40, 3), np.float32)
    x[7, 1] = value
    return x


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x_train": spoiled(np.nan)}, "data.npz: x_train: sample 7 has a value that is not finite"),
        ({"x_train": spoiled(np.inf)}, "data.npz: x_train: sample 7 has a value that is not finite"),
        ({"y_train": np.full(40, -1)}, "data.npz: y_train: class label -1 is negative"),
        ({"y_train": np.zeros(39, np.int64)}, "x_train has 40, y_train has 39"),
        ({"x_test": np.zeros((4, 2), np.float32)}, "x_test: samples are"),
        ({"x_train": np.full((40, 3), "a")}, "expected numbers"),
    ],
)
def test_npz_files_with_mistakes(changes: dict[str, np.ndarray], message: str, tmp_path: Path) -> None:
    np.savez(tmp_path / "data.npz", **arrays(**changes))
    overrides = ['problem.dataset={name="npz",file="data.npz"}', "problem.partition=iid"]
    given = refused("run", experiment_file(tmp_path), *overrides, "--data-dir", tmp_path)
    assert message in given


def test_missing_and_damaged_data_files(tmp_path: Path) -> None:
    path = experiment_file(tmp_path)
    given = refused("run", path, "problem.dataset=mnist", "--data-dir", tmp_path)
    assert f"dataset 'mnist' not found: looked in {tmp_path / 'mnist'}, {tmp_path}" in given
    assert "--data-dir" in given
    dataset = 'problem.dataset={name="npz",file="data.npz"}'
    assert "'data.npz' not found" in refused("run", path, dataset, "--data-dir", tmp_path)
    (tmp_path / "data.npz").write_bytes(b"PK\x03\x04 damaged")
    assert "corrupt, or not an npz archive" in refused("run", path, dataset, "--data-dir", tmp_path)
