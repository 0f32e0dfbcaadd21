"""A site sees what a federation file will do there, accepts it by its fingerprint, and may forbid things."""

from __future__ import annotations

import os
import re
import shutil
import stat
import threading
from pathlib import Path
from typing import Any

import pytest
from command_line import holdfast
from federation_runs import describe, free_ports, write_federation
from relay_runs import relayed

from holdfast.core.errors import HoldfastError
from holdfast_deploy.cli.description import describe_federation
from holdfast_deploy.consent import (
    ConsentError,
    Policy,
    is_signed,
    require_consent,
    require_policies,
    shown,
    sign_federation,
)
from holdfast_deploy.exposure import gives_gradients_away
from holdfast_deploy.federation_file import make_federation, read_federation
from holdfast_deploy.keys import fingerprint
from holdfast_deploy.membership.roster import Order, Roster

GECL = {"name": "local-gecl", "lr": 0.1, "local_steps": 3}
SERVER = {"topology": "server"}
ENDING = {"name": "warmup-cosine", "warmup": 1000, "steps": 1001}
RISING = {"schedule": "linear", "start": 1e-4, "rounds": 1000, "end": 0.2}
FEDPD = {"name": "fedpd", "eta": 0.1, "lr": 0.1}


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Beta's federation file, which Alpha has made, signed and sent; Beta's folder has no key of Alpha's."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "alphas-home"))
    alpha, beta = tmp_path / "alpha", tmp_path / "beta"
    (beta / "certs").mkdir(parents=True)
    alpha.mkdir()
    ports = free_ports(2)
    path = alpha / "federation.toml"
    made = holdfast(
        "federation", "new", f"--nodes=alpha=127.0.0.1:{ports[0]},beta=127.0.0.1:{ports[1]}",
        "--algorithm", "local-gecl", "--input-shape", 6, "--classes", 3, "--rounds", 2, "-o", path,
        "algorithm.lr=0.1", "algorithm.local_steps=3",
    )  # fmt: skip
    assert made.code == 0, made.err
    assert holdfast("federation", "certs", path).code == 0
    for name in (
        "federation.toml",
        "federation.toml.sig",
        "certs/ca.crt",
        "certs/beta.crt",
        "certs/beta.key",
    ):
        shutil.copy(alpha / name, beta / name)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "betas-home"))
    monkeypatch.chdir(beta)
    return beta / "federation.toml"


def start(path: Path, *options: object) -> tuple[int, str]:
    """Beta's node, up to where it would begin; its data are not there, so that it never does."""
    ended = holdfast("node", path, "--name", "beta", "--data", "none.npz", *options)
    return ended.code, ended.err


def test_a_file_from_others_is_shown_accepted_and_asked_about_again_when_it_changes(site: Path) -> None:
    federation = read_federation(site)
    code, complaint = start(site)
    assert (code, "has not been accepted here" in complaint) == (77, True)

    told = " ".join(holdfast("federation", "show", site, "--name", "beta").out.split())
    for words in (
        "trains the file's model 'linear', 21 numbers",
        "local-gecl (lr = 0.1, local_steps = 3)",
        "it contains no code",
        "every receiver gets 2 vectors of 21 numbers",
        "no differential privacy",
        "Metrics that other members can see: none",
        f"beta sends to alpha at {federation.member('alpha').address}",
        "2 rounds.",
        f"Fingerprint of the file: {shown(federation.id)}",
        f"whose key is {fingerprint(federation.coordinator or '')}",
        "and you agree, run: holdfast federation accept",
    ):
        assert words in told, words

    wrong = holdfast("federation", "accept", "0" * 32, site)
    assert (wrong.code, "not the file that you were told of" in wrong.err) == (77, True)
    assert holdfast("federation", "accept", shown(federation.id)).code == 0
    assert start(site)[0] == 2  # there are no data
    assert "You have accepted it" in holdfast("federation", "show", site).out

    changed = site.read_text().replace("shared_metrics = []", 'shared_metrics = ["local_loss"]')
    site.write_text(changed)
    code, complaint = start(site)
    assert (code, "the signature is not of this document" in complaint) == (77, True)
    site.with_name("federation.toml.sig").unlink()
    code, complaint = start(site)
    assert (code, "has changed since" in complaint) == (77, True)


