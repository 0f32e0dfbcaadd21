"""Today's numbers, bytes, names and messages are those of the golden record; what differs is named."""

from __future__ import annotations

import pytest
from golden import GROUPS, computed, differences, load_groups, main, read_record, same

load_groups()


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] if kind.slow else []) for name, kind in GROUPS.items()],
)
def test_nothing_differs_from_the_record(name: str) -> None:
    different = sorted(differences(read_record()[name], computed(name)))
    assert not different, "\n".join(
        [f"{len(different)} differences (python tests/golden/golden.py --write records anew):", *different]
    )


def test_every_recorded_group_is_computed() -> None:
    assert read_record().keys() == GROUPS.keys()


def test_values_may_differ_by_rounding_and_nothing_else() -> None:
    assert same(1.0, 1.0 + 1e-10)
    assert not same(1.0, 1.0 + 1e-8)
    assert same([5.0, 1e-7], [5.0, 1e-7 + 1e-9])  # of the scale of the list
    assert not same(1e-7, 1e-7 + 1e-9)
    assert same({"a": [1, "x", None]}, {"a": [1, "x", None]})
    for value in (2, "1", None, True, [1], {"a": 1}):
        assert not same(1, value)
        assert not same(value, 1)


def test_differences_name_the_entry_and_the_quantity() -> None:
    recorded = {"one": {"loss": 1.0, "bytes": 8, "left": 1}, "gone": {}}
    found = {"one": {"loss": 1.5, "bytes": 8, "added": None}, "new": {}}
    assert sorted(differences(recorded, found)) == [
        "gone: recorded, but not there any more",
        "new: not in the record",
        "one: added: new",
        "one: left: recorded, but not there any more",
        "one: loss: recorded 1.0, now 1.5",
    ]


def test_help_names_the_groups(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    said = capsys.readouterr().out
    assert "--write" in said
    assert all(name in said for name in GROUPS)
