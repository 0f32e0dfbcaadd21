"""A made-up paper about the embedded digits."""

from __future__ import annotations

from pathlib import Path

from holdfast_papers.base import (
    Circumstances,
    Claim,
    Layout,
    Line,
    Panel,
    Paper,
    PaperExperiment,
    Preset,
    judged,
    not_comparable,
)
from holdfast_papers.evidence import Evidence, mean_text

PRESET = """\
name = "tiny"
rounds = 6
seeds = [0, 1]
evaluate_every = 2
metrics = ["test_accuracy", "train_loss"]

[problem]
dataset = "digits"
nodes = 4
partition = { name = "dirichlet", h = [0.5, inf] }
model = "linear"

[network]
topology = "ring"

[[algorithm]]
name = "local-gecl"
lr = 0.1
local_steps = 4

[[algorithm]]
name = "gossip"
lr = 0.1
local_steps = 4
"""
LINES = [Line("ours", "local-gecl"), Line("theirs", "gossip")]


def learns(e: Evidence):
    gain = e.curve("local-gecl", h=0.5).final("test_accuracy") - e.curve("local-gecl", h=0.5).at(
        "test_accuracy", 0
    )
    return judged(bool(gain.mean() > 0), mean_text(100 * gain, unit="points"), "more than 0")


def squares(where: Circumstances):
    return [{"what": "square", "n": n, "value": n**2} for n in range(1, 4)]


def tiny_paper(folder: Path) -> Paper:
    (folder / "curves.toml").write_text(PRESET)
    (folder / "absent.toml").write_text(PRESET.replace('"digits"', '"mnist"'))
    (folder / "absent-too.toml").write_text(PRESET.replace('"digits"', '"cifar10"'))
    return Paper(
        "tiny",
        "A tiny paper",
        "nobody, nowhere",
        folder,
        [
            PaperExperiment(
                "curves",
                "Curves | of digits",
                [
                    Claim("It learns", "yes", learns),
                    Claim("It flies", "no", lambda e: not_comparable("–", "no wings")),
                ],
                presets=[Preset("curves", ["seeds=[0]", "rounds=4"])],
                layout=Layout(
                    [Panel("(a)", LINES, each="h"), Panel("(b)", LINES, x="h", y="train_loss")], columns=2
                ),
            ),
            PaperExperiment(
                "squares",
                "Squares",
                [Claim("Three squared is eight", "8", lambda e: judged(e.rows[-1]["value"] == 8, "9", "8"))],
                compute=squares,
                layout=Layout(
                    [
                        Panel(
                            "squares",
                            [Line("n²", "square")],
                            x="n",
                            y="value",
                            by="what",
                            log_x=True,
                            log_y=True,
                        )
                    ]
                ),
                table=lambda e: (["n", "n²"], [[str(row["n"]), str(row["value"])] for row in e.rows]),
            ),
            PaperExperiment(
                "absent", "Data that are not there", [], presets=[Preset("absent"), Preset("absent-too")]
            ),
        ],
    )
