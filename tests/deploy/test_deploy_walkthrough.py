"""docs/howto/three-machines.md, followed to the letter by three organisations in folders of their own."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch
from federation_runs import free_ports

PAGE = Path(__file__).parents[2] / "docs" / "howto" / "three-machines.md"
SITES = ("north", "south", "west")


def start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *arguments],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "XDG_STATE_HOME": str(folder / "state")},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> str:
    output = process.communicate(timeout=300)[0]
    assert process.returncode == 0, output
    return output


def send(*files: Path, to: Path) -> None:
    for file in files:
        shutil.copy(file, to)


@pytest.mark.slow
def test_three_organisations_from_nothing_to_a_trained_model(tmp_path: Path) -> None:
    text = PAGE.read_text(encoding="utf-8")
    for site, port in zip(SITES, free_ports(3), strict=True):
        text = re.sub(rf"{site}\.example:\d+", f"127.0.0.1:{port}", text)
    (data,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    finish(start(tmp_path, "-c", data))
    blocks = re.findall(r'```sh title="(.*?)"\n(.*?)```', text, re.DOTALL)
    assert len(blocks) == len(re.findall("^```sh", text, re.MULTILINE)) == 5

    def follow(block: int) -> list[subprocess.Popen[str]]:
        """Its commands at each of the sites that its title names, for the first of which they are printed."""
        title, commands = blocks[block]
        processes = []
        for site in (site for site in SITES if site in title):
            for command in commands.splitlines():
                mine = command if site == title.split(",")[0] else command.replace(title.split(",")[0], site)
                program, *arguments = shlex.split(mine.replace("FINGERPRINT", fingerprint))
                assert program == "holdfast"
                processes.append(start(tmp_path / site, "-m", "holdfast", *arguments))
                if arguments[0] != "node":
                    output.append(finish(processes[-1]))
        return processes

    north, south, west = (tmp_path / site for site in SITES)
    output: list[str] = []
    fingerprint = "?"
    follow(0)
    fingerprint = output[0].partition("fingerprint ")[2].split()[0]
    for site in (south, west):
        send(north / "federation.toml", north / "federation.toml.sig", to=site)
    follow(1)
    shown = [text for text in output if "Signed by its coordinator" in text]
    assert len(shown) == 2
    assert all(f"Fingerprint of the file: {fingerprint}" in text for text in shown)
    send(south / "certs" / "south.csr", west / "certs" / "west.csr", to=north)
    follow(2)
    for site in (south, west):
        send(north / "certs" / f"{site.name}.crt", north / "certs" / "ca.crt", to=site / "certs")
    nodes = follow(3)
    assert len(nodes) == 3
    assert all("test accuracy" in finish(node) for node in nodes)
    follow(4)
    assert "north" in output[-3]
    assert "intact" in output[-2]
    assert (north / "node-north" / "report.html").is_file()
    models = [
        safetensors.torch.load_file(site / f"node-{site.name}" / "model.safetensors")
        for site in (north, south, west)
    ]
    for name, mine in models[0].items():
        assert all(torch.allclose(mine, other[name], atol=0.05) for other in models[1:])
    assert not list(north.glob("certs/south.key"))
    assert not (south / "certs" / "ca.key").exists()
