"""The files that ``holdfast new project`` writes."""

EXPERIMENT = """\
# Several organisations learn one model together; each row of the table belongs to one of them.
#
#   holdfast run experiment.toml                          train, compare, write a report
#   holdfast run experiment.toml "algorithm.lr=[0.1,0.3]" a list makes a sweep
#   holdfast tune experiment.toml                         find the best step sizes
#   holdfast list                                         what can be chosen, with parameters

name = "{name}"
rounds = 60             # communication rounds
seeds = [0]
evaluate_every = 5      # rounds between measurements

[problem]
nodes = {nodes}               # the organisations
model = "model:Net"     # the class Net in model.py
loss = "{loss}"
batch_size = 32
weights = "samples"     # every row counts alike; "uniform": every organisation

[problem.dataset]
name = "csv"
file = "data/train.csv"
test_file = "data/test.csv"
target = {target}
node = {node}
{one_hot}
[network]
topology = "server"     # or "ring", "complete": nobody in the middle

[[algorithm]]
name = "fedavg"
lr = {lr}
local_steps = 10

[[algorithm]]
name = "scaffold"       # corrects what makes fedavg drift
lr = {lr}
local_steps = 10
"""

MODEL = '''\
"""The model that is trained: change it as you like."""

import torch
from torch import Tensor, nn

# Of the training rows, when this project was made. Organisations that do not show each other their rows
# agree on such numbers in advance, for example from public data.
MEANS = {means}
SCALES = {scales}
{target}

class Net(nn.Module):
    """A small network on standardised columns."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.register_buffer("means", torch.tensor(MEANS))
        self.register_buffer("scales", torch.tensor(SCALES))
        self.layers = nn.Sequential(nn.Linear(len(MEANS), 32), nn.ReLU(), nn.Linear(32, outputs))

    def forward(self, x: Tensor) -> Tensor:
        outputs = self.layers((x - self.means) / self.scales)
        return {outputs}
'''

TARGET = "TARGET_MEAN, TARGET_SCALE = {mean}, {scale}\n"
OUTPUTS = "outputs"
OUTPUTS_OF_NUMBERS = "TARGET_MEAN + TARGET_SCALE * outputs.squeeze(-1)"

TEST = '''\
"""Run with: python -m pytest"""

import json
import subprocess
import sys


def test_training_reduces_the_loss(tmp_path):
    command = [sys.executable, "-m", "holdfast", "run", "experiment.toml", "rounds=10"]
    subprocess.run([*command, "--runs-dir", str(tmp_path), "--name", "try"], check=True)
    summary = json.loads((tmp_path / "try" / "summary.json").read_text())
    lines = (tmp_path / "try" / "metrics.csv").read_text().splitlines()
    column = lines[0].split(",").index("train_loss")
    for job in summary["jobs"]:
        first = next(line for line in lines[1:] if line.startswith(job["algorithm"] + ","))
        assert job["final"]["train_loss"] < float(first.split(",")[column])
'''

README = """\
# {name}

    holdfast run experiment.toml     # train, and write a report
    holdfast tune experiment.toml    # find better step sizes
    python -m pytest                 # check that the project works; needs pip install pytest

- `experiment.toml`: what is learned, by which methods, over which network
- `model.py`: the model
- `data/`: a fifth of each organisation's rows is kept for testing
"""
