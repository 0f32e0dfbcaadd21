"""A federation file comes from others: whatever stands in it, it is answered at once, and in one line."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from command_line import holdfast
from federation_runs import describe

from holdfast.core.errors import HoldfastError
from holdfast_deploy.federation_file import read_federation

GECL = {"name": "local-gecl", "lr": 0.1, "local_steps": 3}
SERVER = {"topology": "server"}
Raw = dict[str, Any]


def plain(**changes: Any) -> Raw:
    return describe(GECL, **changes)


def served(algorithm: Raw) -> Raw:
    return describe(algorithm, network=SERVER)


def private(rounds: int = 5, samples: int = 400, **budget: Any) -> Raw:
    raw = plain() | {"rounds": rounds}
    raw["problem"]["private"] = {"epsilon": 8.0, "delta": 1e-5, "clip": 1.0} | budget
    raw["node"] = [node | {"samples": samples} for node in raw["node"]]
    return raw


def steps(**given: int) -> Raw:
    return plain() | {"algorithm": GECL | given}


def problem(**changes: Any) -> Raw:
    raw = plain()
    return raw | {"problem": raw["problem"] | changes}


def nodes(count: int, network: Raw) -> Raw:
    raw = plain(network=network)
    return raw | {"node": [{"name": f"n{i}", "address": "127.0.0.1:1"} for i in range(count)]}


def at(address: str) -> Raw:
    raw = plain()
    raw["node"][0]["address"] = address
    return raw


def epochs() -> Raw:
    raw = private(samples=10**12)
    del raw["problem"]["private"]
    return raw | {"algorithm": {"name": "local-gecl", "lr": 0.1, "local_epochs": 1}}


FEDREP = {"name": "fedrep", "lr": 0.1, "head": 3}
DITTO = {"name": "ditto", "lr": 0.1}
NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("raw", "complaint"),
    [
        (private(rounds=10**6, epsilon=1e300), "epsilon: should be less than or equal to 10000, got 1e"),
        (private(epsilon=NAN), "epsilon: should be a finite number"),
        (private(epsilon=-1.0), "epsilon: should be greater than 0"),
        (private(noise_multiplier=1e-9), "noise_multiplier: should be greater than or equal to 0.01"),
        (private(noise_multiplier=1e300), "noise_multiplier: should be less than or equal to 1000000"),
        (private(noise_multiplier=INF), "noise_multiplier: should be less than or equal to 1000000, got inf"),
        (private(noise_multiplier=NAN), "noise_multiplier: should be .*, got nan"),
        (private(noise_multiplier=0.01), "5 rounds with noise_multiplier = 0.01 spend epsilon .* of 8"),
        (private(delta=0.0), "delta: should be greater than 0"),
        (private(delta=5e-324), "no noise keeps 15 accesses within epsilon = 8"),
        (private(rounds=10**6), "rounds: at most 20000 with problem.private, got 1e.06"),
        (private(rounds=20_000) | {"algorithm": GECL | {"local_steps": 1000}}, "at most 200000 steps of a"),
        (private(samples=2**70), "samples: should be less than or equal to 1099511627776"),
        (steps(local_steps=2**70), "local_steps: at most 100000 in a round"),
        (epochs(), "local_steps: at most 100000 in a round, got 2.5e.11"),
        (steps(warm_start_rounds=10**9), "warm_start_rounds: at most 1000 in a round"),
        (served(DITTO | {"personal_steps": 10**9}), "personal_steps: at most 100000 in a round"),
        (served(FEDREP | {"head_steps": 10**9}), "head_steps: at most 100000 in a round"),
        (served(FEDREP | {"head": 10**9}), "fedrep needs a model of 1e.09 numbers or more, got 21"),
        (nodes(20_000, SERVER), "node: should have at most 10000 items"),
        (nodes(1001, {"topology": "complete"}), "node: at most 1000 without a server"),
        (at("x" * 10**6 + ":1"), "address: should have at most 300 characters"),
        (problem(model={"name": "mlp", "hidden": [1] * 10**5}), "hidden: should have at most 1000 items"),
        (problem(model={"name": "mlp", "hidden": [2**70]}), "model 'mlp' cannot be made"),
        (problem(input_shape=[2**31] * 8), "model 'linear' cannot be made"),
        (plain(network={"topology": {"name": "edge-list", "path": "pipe"}}), "pipe is no regular file"),
        (plain() | {"start": "pipe"}, "pipe is no regular file"),
        (plain(network={"topology": {"name": "edge-list", "path": "large"}}), "large has 8388609 bytes"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_hostile_values_are_refused_in_one_line(
    raw: Raw, complaint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    with open("large", "wb") as large:
        large.truncate(8 * 2**20 + 1)
    path = tmp_path / "federation.toml"
    path.write_text(tomli_w.dumps(raw))
    with pytest.raises(HoldfastError, match=complaint) as caught:
        read_federation(path)
    assert len(str(caught.value)) < 500
    assert holdfast("federation", "show", path).code == 2
    assert holdfast("node", path, "--name", "a", "--data", "a.npz", "--insecure").code == 2


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("a = " + "[" * 10**5, "is not valid TOML"),
        ("rounds = " + "9" * 10**5, "is not valid TOML"),
        (".".join(["a"] * 50_000) + " = 1", "is not the federation file: it has keys of 20 parts"),
        ("a = { \"b\" . 'c' ." + '"a b".' * 30 + "d = 1 }", "it has keys of 20 parts"),
        ("#" * (8 * 2**20 + 1), "has more than 8388608 bytes"),
        (b"\xff\xfe\0", "is not valid TOML"),
    ],
    ids=lambda value: value[:20] if isinstance(value, str) else "",
)
def test_hostile_texts_are_refused_in_one_line(text: str | bytes, complaint: str, tmp_path: Path) -> None:
    path = tmp_path / "federation.toml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(HoldfastError, match=complaint) as caught:
        read_federation(path)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: steps(local_steps=100_000), "trains with 100000 local steps"),
        (lambda: served(DITTO | {"personal_steps": 100_000}), "ditto"),
        (lambda: problem(model={"name": "mlp", "hidden": [10**12]}), "10,000,000,000,003 numbers"),
        (lambda: nodes(10_000, SERVER), "and 9950 more"),
        (lambda: private(epsilon=1e4), "epsilon at most 10000"),
        (lambda: private(rounds=2000, epsilon=1e-3, noise_multiplier=1e5), "epsilon at most 0.001"),
    ],
)
def test_large_values_are_shown(make: Callable[[], Raw], told: str, tmp_path: Path) -> None:
    path = tmp_path / "federation.toml"
    path.write_text(tomli_w.dumps(make()))
    shown = holdfast("federation", "show", path)
    assert shown.code == 0, shown.err
    assert told in " ".join(shown.out.split())
    assert len(shown.out) < 20_000


def test_what_is_shown_does_nothing_to_a_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A site's own model is not run, so a part of it may have any name."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hostile_nets.py").write_text("from torch import nn\nclass Net(nn.Linear): pass\n")
    path = tmp_path / "federation.toml"
    path.write_text(tomli_w.dumps(served(FEDREP | {"head": "\x1b[2J\nYou have accepted it." + "x" * 1000})))
    shown = holdfast("federation", "show", path, "--model", "hostile_nets:Net")
    assert shown.code == 0, shown.err
    assert "\x1b" not in shown.out
    assert "\nYou have" not in shown.out
    assert "x" * 200 not in shown.out
