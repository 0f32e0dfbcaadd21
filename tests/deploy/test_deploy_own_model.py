"""Models of one's own in a federation: no file can name code, and all members have the same source."""

from __future__ import annotations

import hashlib
import importlib.util
import py_compile
import sys
from collections.abc import Iterator
from pathlib import Path
from py_compile import PycInvalidationMode
from typing import Any

import pytest
import tomli_w
import torch
from command_line import holdfast
from federation_runs import PATIENCE, DeployedRun, describe, member_process, simulate, write_federation

from holdfast.core.errors import HoldfastError
from holdfast_deploy.federation_file import make_federation, read_federation
from holdfast_deploy.member.network import NetworkThread
from holdfast_deploy.member.server import Server
from holdfast_deploy.wire.retry import WaitLimitError

GECL = {"name": "local-gecl", "lr": 0.1}
SERVER = {"topology": "server"}
SOURCE = """\
from torch import nn

class Net(nn.Sequential):
    def __init__(self, input_shape, outputs):
        super().__init__(nn.Linear(input_shape[0], 4), nn.Tanh(), nn.Linear(4, outputs))

def make(input_shape, outputs):
    return Net(input_shape, outputs)
"""


LEAVES_A_FILE = "open('PWNED', 'w').close()\n"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder that commands are started in; modules in it are forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield tmp_path
    for module in ("nets", "nets_a", "nets_b", "hospital", "hospital.nets"):
        sys.modules.pop(module, None)


def short_hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


@pytest.mark.parametrize("command", ["node", "server", "try", "sign"])
def test_a_file_from_others_cannot_run_commands(command: str, here: Path) -> None:
    network = SERVER if command == "server" else {"topology": "line"}
    algorithm = {"name": "fedavg", "lr": 0.1} if command == "server" else GECL
    raw = describe(algorithm, nodes=2, network=network)
    path = write_federation(raw, here)
    raw["problem"]["model"] = {"name": "os:system", "command": "touch PWNED"}
    path.write_text(tomli_w.dumps(raw))
    arguments: dict[str, list[object]] = {
        "node": ["node", path, "--name", "a", "--data", here / "a.npz"],
        "server": ["server", path, "--name", "hub"],
        "try": ["federation", "try", path],
        "sign": ["federation", "sign", path, here / "a.csr"],
    }
    result = holdfast(*arguments[command])
    assert not (here / "PWNED").exists()
    assert result.code == 2
    assert "'os:system' names code" in result.err
    assert "--model module:Class" in result.err


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ("os:system", "--model os:system: .*no .py file|unknown class in .*os.py 'system'"),
        ("nets:make", "unknown class in .*nets.py 'make': choose from Net, Other"),
        ("nets:Other", r"expected a subclass of torch\.nn\.Module"),
        ("subprocess:Popen", "imports 'locale', another file of its own"),
        ("nowhere:Net", "there is no module 'nowhere' in the current folder or the installed packages"),
        ("nets.inner:Net", "there is no module 'nets.inner'"),
    ],
)
def test_the_command_line_takes_module_classes_only(given: str, complaint: str, here: Path) -> None:
    (here / "nets.py").write_text(SOURCE + "class Other:\n    pass\n")
    path = write_federation(describe(GECL, nodes=2), here)
    with pytest.raises(HoldfastError, match=complaint):
        read_federation(path, given).running()
    with pytest.raises(HoldfastError, match="a model of holdfast is named in the federation file"):
        read_federation(path, "mlp")


def test_an_experiment_cannot_call_functions_either(here: Path) -> None:
    result = holdfast("run", 'problem.model={name="os:system",command="touch PWNED"}', "--quiet")
    assert not (here / "PWNED").exists()
    assert result.code == 2
    assert "expected a subclass of torch.nn.Module" in result.err


def carry_out(raw: dict[str, Any], models: dict[str, str | None], folder: Path) -> dict[str, DeployedRun]:
    """All members in threads of this process, each with the model that its own command line names."""
    path = write_federation(raw, folder)
    network = NetworkThread()
    runs = {
        name: DeployedRun(read_federation(path, model).running(), folder) for name, model in models.items()
    }
    for name, run in runs.items():
        run.members = {name: run.member(name, network)}
    together = DeployedRun(
        runs["a"].federation, folder, {name: run.members[name] for name, run in runs.items()}
    )
    together.run_members()
    network.close()
    for name, run in runs.items():
        run.models = {name: together.models[name]} if name in together.models else {}
        run.errors = {name: together.errors[name]} if name in together.errors else {}
    return runs


