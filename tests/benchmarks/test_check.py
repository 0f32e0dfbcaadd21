"""The speed guard: it times real rounds, passes what is as fast as it was, and names what is slower."""

from __future__ import annotations

import sys
import tomllib
from functools import partial
from pathlib import Path

import pytest
import tomli_w
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def check(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import check

    threads = torch.get_num_threads()
    small = partial(check.of_rounds, check.linear(3, steps=2), "fedavg")
    monkeypatch.setattr(check, "CASES", [check.Case("round, small", small)])
    monkeypatch.setattr(check, "KEPT", tmp_path / "check.toml")
    yield check
    torch.set_num_threads(threads)


def run(check, monkeypatch, kept: dict[str, float], *options: str, bar: float | None = None) -> None:
    bars = {} if bar is None else {"at_most": {"round, small": bar}}
    check.KEPT.write_text(tomli_w.dumps({"cpu": {"band": 1.25, "ratios": kept, **bars}}))
    monkeypatch.setattr(sys, "argv", ["check.py", "--devices", "cpu", *options])
    check.main()


def test_what_is_slower_than_it_was_fails_by_name(check, monkeypatch) -> None:
    run(check, monkeypatch, {"round, small": 1e6})  # any ratio is below
    with pytest.raises(SystemExit, match=r"round, small: .* times the 0\.000 that are kept"):
        run(check, monkeypatch, {"round, small": 1e-6})


def test_what_is_above_its_bar_fails_whatever_is_kept(check, monkeypatch) -> None:
    run(check, monkeypatch, {"round, small": 1e6}, bar=1e6)
    for options in ([], ["--write"]):  # keeping a slower ratio moves no bar
        with pytest.raises(SystemExit, match=r"^round, small: .* the bar is 0\.00$"):
            run(check, monkeypatch, {"round, small": 1e6}, *options, bar=1e-6)
    assert tomllib.loads(check.KEPT.read_text())["cpu"]["at_most"] == {"round, small": 1e-6}


def test_a_case_without_a_kept_ratio_fails_until_one_is_written(check, monkeypatch) -> None:
    with pytest.raises(SystemExit, match="round, small: no ratio is kept"):
        run(check, monkeypatch, {})
    run(check, monkeypatch, {}, "--write")
    assert tomllib.loads(check.KEPT.read_text())["cpu"]["ratios"]["round, small"] > 0


def test_all_cases_have_a_ratio(monkeypatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import check

    table = tomllib.loads((BENCHMARKS / "check.toml").read_text())
    for device in ("cpu", "cuda"):
        assert set(table[device]["ratios"]) == {case.title for case in check.CASES if device in case.devices}


def test_what_measuring_may_cost_on_a_gpu_has_bars(monkeypatch) -> None:
    """Those bars fail although the band would let pass as much: 1.08 times 1.925 is above 2."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import check

    bars = tomllib.loads((BENCHMARKS / "check.toml").read_text())["cuda"]["at_most"]
    on_a_gpu = [case.title for case in check.CASES if "cuda" in case.devices]
    assert list(bars) == [title for title in on_a_gpu if title.startswith("measuring")]
    for title, bar in bars.items():
        assert check.above({title: bar}, bars) == []
        assert check.above({title: bar + 0.01}, bars) == [
            f"{title}: {bar + 0.01:.3f} of its reference; the bar is {bar:.2f}"
        ]
