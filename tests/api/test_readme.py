"""The README's Python, and that of pages beside it, run as printed."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from forks import run_python

import holdfast
from holdfast.algorithms import ALGORITHMS

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def snippet(page: str, word: str) -> str:
    """The only snippet of ``page`` that has ``word`` in it."""
    text = (ROOT / page).read_text(encoding="utf-8")
    [code] = [code for code in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if word in code]
    return code


def test_it_counts_the_methods() -> None:
    stated = re.search(r"\*\*(\d+) methods", README)
    assert stated is not None, "README.md does not say '**N methods' any more"
    here = len(list(ALGORITHMS))
    assert int(stated[1]) == here, f"README.md: write '**{here} methods' instead of '**{stated[1]} methods'"


def test_the_citation_names_this_version() -> None:
    cited = re.search(r"^version: (.*)$", (ROOT / "CITATION.cff").read_text(encoding="utf-8"), re.MULTILINE)
    assert cited is not None
    assert cited[1] == holdfast.__version__


def test_training_gives_the_figure_that_is_stated(tmp_path: Path) -> None:
    code = snippet("README.md", "hf.train(")
    out, _ = run_python(code, tmp_path)
    stated = re.search(r"print\(.*# ([\d.]+)$", code, re.MULTILINE)
    assert stated is not None
    # Rounding differs from machine to machine, and so may a few of the 397 test samples.
    assert float(out) == pytest.approx(float(stated[1]), abs=0.01)
    assert (tmp_path / "consensus.pt").exists()


def test_minimising_gives_the_optimum(tmp_path: Path) -> None:
    out, _ = run_python("import holdfast as hf\n" + snippet("docs/python.md", "hf.minimize("), tmp_path)
    assert out.startswith("torch.Size([201, 2, 1])")
    assert [float(x) for x in re.findall(r"\[(-?[\d.]+)\]", out)] == pytest.approx([-0.5, -0.5], abs=1e-4)


def test_an_own_method_joins_the_others(tmp_path: Path) -> None:
    (tmp_path / "my_module.py").write_text(snippet("docs/howto/own-method.md", "class MyTracking"))
    code = (
        "import my_module, holdfast as hf\n"
        "functions = [lambda x: ((x - 1) ** 2).sum(), lambda x: (3 * (x + 1) ** 2).sum()]\n"
        "method = hf.ALGORITHMS.build('my-tracking', {'lr': 0.05, 'local_steps': 4})\n"
        "result = hf.minimize(functions, [0.0], method, rounds=200, topology={'name': 'complete'})\n"
        "print(type(method).__name__, result.x[-1].flatten().tolist())"
    )
    out, err = run_python(code, tmp_path)
    assert out.startswith("MyTracking"), err
    found = [float(x) for x in re.findall(r"-?[\d.]+", out)]
    assert found == pytest.approx([-0.5, -0.5], abs=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("word", "printed"),
    [
        ("hf.Callback", "stopped True"),
        ("hf.Ditto", "[0.5, 0.5] [0.17, 0.75]"),
        ("hf.Simulation(hf.LocalGECL", "5 torch.Size([6, 8]) ('x', 'mixed', 'dual', 'memory')"),
    ],
)
def test_the_page_on_experiments(word: str, printed: str, tmp_path: Path) -> None:
    code = snippet("docs/experiments.md", word)
    running = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert running.stdout.strip() == printed, running.stderr


@pytest.mark.slow
def test_the_page_on_python(tmp_path: Path) -> None:
    """All of its code, in order, as one script."""
    page = (ROOT / "docs/python.md").read_text(encoding="utf-8")
    code = "\n".join(re.findall(r"```python\n(.*?)```", page, re.DOTALL))
    running = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert running.returncode == 0, running.stderr
    found = re.search(r"TrainResult\(done after round 40: test_accuracy ([\d.]+)", running.stdout)
    assert found is not None, running.stdout
    # Rounding differs from machine to machine, and so may a few of the 397 test samples.
    assert float(found[1]) == pytest.approx(0.8222, abs=0.01)
    assert "\nstopped\n" in running.stdout
    assert re.search(r"^Local G-ECL +40 ", running.stdout, re.MULTILINE)
    assert "LocalGECL(lr=0.4, local_steps=8" in running.stdout
    for name in ("comparison.png", "comparison.html", "tuning.png", "runs/first/summary.json"):
        assert (tmp_path / name).exists()