def test_on_the_command_line_acceptance_is_stored_and_addresses_may_change(site: Path) -> None:
    id = read_federation(site).id
    assert start(site, "--accept", "f" * 32)[0] == 77
    assert start(site, "--accept", id)[0] == 2
    assert start(site)[0] == 2
    site.write_text(re.sub(r"wait = .*", "wait = 7.0", site.read_text()).replace("127.0.0.1", "localhost"))
    assert start(site)[0] == 2
    assert is_signed(site, read_federation(site))


def test_whoever_made_the_file_is_not_asked_and_may_edit_it(tmp_path: Path, site: Path) -> None:
    path = tmp_path / "alpha" / "federation.toml"
    path.write_text(path.read_text().replace("rounds = 2", "rounds = 3"))
    changed = read_federation(path)
    with pytest.raises(ConsentError, match="not of this document"):
        is_signed(path, changed)
    require_consent(changed, path, path.parent / "certs")
    assert is_signed(path, changed)
    require_consent(changed, path, None)  # nothing leaves the machine


def test_a_signature_by_somebody_else_is_refused(tmp_path: Path, site: Path) -> None:
    other = tmp_path / "other" / "federation.toml"
    other.parent.mkdir()
    holdfast(
        "federation", "new", "--nodes=alpha=h:1,beta=h:2", "--algorithm", "dsgd", "--input-shape", 6,
        "--classes", 3, "-o", other, "algorithm.lr=0.1",
    )  # fmt: skip
    shutil.copy(other.with_name("federation.toml.sig"), site.with_name("federation.toml.sig"))
    with pytest.raises(ConsentError, match="another key than the coordinator's"):
        is_signed(site, read_federation(site))
    site.with_name("federation.toml.sig").write_text("{}")
    with pytest.raises(ConsentError, match="is not a signature"):
        is_signed(site, read_federation(site))


@pytest.mark.parametrize(
    ("policy", "objection"),
    [
        ("own_code = false", "code of one's own"),
        ("raw_gradients = false", None),
        ("min_members = 3", "fewer than 3 nodes (min_members): there are 2"),
        ("min_members = 2", None),
        ("require_dp = true", "without differential privacy (require_dp)"),
        ("require_signature = true", None),
        ('coordinators = ["00:11"]', "the coordinator with the key"),
    ],
)
def test_a_policy_forbids(policy: str, objection: str | None, site: Path, tmp_path: Path) -> None:
    file = tmp_path / "policy.toml"
    file.write_text(policy)
    federation = read_federation(site)
    options = {"policy": file, "own_code": True, "accepting": federation.id}
    if objection is None:
        require_consent(federation, site, site.parent / "certs", **options)
        return
    with pytest.raises(ConsentError) as error:
        require_consent(federation, site, site.parent / "certs", **options)
    assert objection in str(error.value)
    assert objection in holdfast("federation", "show", site, "--policy", file).out or "own_code" in policy
    site.with_name("federation.toml.sig").unlink()


def test_a_policy_that_is_misspelt_forbids_everything(site: Path, tmp_path: Path) -> None:
    file = tmp_path / "policy.toml"
    file.write_text("min_member = 3")
    code, complaint = start(site, "--policy", file, "--accept", read_federation(site).id)
    assert (code, "did you mean 'min_members'?" in complaint) == (2, True)
    assert start(site, "--policy", tmp_path / "missing.toml")[0] == 2


def test_a_policy_may_insist_on_a_signature() -> None:
    federation = make_federation(describe(GECL), "")
    assert list(Policy(require_signature=True).objections(federation, own_code=False, signed=False))
    assert list(Policy(coordinators=[]).objections(federation, own_code=False, signed=False))