def test_members_with_the_same_source_train_it_whatever_the_module_is_called(here: Path) -> None:
    (here / "nets_a.py").write_text(SOURCE)
    (here / "nets_b.py").write_text(SOURCE)
    raw = describe(GECL, nodes=2, network={"topology": "line"})
    runs = carry_out(raw, {"a": "nets_a:Net", "b": "nets_b:Net"}, here)
    deployed = torch.stack([runs[name].models[name] for name in ("a", "b")])
    expected = simulate(runs["a"].federation).models
    assert expected.shape == (2, 6 * 4 + 4 + 4 * 3 + 3)
    assert (deployed - expected).norm() <= 1e-5 * expected.norm()


@pytest.mark.parametrize("other", ["# changed\n" + SOURCE, None])
def test_another_source_is_refused_and_both_are_named(other: str | None, here: Path) -> None:
    """The changed source gives the same initial model, so nothing else would notice."""
    (here / "nets_a.py").write_text(SOURCE)
    (here / "nets_b.py").write_text(other or "")
    raw = describe(GECL, nodes=2, network={"topology": "line"}, limits={"wait": 0.5, "exchange": 0.5})
    runs = carry_out(raw, {"a": "nets_a:Net", "b": "nets_b:Net" if other else None}, here)
    a, b = (
        f"a has Net {short_hash(SOURCE)}",
        f"b has Net {short_hash(other)}" if other else "b has the file's model",
    )
    for name, said in (("a", f"another model: {a}, {b}"), ("b", f"another model: {b}, {a}")):
        error = runs[name].errors[name]
        assert isinstance(error, WaitLimitError)
        assert said in str(error)
        assert any(entry["event"] == "refused by" and said in entry["reason"] for entry in runs[name].log)


@pytest.mark.parametrize("algorithm", ["fedlin", "fedavg"])
def test_a_server_takes_nothing_from_a_client_with_another_model(algorithm: str, here: Path) -> None:
    (here / "nets_a.py").write_text(SOURCE)
    (here / "nets_b.py").write_text("# changed\n" + SOURCE)
    raw = describe(
        {"name": algorithm, "lr": 0.1}, nodes=1, network=SERVER, limits={"wait": 0.5, "exchange": 0.5}
    )
    runs = carry_out(raw, {"a": "nets_a:Net", "hub": "nets_b:Net"}, here)
    assert "another model: a has Net" in str(runs["a"].errors["a"])
    hub = runs["hub"].members["hub"]
    assert isinstance(hub.program, Server)
    assert hub.program.clients.arrivals == {}
    assert any("another model: a has Net" in entry.get("reason", "") for entry in runs["hub"].log)


def test_a_run_goes_on_with_the_model_that_it_was_begun_with(here: Path) -> None:
    (here / "nets.py").write_text(SOURCE)
    path = write_federation(describe(GECL, nodes=2), here)
    DeployedRun(read_federation(path, "nets:Net").running(), here).member("a").close()
    (here / "nets.py").write_text(SOURCE + "# changed\n")
    with pytest.raises(HoldfastError, match="begun with another model"):
        DeployedRun(read_federation(path, "nets:Net").running(), here).member("a")


def test_links_in_a_file_of_each_site_are_part_of_what_is_agreed_on(here: Path) -> None:
    topology = {"name": "edge-list", "path": "links.txt"}
    raw = describe(GECL, network={"topology": topology})
    (here / "links.txt").write_text("0 1\n1 2\n")
    one = make_federation(raw, "").id
    (here / "links.txt").write_text("0 1\n0 2\n")
    assert make_federation(raw, "").id != one


def plant(folder: Path, module: str, other: str) -> None:
    """An unchecked compiled file of ``other``, which Python would run in place of the source (PEP 552)."""
    stray = folder / f"{module}_compiled.py"
    stray.write_text(other)
    compiled = importlib.util.cache_from_source(str(folder / f"{module}.py"))
    py_compile.compile(str(stray), compiled, invalidation_mode=PycInvalidationMode.UNCHECKED_HASH)
    stray.unlink()


@pytest.mark.parametrize("folder", ["", "hospital"])
def test_what_runs_is_the_source_that_was_hashed_whatever_lies_in_pycache(folder: str, here: Path) -> None:
    (here / folder).mkdir(exist_ok=True)
    (here / folder / "nets.py").write_text(SOURCE)
    plant(here / folder, "nets", LEAVES_A_FILE + SOURCE.replace("4", "5"))
    if folder:
        (here / folder / "__init__.py").write_text("")
        plant(here / folder, "__init__", LEAVES_A_FILE)
    spec = f"{folder}.nets:Net" if folder else "nets:Net"
    path = write_federation(describe(GECL, nodes=2), here)
    federation = read_federation(path, spec).running()
    assert sum(federation.sizes.values()) == 6 * 4 + 4 + 4 * 3 + 3
    assert federation.model_identity == f"Net {hashlib.sha256(SOURCE.encode()).hexdigest()}"
    assert not (here / "PWNED").exists()


