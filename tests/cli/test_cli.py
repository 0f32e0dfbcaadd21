"""The commands as a user meets them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from command_line import experiment_file, holdfast

from holdfast.algorithms import ALGORITHMS
from holdfast.cli.listing import KINDS
from holdfast.data import DATASETS, PARTITIONERS
from holdfast.experiments.experiment_file import default_experiment
from holdfast.models import MODELS
from holdfast.topology import TOPOLOGIES

COMMANDS = ["run", "resume", "report", "list", "inspect", "init", "paper"]


def test_help_names_every_command() -> None:
    outcome = holdfast("--help")
    assert outcome.code == 0
    assert all(f" {command} " in outcome.out for command in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_that_fits_the_terminal(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    outcome = holdfast(command, "--help")
    assert outcome.code == 0
    assert f"Usage: holdfast {command}" in outcome.out
    assert max(map(len, outcome.out.splitlines())) <= 80


def test_run_explains_overrides_and_sweeps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    text = holdfast("run", "--help").out
    assert "[EXPERIMENT.toml] [key.path=value]..." in text
    for words in ("network.topology=complete", "algorithm.lr=[0.1,0.01]", "seeds=[0,1,2]", "HOLDFAST_DATA"):
        assert words in text


def test_the_version() -> None:
    import holdfast as hf

    assert holdfast("--version") == (0, f"holdfast {hf.__version__}\n", "")


@pytest.mark.parametrize(
    "statement",
    [
        "import holdfast; holdfast.__version__; dir(holdfast)",
        "from holdfast.cli import main; sys.argv = ['holdfast', '--help']; main()",
    ],
)
def test_heavy_libraries_are_imported_late(statement: str) -> None:
    code = f"""
import sys
try:
    {statement}
except SystemExit:
    pass
libraries = "torch numpy pydantic sklearn matplotlib scipy networkx pandas cryptography aiohttp"
heavy = set(libraries.split()) & set(sys.modules)
sys.exit(f"imported {{heavy}}" if heavy else 0)
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_every_public_name_can_be_had() -> None:
    import holdfast as hf

    assert all(getattr(hf, name) is not None for name in hf.__all__)
    with pytest.raises(AttributeError, match="no attribute 'LocalGELC'"):
        hf.LocalGELC  # noqa: B018


# --- list --------------------------------------------------------------------------------------------------


