"""The examples, run as their first lines say, with few rounds."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow


def run(*arguments: str, cwd: Path) -> str:
    done = subprocess.run([sys.executable, *arguments], cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_banks_find_more_fraud_together(tmp_path: Path) -> None:
    out = run(str(ROOT / "examples/fraud.py"), cwd=tmp_path)
    lines = [line.split() for line in out.splitlines()[1:]]
    assert [line[0] for line in lines] == ["Aurora", "Borealis", "Cirrus", "Delta", "Echo"]
    alone, together = (sum(float(line[column]) for line in lines) / 5 for column in (2, 3))
    assert together > alone


def test_plants_predict_better_with_a_correction(tmp_path: Path) -> None:
    out = run(str(ROOT / "examples/sensors.py"), cwd=tmp_path)
    gossip, corrected = (float(loss) for loss in re.findall(r"test loss ([\d.]+)", out))
    assert corrected < gossip


def test_images_are_augmented_anew(tmp_path: Path) -> None:
    out = run(str(ROOT / "examples/images.py"), cwd=tmp_path)
    assert "read when they are drawn" in out
    assert float(re.findall(r"accuracy ([\d.]+)", out)[0]) > 0.6


def test_adapters_learn_eight_dialects(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    out = run(str(ROOT / "examples/adapters.py"), "--seeds", "1", "--rounds", "2", cwd=tmp_path)
    before, *tuned = (float(loss) for loss in re.findall(r"mean loss ([\d.]+)", out))
    assert len(tuned) == 3
    assert max(tuned) < before


def test_an_own_method_passes_its_own_tests(tmp_path: Path) -> None:
    folder = ROOT / "examples/own_method"
    run(
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-c",
        os.devnull,
        f"--rootdir={folder}",
        ".",
        cwd=folder,
    )


def test_three_containers_are_prepared(tmp_path: Path) -> None:
    folder = tmp_path / "containers"
    shutil.copytree(ROOT / "examples/containers", folder)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["sh", "prepare.sh"], cwd=folder, env={**os.environ, "PATH": path}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert re.fullmatch(r"FINGERPRINT=\S.*\n", (folder / ".env").read_text())
    for name in ("north", "south", "west"):
        keys = {path.name for path in (folder / "sites" / name / "certs").iterdir()}
        assert keys == {"ca.crt", f"{name}.crt", f"{name}.key"}  # no site has another's key
        assert (folder / "sites" / name / "data.npz").exists()