@pytest.mark.parametrize(
    ("algorithm", "network", "away"),
    [
        ({"name": "local-gecl", "lr": 0.1, "local_steps": 1}, {}, True),
        ({"name": "local-gecl", "lr": 0.1, "local_steps": 2}, {}, False),
        ({"name": "local-gecl", "lr": 0.1, "local_steps": 2, "warm_start_rounds": 1}, {}, True),
        ({"name": "dsgd", "lr": 0.1}, {}, True),
        ({"name": "net-fleet", "lr": 0.1, "local_steps": 4}, {}, True),
        ({"name": "fedavg", "lr": 0.1, "local_steps": 1}, SERVER, True),
        ({"name": "fedavg", "lr": 0.1, "local_steps": 1}, SERVER | {"cohort": 2}, True),
        ({"name": "fedavg", "lr": 0.1, "local_steps": 2}, SERVER | {"cohort": 2}, False),
        ({"name": "fedlin", "lr": 0.1, "local_steps": 4}, SERVER, True),
        ({"name": "scaffold", "lr": 0.1, "local_steps": 4}, SERVER, False),
        ({"name": "scaffold", "lr": 0.1, "local_steps": 4, "option": 1}, SERVER, True),
        # lengths that chance decides, steps that do not enter messages, and a first message of one gradient
        ({"name": "scaffnew", "lr": 0.1, "p": 0.1}, SERVER, True),
        ({"name": "ditto", "lr": 0.1, "local_steps": 1, "personal_steps": 5}, SERVER, True),
        ({"name": "ditto", "lr": 0.1, "local_steps": 5}, SERVER, False),
        ({"name": "fedrep", "lr": 0.1, "head": 3, "head_steps": 5}, SERVER, True),
        ({"name": "fedrep", "lr": 0.1, "head": 3, "local_steps": 5}, SERVER, False),
        ({"name": "fedpd", "eta": 0.1, "solver": "vr"}, SERVER, True),
        ({"name": "fedpd", "eta": 0.5, "lr": 0.1, "local_steps": 5, "skip": 0.5}, SERVER, False),
        ({"name": "fedpd", "eta": 0.5, "lr": 0.1, "solver": "gd", "local_steps": 5}, SERVER, False),
        (FEDPD | {"solver": "gd", "local_steps": 5, "tolerance": 1e9}, SERVER, True),
        (FEDPD | {"solver": {"name": "aogm", "tolerance": 1e9}, "lr": None}, SERVER, True),
    ],
)
def test_which_methods_give_a_gradient_away(algorithm: dict, network: dict, away: bool) -> None:
    assert gives_gradients_away(make_federation(describe(algorithm, network=network), "")) is away


@pytest.mark.parametrize(
    ("algorithm", "away"),
    [
        # Each step forgets those before: x - lr (g + x / lr) = -lr g.
        ({"name": "fedavg", "optimizer": {"name": "sgd", "weight_decay": 10.0}}, True),
        ({"name": "fedavg", "optimizer": {"name": "sgd", "weight_decay": 9.9}}, True),
        ({"name": "fedavg", "optimizer": {"name": "sgd", "weight_decay": 5.0}}, False),
        ({"name": "fedprox", "rho": 10.0}, True),
        ({"name": "fedprox", "rho": 1.0}, False),
        ({"name": "feddyn", "alpha": 10.0}, True),
        ({"name": "feddyn", "alpha": 1.0}, False),
        ({"name": "fedpd", "eta": 0.1, "solver": "gd"}, True),
        ({"name": "fedpd", "eta": 0.1, "skip": 0.5}, True),  # if the first round is not skipped
        ({"name": "gossip", "optimizer": {"name": "sgd", "weight_decay": 10.0}}, True),
        # In some round only.
        ({"name": "fedavg", "lr": RISING, "optimizer": {"name": "sgd", "weight_decay": 10.0}}, True),
        ({"name": "fedavg", "lr": RISING, "optimizer": {"name": "sgd", "weight_decay": 1.0}}, False),
        ({"name": "fedavg", "optimizer": ENDING}, True),  # of the round with its last step
        ({"name": "fedavg", "optimizer": {"name": "clip", "inner": ENDING}}, True),
        ({"name": "fedavg", "optimizer": ENDING | {"steps": 1004}}, False),
        ({"name": "fedavg", "optimizer": ENDING | {"end": 0.5}}, False),
        # Two different sums of the same two gradients show both.
        ({"name": "scaffold", "local_steps": 2, "optimizer": {"name": "momentum"}}, True),
        ({"name": "scaffold", "local_steps": 2}, False),
        ({"name": "scaffold", "optimizer": {"name": "momentum"}}, False),
        ({"name": "diloco"}, False),
    ],
    ids=str,
)
def test_a_gradient_that_others_hardly_hide_is_given_away(algorithm: dict, away: bool) -> None:
    network = {"topology": "line"} if algorithm["name"] == "gossip" else SERVER
    raw = describe({"lr": 0.1, "local_steps": 4} | algorithm, network=network, rounds=1000)
    assert gives_gradients_away(make_federation(raw, "")) is away


