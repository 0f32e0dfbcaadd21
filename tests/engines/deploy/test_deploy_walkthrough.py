"""The walkthrough of docs/deploy.md, followed to the letter by two organisations in folders of their own."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from federation_runs import free_ports

from holdfast.data import DATASETS

DOCUMENT = Path(__file__).parents[3] / "docs" / "deploy.md"


def commands() -> list[tuple[str, list[str]]]:
    """(prompt, arguments) of every command in the walkthrough, in order."""
    text = DOCUMENT.read_text().partition("## A walkthrough")[2].partition("## With a server")[0]
    for name, port in zip(("alpha", "beta"), free_ports(2), strict=True):
        text = text.replace(f"{name}.example:7001", f"127.0.0.1:{port}")
    return [(p, shlex.split(line)) for p, line in re.findall(r"^([$%]) holdfast (.*)$", text, re.MULTILINE)]


def start(folder: Path, arguments: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "holdfast", *arguments],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "XDG_STATE_HOME": str(folder / "state")},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.slow
def test_two_organisations_from_nothing_to_a_trained_model(tmp_path: Path) -> None:
    folders = {"$": tmp_path / "alpha", "%": tmp_path / "beta"}
    digits = DATASETS.build("digits", {})
    for i, folder in enumerate(folders.values()):
        folder.mkdir()
        mine = slice(i, None, 2)
        np.savez(
            folder / f"{folder.name}.npz",
            x_train=digits.x_train[mine],
            y_train=digits.y_train[mine],
            x_test=digits.x_test[mine],
            y_test=digits.y_test[mine],
        )
    alpha, beta = folders.values()
    nodes: list[subprocess.Popen[str]] = []
    for prompt, arguments in commands():
        if arguments[:2] == ["federation", "csr"] and prompt == "%":
            for name in ("federation.toml", "federation.toml.sig"):  # as Alpha has sent them
                shutil.copy(alpha / name, beta)
        if arguments[:2] == ["federation", "sign"]:
            shutil.copy(beta / "certs" / "beta.csr", alpha)
        process = start(folders[prompt], arguments)
        if arguments[0] == "node":
            nodes.append(process)
            continue
        output = process.communicate(timeout=300)[0]
        assert process.returncode == 0, output
        if arguments[:2] == ["federation", "sign"]:
            for name in ("beta.crt", "ca.crt"):
                shutil.copy(alpha / "certs" / name, beta / "certs")
        if arguments[:2] == ["federation", "show"]:
            assert "Signed by its coordinator" in output
            said = re.search(r"holdfast (federation accept [0-9a-f:]+) ", output)
            assert said is not None, output
            accepted = start(beta, said[1].split())
            assert accepted.wait(timeout=300) == 0, accepted.communicate()[0]
        if arguments[:2] == ["federation", "status"]:
            assert "alpha" in output
    for node in nodes:
        output = node.communicate(timeout=300)[0]
        assert node.returncode == 0, output
        assert "test accuracy" in output
    assert len(nodes) == 2
    models = [
        safetensors.torch.load_file(folder / f"node-{folder.name}" / "model.safetensors")
        for folder in (alpha, beta)
    ]
    for name, mine in models[0].items():
        assert torch.allclose(mine, models[1][name], atol=0.05)
    assert not (alpha / "certs" / "beta.key").exists()
    assert not (beta / "certs" / "ca.key").exists()
