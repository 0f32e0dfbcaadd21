"""What ``import holdfast`` offers: the same to Python, to type checkers and to editors."""

from __future__ import annotations

import ast
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from option_types import SOURCE as SPEC
from option_types import written

import holdfast as hf
from holdfast.experiments.spec import TrainOptions, TrainSpec, leaves

SOURCE = Path(hf.__file__)
STUB = SOURCE.with_suffix(".pyi")


def type_check(folder: Path, code: str) -> str:
    """What mypy says about ``code``; only this and holdfast/__init__.pyi are read, which takes a second."""
    (folder / "use.py").write_text(code)
    found = subprocess.run(
        [
            *(sys.executable, "-m", "mypy", "--config-file=", "--follow-imports=skip"),
            *("--cache-dir", os.devnull, "use.py", str(STUB)),
        ],
        cwd=folder,
        capture_output=True,
        text=True,
    )
    assert found.returncode in (0, 1), found.stderr
    return found.stdout


def test_type_checkers_know_which_names_there_are(tmp_path: Path) -> None:
    assert type_check(tmp_path, "import holdfast as hf\nhf.FedAvg\n").startswith("Success")
    assert 'use.py:2: error: Module has no attribute "FedAVG"' in type_check(
        tmp_path, "import holdfast as hf\nhf.FedAVG\n"
    )


def test_python_has_the_names_that_type_checkers_see() -> None:
    """The stub as Python's own grammar reads it; nothing else stands in it."""
    parts = ast.parse(STUB.read_text(encoding="utf-8")).body
    imports = [part for part in parts if isinstance(part, ast.ImportFrom)]
    named = [(alias.name, alias.asname, part.module) for part in imports for alias in part.names]
    assert [(name, name, home) for name, home in hf._HOMES.items()] == named
    assert len({name for name, _, _ in named}) == len(named) > 100
    assert [ast.unparse(part) for part in parts if part not in imports] == ["__version__: str"]


def test_importing_costs_nothing() -> None:
    """It needs what imports modules, and no other."""
    code = "import sys; before = set(sys.modules); import holdfast; print(*sorted({*sys.modules} - before))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = {name.split(".")[0] for name in done.stdout.split()}
    assert loaded <= {"__future__", "holdfast", "importlib", "warnings"}


@pytest.mark.parametrize("name", hf.__all__)
def test_every_name_is_there(name: str) -> None:
    assert getattr(hf, name) is not None
    assert name in dir(hf)


def test_unknown_names_are_errors() -> None:
    with pytest.raises(AttributeError, match="module 'holdfast' has no attribute 'FedAVG'"):
        _ = hf.FedAVG


def test_editors_show_no_internals() -> None:
    """What completion offers after ``hf.``, also when submodules have been imported: public names only."""
    assert set(dir(hf)) == set(hf.__all__)
    assert not [name for name in dir(hf) if name.startswith("_") and name != "__version__"]
    assert not [name for name in dir(hf) if inspect.ismodule(getattr(hf, name))]


@pytest.mark.parametrize("function", [hf.train, hf.compare, hf.tune, hf.minimize, hf.load_result])
def test_help_explains_every_argument_and_the_result(function) -> None:
    text = inspect.getdoc(function)
    assert [name for name in inspect.signature(function).parameters if f"``{name}``" not in text] == []
    result = inspect.signature(function).return_annotation
    assert f"Returns a ``{result}``" in text


def test_comparisons_take_the_options_of_training() -> None:
    """Under the same names, with the same types and defaults, which are those of the spec."""
    training, options = inspect.signature(hf.train).parameters, TrainOptions.__annotations__
    own = {"algorithm", "model", "data", "rounds", "seed", "callbacks", "progress", "run_dir", "resume"}
    assert set(options) == set(training) - own - {"device", "data_dir"}
    types = {name: annotation.__forward_arg__ for name, annotation in options.items()}
    for function in (hf.train, hf.compare, hf.tune):
        shown = inspect.signature(function).parameters
        assert types == {name: shown[name].annotation for name in options}
        assert {name: shown[name].default for name in options} == {
            name: leaf.default for name, leaf in leaves(TrainSpec).items() if name in options
        }


def test_editors_know_every_option() -> None:
    """If they do not, ``make options`` writes the end of holdfast/experiments/spec.py."""
    assert SPEC.read_text(encoding="utf-8").endswith(written())


USE = """
import torch
import holdfast as hf

x, y = torch.zeros(8, 2), torch.zeros(8, dtype=torch.int64)
data = hf.partition(x, y, hf.IID(), nodes=2, seed=0)
trained = hf.train(hf.FedAvg(lr=0.1), model=torch.nn.Linear(2, 2), data=data, rounds=1)
reveal_type(trained.history["train_loss"])
reveal_type(trained.status)
reveal_type(trained.node_model(0))
reveal_type(trained.plot())
compared = hf.compare({"a": hf.FedAvg(lr=0.1)}, model=torch.nn.Linear(2, 2), data=data, rounds=1, l2=0.1)
reveal_type(compared.table())
reveal_type(compared.model("a"))
tuned = hf.tune(hf.FedAvg(lr=0.1), model=lambda: torch.nn.Linear(2, 2), data=data, rounds=1)
reveal_type(tuned.best)
reveal_type(tuned.trials[0].score)
hf.compare({"a": hf.FedAvg(lr=0.1)}, model=torch.nn.Linear(2, 2), data=data, rounds=1, batchsize=3)
hf.train(hf.FedAvg(lr=0.1), model=torch.nn.Linear(2, 2), data=data, rounds="3")
hf.EarlyStopping("train_loss", mode="up")
"""


@pytest.mark.slow
def test_type_checkers_know_what_there_is(tmp_path: Path) -> None:
    """The whole library and torch are read, which takes a minute."""
    (tmp_path / "use.py").write_text(USE)
    found = subprocess.run(
        [sys.executable, "-m", "mypy", "--config-file=", "--follow-imports=silent", "use.py"],
        cwd=tmp_path,
        env={**os.environ, "MYPYPATH": str(SOURCE.parents[1])},
        capture_output=True,
        text=True,
    )
    revealed = re.findall(r'Revealed type is "(.*)"', found.stdout)
    assert len(revealed) == 8, found.stdout
    assert not [text for text in revealed if "Any" in text]
    assert 'Unexpected keyword argument "batchsize" for "compare"' in found.stdout
    assert 'Argument "rounds" to "train" has incompatible type "str"; expected "int"' in found.stdout
    assert 'Argument "mode" to "EarlyStopping" has incompatible type' in found.stdout
    assert "Found 3 errors" in found.stdout