def test_list_as_json_has_everything_with_its_fields() -> None:
    listed = json.loads(holdfast("list", "--json").out)
    assert list(listed) == KINDS
    for kind, registry in {
        "algorithms": ALGORITHMS,
        "topologies": TOPOLOGIES,
        "datasets": DATASETS,
        "models": MODELS,
        "partitions": PARTITIONERS,
    }.items():
        assert sorted(entry["name"] for entry in listed[kind]) == sorted(registry)
    for entries in listed.values():
        assert entries
        for entry in entries:
            assert entry["summary"]
            for parameter in entry["parameters"]:
                assert {"name", "type", "required"} <= set(parameter)
                assert parameter["required"] != ("default" in parameter)
                assert not re.search(r"[A-Z\[]", parameter["words"])  # in words, not as a type is written
    [gossip] = [entry for entry in listed["algorithms"] if entry["name"] == "gossip"]
    assert gossip["parameters"] == [
        {
            "name": "lr",
            "type": "Rate",
            "required": True,
            "words": "number above 0, or a schedule",
            "note": "",
        },
        {"name": "local_steps", "type": "LocalSteps", "required": False, "default": 1}
        | {"words": "whole number from 1, or one for every node", "note": ""},
        {"name": "optimizer", "type": "Optimizer", "required": False, "default": "SGD()"}
        | {"words": "optimiser", "note": ""},
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_list_of_one_kind(kind: str) -> None:
    entries = json.loads(holdfast("list", kind, "--json").out)
    text = holdfast("list", kind).out
    assert text.strip().startswith(kind)
    assert all(entry["name"] in text for entry in entries)


def test_list_of_an_unknown_kind() -> None:
    outcome = holdfast("list", "algoritms")
    assert outcome.code == 2
    assert "unknown kind of choice 'algoritms': did you mean 'algorithms'?" in outcome.err


@pytest.mark.parametrize(("name", "kind"), [("gossip", "algorithms"), ("test_accuracy", "metrics")])
def test_list_of_a_single_choice_names_its_kind(name: str, kind: str) -> None:
    outcome = holdfast("list", name)
    assert outcome.code == 2
    wanted = (
        f"unknown kind of choice '{name}': did you mean 'holdfast list {kind}', which has it? choose from"
    )
    assert wanted in outcome.err


def test_a_single_vector_is_not_several() -> None:
    text = " ".join(holdfast("list", "algorithms").out.split())
    assert "sends 1 vector per directed link" in text
    assert "sends 2 vectors per directed link" in text
    assert "1 vectors" not in text


# --- inspect -----------------------------------------------------------------------------------------------


def test_inspect_shows_partition_network_and_costs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    outcome = holdfast("inspect", "algorithm.local_steps=1", "-o", tmp_path / "pictures")
    assert (outcome.code, outcome.err) == (0, "")
    text = " ".join(outcome.out.split())
    assert "partition: 1,437 samples on 10 nodes, 0 unused" in text
    assert "p = 0.238433, lambda = 0.872678" in text  # 1/3 + 2/3 cos 36°, for ten nodes on a ring
    assert "model: 4,810 parameters = 18.79 KiB" in text
    # 20 directed links x 2 vectors x 4,810 parameters x 4 bytes
    assert "local-gecl 2 751.6 KiB 73.39 MiB 1" in text
    assert "gossip 1 375.8 KiB 36.70 MiB 1" in text
    pictures = {path.name for path in (tmp_path / "pictures").iterdir()}
    assert pictures == {"network.png", "network.svg", "partition.png", "partition.svg"}
    assert not (tmp_path / "runs").exists()


def test_inspect_counts_bytes_as_the_channel_sends_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    overrides = ["algorithm.local_steps=1", "channel=half"]
    outcome = holdfast("inspect", *overrides, "-o", tmp_path / "pictures")
    # 20 directed links x 2 vectors x 4,810 parameters x 2 bytes
    assert "local-gecl 2 375.8 KiB 36.70 MiB 1" in " ".join(outcome.out.split())


def test_inspect_of_a_sweep_says_which_setting_it_shows(tmp_path: Path) -> None:
    overrides = ["problem.nodes=[3,4]", "network.topology=server", "evaluate_every=4"]
    outcome = holdfast("inspect", experiment_file(tmp_path), *overrides, "-o", tmp_path / "pictures")
    assert outcome.code == 0
    assert "4 jobs in all; shown: the setting of the first, local-gecl nodes=3" in outcome.out
    assert "a server and 3 clients" in outcome.out


# --- init --------------------------------------------------------------------------------------------------


def test_init_writes_a_commented_experiment_that_run_takes(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    assert holdfast("init", path) == (0, f"wrote {path}; run it with: holdfast run {path}\n", "")
    assert path.read_text() == default_experiment()
    assert path.read_text().count("#") > 10
    names = [entry["name"] for entry in tomllib.loads(path.read_text())["algorithm"]]
    assert names == ["local-gecl", "d-scaffold", "gossip"]
    overrides = ["rounds=1", "algorithm.local_steps=1", 'metrics=["train_loss"]']
    assert holdfast("run", path, *overrides, "--runs-dir", tmp_path, "-q").code == 0


def test_init_does_not_overwrite_unless_told(tmp_path: Path) -> None:
    path = experiment_file(tmp_path)
    before = path.read_text()
    outcome = holdfast("init", path)
    assert outcome.code == 2
    assert "exists already" in outcome.err
    assert path.read_text() == before
    assert holdfast("init", path, "--force").code == 0
    assert path.read_text() == default_experiment()


def test_a_narrow_terminal_leaves_paths_in_one_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    overrides = ["rounds=1", 'metrics=["train_loss"]']
    outcome = holdfast("run", experiment_file(tmp_path), *overrides, "--runs-dir", tmp_path / "[runs]")
    [folder] = (tmp_path / "[runs]").iterdir()
    lines = outcome.out.splitlines()
    assert lines[0] == f"run directory: {folder}"
    assert lines[-1] == f"report: {folder / 'report.html'}"
