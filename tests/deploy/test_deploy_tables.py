"""Sites that read tables: a column must mean the same at all of them, not only look the same."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
from federation_runs import DeployedRun, describe
from torch import Tensor

from holdfast.core.errors import HoldfastError
from holdfast.data.dataset import Dataset, TrainTest
from holdfast.data.tables import from_frame
from holdfast_deploy.federation_file import make_federation
from holdfast_deploy.reading import MOST_TEXTS, Reading, Readings
from holdfast_deploy.wire.retry import WaitLimitError

GECL = {"name": "local-gecl", "lr": 0.1}
LINE = {"topology": "line"}
SERVER = {"topology": "server"}
ABO, WARDS = ("0", "A", "B"), ("east", "west")


def table(
    blood: Sequence[str] = ABO, order: Sequence[str] = ("age", "blood", "ward"), ill: Sequence[Any] = (0, 1)
) -> Any:
    """A site's own table, read by the site itself."""
    rows = 12
    age = np.random.default_rng(len(blood)).standard_normal(rows).astype(np.float32)
    columns = {"age": age, "blood": np.resize(blood, rows), "ward": np.resize(WARDS, rows)}
    frame = pandas.DataFrame({name: columns[name] for name in order} | {"ill": np.resize(ill, rows)})
    return from_frame(frame, target="ill", one_hot=["blood", "ward"])


def pair(data: Any) -> tuple[Tensor, Tensor]:
    """The same samples, of which nobody knows any more what the columns are."""
    return data.x, data.y


def carried_out(sites: Sequence[Any], folder: Path, network: dict[str, str], **changes: Any) -> DeployedRun:
    problem = {"input_shape": [6], "classes": 2}
    algorithm = {"name": "fedavg", "lr": 0.1} if network == SERVER else GECL
    raw = describe(algorithm, len(sites), problem=problem, network=network, **changes)
    run = DeployedRun(make_federation(raw, "test"), folder, data_of=lambda node: sites[node])
    return run.carry_out()


SOON = {"wait": 0.5, "exchange": 0.5}


def refusals(run: DeployedRun) -> set[str]:
    return {entry["reason"].split(";")[0] for entry in run.log if entry["event"] == "refused by"}


@pytest.mark.parametrize(
    ("other", "what"),
    [
        (table(("A", "AB", "B")), "the words of column 'blood'"),
        (TrainTest(table(("A", "AB", "B")), None), "the words of column 'blood'"),
        (table(order=("ward", "blood", "age")), "the names of the columns or their order"),
        (table(ill=("no", "yes")), None),
    ],
)
def test_sites_whose_columns_mean_something_else_are_refused(other: Any, what: str, tmp_path: Path) -> None:
    ours = table() if what else table(ill=("ill", "well"))
    run = carried_out([ours, other], tmp_path, LINE, limits=SOON)
    what = what or "the names of the classes"
    assert refusals(run) == {
        f"another reading of the table: {one} and {two} differ in {what}" for one, two in ("ab", "ba")
    }
    assert {type(error) for error in run.errors.values()} == {WaitLimitError}
    assert not any(entry["event"] == "round done" and entry["round"] for entry in run.log)


def test_class_names_of_data_sets_are_compared(tmp_path: Path) -> None:
    def site(*names: str) -> Dataset:
        x, y = pair(table())
        return Dataset(x, y, x, y, classes=2, class_names=names)

    run = carried_out([site("cat", "dog"), site("dog", "fox")], tmp_path, LINE, limits=SOON)
    assert "another reading of the table: a and b differ in the names of the classes" in refusals(run)


@pytest.mark.parametrize("network", [LINE, SERVER])
def test_the_same_words_train_together(network: dict[str, str], tmp_path: Path) -> None:
    """Truth values have names, whole numbers none: nothing is known to differ."""
    run = carried_out([table(), table(ill=(False, True)), pair(table())], tmp_path, network)
    assert not run.errors
    assert not refusals(run)


@pytest.mark.parametrize("network", [LINE, SERVER])
def test_what_lies_between_two_sites_notices_that_they_differ(
    network: dict[str, str], tmp_path: Path
) -> None:
    """Neither a server nor the node in the middle of a line knows what the columns are."""
    middle = [pair(table())] if network == LINE else []
    sites = [table(), *middle, table(("A", "AB", "B"))]
    run = carried_out(sites, tmp_path, network, limits=SOON)
    assert any("differ in the words of" in reason for reason in refusals(run))
    assert run.errors


def test_what_others_say_is_not_trusted() -> None:
    form = table().table
    readings = Readings("a", Reading.of(form, None))
    for said in ("", "later=1", " = = "):
        readings.compare("b", said)
    for said in ("words", "words=", "columns=," * 3, f"words={'0' * 9000}"):
        with pytest.raises(HoldfastError, match="b and a differ in the"):
            readings.compare("b", said)


def test_many_text_columns_fit_beside_a_question() -> None:
    names = [f"column {i}" for i in range(MOST_TEXTS + 100)]
    words = dict.fromkeys(names, ("no", "yes"))
    form = table().table
    many = type(form)("ill", tuple(names), None, words)
    ours = Readings("a", Reading.of(many, ("no", "yes")))
    assert len(ours.header.encode()) < 12_000
    last = type(form)("ill", tuple(names), None, words | {names[-1]: ("ja", "nein")})
    with pytest.raises(HoldfastError, match="a and b differ in the words of their text columns"):
        Readings("b", Reading.of(last, None)).compare("a", ours.header)
    first = type(form)("ill", tuple(names), None, words | {names[3]: ("ja", "nein")})
    with pytest.raises(HoldfastError, match="a and b differ in the words of column 'column 3'"):
        Readings("b", Reading.of(first, None)).compare("a", ours.header)