def one_step_for_beta(raw: dict) -> dict:
    raw["node"][1]["local_steps"] = 1
    return raw


def few_seconds(raw: dict) -> dict:
    return raw | {"round": {"budget": 1e-9}}


def one_epoch_of_few_samples(raw: dict) -> dict:
    del raw["algorithm"]["local_steps"]
    raw["algorithm"]["local_epochs"] = 1
    return raw | {"node": [node | {"samples": 3} for node in raw["node"]]}


def minibatches_that_may_be_empty(raw: dict) -> dict:
    return raw | {"problem": raw["problem"] | {"sampling": "poisson", "batch_size": 1}}


@pytest.mark.parametrize(
    ("change", "away", "steps"),
    [
        (lambda raw: raw, "", "5 local steps"),
        (one_step_for_beta, "b", "1 local step "),
        (few_seconds, "abc", "1 to 5 local steps"),
        (one_epoch_of_few_samples, "abc", "1 local step "),
        (minibatches_that_may_be_empty, "abc", "5 local steps"),
    ],
)
def test_policy_and_show_judge_what_this_member_does(change: Any, away: str, steps: str) -> None:
    fedavg = {"name": "fedavg", "lr": 0.1, "local_steps": 5}
    federation, policy = (
        make_federation(change(describe(fedavg, network=SERVER)), ""),
        Policy(raw_gradients=False),
    )
    for name in ("a", "b", "c", "hub", None):
        refused = name in away if name in ("a", "b", "c") else bool(away)
        assert bool(list(policy.objections(federation, name=name, own_code=False, signed=True))) is refused, (
            name
        )
        told = " ".join(s for paragraph in describe_federation(federation, name) for s in paragraph.sentences)
        assert ("Messages reveal single gradients" in told) is refused, name
        assert ("Each message is made of 5 gradients or more" in told) is not refused, name
    told = " ".join(s for paragraph in describe_federation(federation, "b") for s in paragraph.sentences)
    assert f"b trains with {steps}" in told


def test_a_policy_also_holds_for_what_changes_of_members_make_of_a_file(
    tmp_path: Path,
) -> None:
    """An order of the coordinator may give the member that it is about a single local step."""
    file = tmp_path / "policy.toml"
    file.write_text("raw_gradients = false")
    rules = {"membership": {}, "limits": {"wait": 7200.0}}
    federation = make_federation(describe(GECL, nodes=3, **rules), "")
    nodes = [node.model_copy(update={"address": ""}) for node in federation.node]
    nodes[1] = nodes[1].model_copy(update={"local_steps": 1})
    order = Order(federation=federation.id, roster=0, change="replace", node=nodes[1])
    changed = federation.in_roster(Roster(number=1, first=1, nodes=nodes, joined=["b"], order=order))
    require_policies(federation, file, name="b", own_code=False, signed=False)
    with pytest.raises(ConsentError, match="local-gecl with 1 local step in a round sends them"):
        require_policies(changed, file, name="b", own_code=False, signed=False)


