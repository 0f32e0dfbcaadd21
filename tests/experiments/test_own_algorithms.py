"""A user's own algorithm, written as docs/howto/own-method.md shows, on the command line."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
from command_line import SMALL, experiment_file, forked, holdfast
from forks import run_python

from holdfast.core.errors import HoldfastError
from holdfast_deploy.federation_file import FederationFile

PAGE = (Path(__file__).parents[2] / "docs/howto/own-method.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
[MY_TRACKING] = [code for code in BLOCKS if "class MyTracking" in code]
WRONG = """\
from dataclasses import dataclass
from holdfast import Algorithm
from holdfast.contract.parameters import Rate


def function(lr: float) -> None: ...


@dataclass(frozen=True)
class HalfDone(Algorithm):
    lr: Rate

    def model(self, s):
        return s


class Undecorated(Algorithm):
    lr: Rate

    def init(self, x0, oracle, peers): ...
    def round(self, s, oracle, peers): ...
    def model(self, s): ...


@dataclass(frozen=True)
class Fine(Undecorated):
    rate: Rate
"""
DEMANDING = """
@hf.ALGORITHMS.register("demanding", family="theirs")
@dataclass(frozen=True, kw_only=True)
class Demanding(MyTracking):
    \"\"\"One that no number will do for.\"\"\"
    words: tuple[str, ...]
"""


LISTING = """
import sys
sys.path.insert(0, ".")
import my_module
from holdfast.cli import main
for way in ([], ["--json"]):
    sys.argv[1:] = ["list", "algorithms", *way]
    try:
        main()
    except SystemExit as end:
        assert not end.code
    print("---")
"""


def listings(folder: Path) -> list[str]:
    """What ``holdfast list`` prints, also as JSON, in a process that has imported the user's module."""
    return run_python(LISTING, folder)[0].split("---\n")[:2]


def test_registered_algorithms_are_listed(tmp_path: Path) -> None:
    (tmp_path / "my_module.py").write_text(MY_TRACKING + DEMANDING)
    text, as_json = listings(tmp_path)
    assert text.index("sporadic") < text.index("your own") < text.index("my-tracking")
    assert "Local steps, each corrected by what the node learned about its own bias." in text
    assert text.index("theirs") < text.index("One that no number will do for.")
    entries = {entry["name"]: entry for entry in json.loads(as_json)}
    mine = entries["my-tracking"]
    assert (mine["network"], mine["vectors_per_round"]) == ("graph or server", 2.0)
    assert "network" not in entries["demanding"]


def own(name: str, extra: str = "") -> str:
    head = SMALL.partition("[[algorithm]]")[0]
    return f'{head}[[algorithm]]\nname = "{name}"\nlr = 0.1\n{extra}'


def test_an_experiment_may_name_it(tmp_path: Path) -> None:
    (tmp_path / "my_module.py").write_text(MY_TRACKING)
    text = own("my_module:MyTracking", "local_steps = [1, 2]\nlabel = 'mine'")
    running = forked("run", experiment_file(tmp_path, text), "-q", cwd=tmp_path)
    _, err = running.communicate(timeout=120)
    assert (running.returncode, err) == (0, "")
    [run] = tmp_path.glob("runs/*")
    jobs = json.loads((run / "summary.json").read_text())["jobs"]
    assert [(job["algorithm"], job["axes"], job["status"]) for job in jobs] == [
        ("mine", {"algorithm.local_steps": "1"}, "done"),
        ("mine", {"algorithm.local_steps": "2"}, "done"),
    ]
    assert jobs[0]["method"] == "MyTracking(lr=0.1, local_steps=1)"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("wrong:HalfDon", "unknown name in module 'wrong' 'HalfDon': did you mean 'HalfDone'?"),
        ("wrong:Rate", "algorithm 'wrong:Rate': expected a subclass of holdfast.Algorithm or "),
        ("wrong:function", "algorithm 'wrong:function': expected a subclass of holdfast.Algorithm or "),
        ("wrong:HalfDone", "algorithm 'wrong:HalfDone': the class lacks init, round"),
        ("wrong:Undecorated", "algorithm 'wrong:Undecorated': write @dataclass(frozen=True) above the class"),
        ("wrong:Fine", "unknown key in algorithm 'wrong:Fine' 'lr': choose from rate"),
        ("nowhere:Method", "algorithm 'nowhere:Method': cannot import 'nowhere' in the current folder"),
        (":MyTracking", "algorithm ':MyTracking': expected module:Class, for example my_module:MyTracking"),
    ],
)
def test_what_is_no_algorithm_is_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, message: str
) -> None:
    (tmp_path / "wrong.py").write_text(WRONG)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "wrong", raising=False)
    code, _, err = holdfast("inspect", experiment_file(tmp_path, own(name)))
    assert code != 0
    assert err.startswith(f"error: {message}")
    assert err.count("\n") == 1


def test_a_federation_file_may_not_name_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "dangerous_algorithm.py").write_text("raise SystemExit('imported')")
    monkeypatch.chdir(tmp_path)
    federation = FederationFile.model_validate(
        {
            "rounds": 1,
            "problem": {"input_shape": [2], "classes": 2},
            "algorithm": {"name": "dangerous_algorithm:Any", "lr": 0.1},
            "node": [{"name": "a", "address": "localhost:1"}, {"name": "b", "address": "localhost:2"}],
        }
    )
    with pytest.raises(HoldfastError, match="unknown algorithm 'dangerous_algorithm:Any'"):
        _ = federation.method
    assert "dangerous_algorithm" not in sys.modules