def test_a_node_runs_the_source_that_was_hashed(here: Path) -> None:
    (here / "nets.py").write_text(SOURCE)
    plant(here, "nets", LEAVES_A_FILE + SOURCE)
    path = write_federation(describe(GECL, nodes=2, rounds=1, network={"topology": "line"}), here)
    nodes = [member_process(path, name, "--model", "nets:Net", "--insecure") for name in "ab"]
    for node in nodes:
        told, _ = node.communicate(timeout=PATIENCE)
        assert node.returncode == 0, told
        assert hashlib.sha256(SOURCE.encode()).hexdigest() in told
    assert not (here / "PWNED").exists()


def test_a_source_that_changes_after_it_was_read_is_run_as_it_was_read(here: Path) -> None:
    (here / "nets.py").write_text(SOURCE)
    read = read_federation(write_federation(describe(GECL, nodes=2), here), "nets:Net")
    (here / "nets.py").write_text(LEAVES_A_FILE + SOURCE.replace("4", "5"))
    assert sum(read.running().sizes.values()) == 6 * 4 + 4 + 4 * 3 + 3
    assert not (here / "PWNED").exists()


FEDREP = {"name": "fedrep", "lr": 0.1, "local_steps": 3, "head_steps": 2, "head": "3"}


@pytest.mark.parametrize("algorithm", [GECL, FEDREP])
def test_show_and_a_policy_run_nothing_of_an_own_model(algorithm: dict[str, Any], here: Path) -> None:
    (here / "nets.py").write_text(LEAVES_A_FILE + SOURCE)
    (here / "policy.toml").write_text("own_code = false\n")
    network = SERVER if algorithm is FEDREP else {"topology": "line"}
    raw = describe(algorithm, nodes=2, network=network)
    raw["problem"]["model"] = {"name": "mlp", "hidden": [4]}
    path = write_federation(raw, here)
    own = ["--model", "nets:Net", "--policy", here / "policy.toml"]
    shown = holdfast("federation", "show", path, "--name", "a", *own)
    assert shown.code == 0, shown.err
    told = " ".join(shown.out.split())
    assert f"your own model Net {short_hash(LEAVES_A_FILE + SOURCE)}" in told
    assert "does not allow code of one's own" in told
    refused = holdfast("node", path, "--name", "a", "--data", "a.npz", "--insecure", *own)
    assert (refused.code, "does not allow code of one's own" in refused.err) == (77, True)
    assert not (here / "PWNED").exists()
    assert not (here / "__pycache__").exists()


@pytest.mark.parametrize("line", ["import layers", "from layers.deep import x", "from . import layers"])
def test_a_model_that_needs_files_beside_it_is_refused(line: str, here: Path) -> None:
    """Their sources would be compared by nobody."""
    (here / "layers").mkdir()
    (here / "layers" / "__init__.py").write_text("")
    (here / "nets.py").write_text(f"def later():\n    {line}\n" + SOURCE)
    path = write_federation(describe(GECL, nodes=2), here)
    with pytest.raises(HoldfastError, match="another file of its own, which its hash does not cover"):
        read_federation(path, "nets:Net")


def test_a_module_that_was_imported_by_other_means_is_refused(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (here / "nets.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(here)
    importlib.import_module("nets")
    with pytest.raises(HoldfastError, match="a module 'nets' has been imported already"):
        read_federation(write_federation(describe(GECL, nodes=2), here), "nets:Net").running()


def test_a_broken_source_is_one_line(here: Path) -> None:
    path = write_federation(describe(GECL, nodes=2), here)
    for source, complaint in (
        ("class Net(:", "this is not Python"),
        ("\0class Net: pass", "this is not Python"),
        ("raise ValueError('no')\n" + SOURCE, "fails when it is run .ValueError: no"),
        (
            "from torch.nn import Linear\nclass Net: pass\nNet = Linear",
            "comes from 'torch.nn.modules.linear'",
        ),
    ):
        (here / "nets.py").write_text(source)
        with pytest.raises(HoldfastError, match=complaint) as caught:
            read_federation(path, "nets:Net").running()
        assert "\n" not in str(caught.value)