@pytest.mark.parametrize(
    ("policy", "delta", "objection"),
    [
        ({"require_dp": True}, 0.5, "delta = 0.5 (max_delta = 0.0005): ask for less"),
        ({"max_epsilon": 8.0}, 0.5, "delta = 0.5 (max_delta = 0.0005): ask for less"),
        ({"max_epsilon": 8.0}, 1e-3, "delta = 0.001 (max_delta = 0.0005): ask for less"),  # of 2,000 samples
        ({"max_epsilon": 8.0}, 1e-4, None),
        ({"max_epsilon": 8.0, "max_delta": 1e-5}, 1e-4, "delta = 0.0001 (max_delta = 1e-05): ask for less"),
        ({"max_epsilon": 8.0, "max_delta": 1e-3}, 1e-3, None),
        ({"max_delta": 1e-5}, 1e-4, "delta = 0.0001 (max_delta = 1e-05): ask for less"),
        ({}, 0.5, None),
    ],
)
def test_a_policy_that_asks_for_privacy_bounds_delta(
    policy: dict, delta: float, objection: str | None
) -> None:
    raw = describe(GECL)
    raw["problem"]["private"] = {"epsilon": 1.0, "delta": delta, "clip": 1.0, "noise_multiplier": 5.0}
    for node, samples in zip(raw["node"], (2000, 100, 100), strict=True):
        node["samples"] = samples
    asked = {"name": "a", "own_code": False, "signed": True}
    found = list(Policy(**policy).objections(make_federation(raw, ""), **asked))
    assert found == ([] if objection is None else [objection])
    of_few = list(Policy(max_epsilon=8.0).objections(make_federation(raw, ""), **(asked | {"name": "b"})))
    assert of_few == ([f"delta = {delta:g} (max_delta = 0.001): ask for less"] if delta > 1e-3 else [])


def test_nobody_signs_without_the_coordinators_key(tmp_path: Path) -> None:
    path = write_federation(describe(GECL, nodes=2), tmp_path)
    refused = holdfast("federation", "sign", path)
    assert (refused.code, "no key of the coordinator" in refused.err) == (2, True)
    with pytest.raises(HoldfastError, match="only the coordinator can sign"):
        sign_federation(path, read_federation(path), tmp_path / "certs")


def test_a_relay_and_changing_members_are_shown() -> None:
    rules = {"remove_after": "1h", "rejoin": True}
    raw = relayed(describe(GECL, nodes=3, limits={"wait": 7200.0}, membership=rules), "ab")
    paragraphs = describe_federation(make_federation(raw, "test"), "c")
    told = " ".join(sentence for paragraph in paragraphs for sentence in paragraph.sentences)
    assert "c sends to a through the relay, b through the relay." in told
    assert "It cannot read or change them" in told
    assert "have all go back to an earlier round" in told
    assert "has been silent for 3600 s is dropped" in told
    assert "comes back with its certificate is readmitted" in told


def test_members_that_start_at_once_in_the_coordinators_folder_all_sign_the_file(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alpha = site.parent.parent / "alpha"
    path, both = alpha / "federation.toml", threading.Barrier(2)
    path.with_name("federation.toml.sig").unlink()
    federation, errors = read_federation(path), list[Exception]()
    sync = os.fsync

    def together(file: int) -> None:
        sync(file)
        if not stat.S_ISDIR(os.fstat(file).st_mode):  # right before the file gets its name
            both.wait(10)

    def start() -> None:
        try:
            require_consent(federation, path, alpha / "certs")
        except OSError as error:
            errors.append(error)

    monkeypatch.setattr(os, "fsync", together)
    threads = [threading.Thread(target=start) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert not errors
    assert is_signed(path, federation)
    require_consent(federation, path, alpha / "certs")  # writes nothing: nobody to wait with
    assert [file for file in alpha.iterdir() if file.name.endswith(".partial")] == []
