"""Curves, partitions and networks as pictures, of small runs whose numbers are known."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from matplotlib.collections import LineCollection, PathCollection, PolyCollection
from sample_run import accuracies, job, write_run

from holdfast.core.errors import HoldfastError
from holdfast.experiments.record import RunRecord, load_record
from holdfast.report.figures import curves_figure, history_figure, save_figure, svg_text
from holdfast.report.setting_figures import network_figure, partition_figure
from holdfast.report.styles import curve_styles


def test_curves_show_the_data_in_readable_units(good_run: RunRecord) -> None:
    axes = curves_figure([good_run], "test_accuracy", "payload_bytes").axes[0]
    assert axes.get_xlabel() == "data sent by all nodes (MiB)"
    assert axes.get_ylabel() == "mean test accuracy (%)"
    gecl, gossip = axes.lines
    assert gecl.get_label() == "local-gecl"
    np.testing.assert_allclose(gecl.get_xydata(), [[0, 10], [10, 75], [20, 92]], rtol=1e-14)
    np.testing.assert_allclose(gossip.get_xydata(), [[0, 10], [5, 55], [10, 55]], rtol=1e-14)
    bands = [band for band in axes.collections if isinstance(band, PolyCollection)]
    assert len(bands) == 2
    np.testing.assert_allclose(bands[0].get_paths()[0].get_extents().extents, [0, 10, 20, 94], rtol=1e-14)


def test_logarithmic_only_over_more_than_a_decade(good_run: RunRecord, tmp_path: Path) -> None:
    assert curves_figure([good_run], "train_loss").axes[0].get_yscale() == "log"  # 0.9 to 0.06
    assert curves_figure([good_run], "test_accuracy").axes[0].get_yscale() == "linear"
    record = load_record(write_run(tmp_path / "flat", [job("a", 0, accuracies(0.1, 0.2))]))
    assert curves_figure([record], "train_loss").axes[0].get_yscale() == "linear"  # 0.9 to 0.8


@pytest.mark.parametrize(
    ("consensus", "note", "bottom"),
    [
        ([0.0, 0.1, 0.001], ", start not shown", 0.001),
        ([1e-13, 0.1, 0.001], ", start not shown", 0.001),  # the rounding error of a mean
        ([0.0, 0.1, 0.001, 0.0], ", zeros not shown", 0.001),
        ([0.001, 0.01, 0.1], "", 0.001),
        ([0.1, 1e-6, 1e-12], "", 1e-12),
    ],
)
def test_what_a_logarithmic_axis_cannot_show_is_said(
    tmp_path: Path, consensus: list[float], note: str, bottom: float
) -> None:
    rows = [{"round": 5 * i, "consensus": value} for i, value in enumerate(consensus)]
    record = load_record(write_run(tmp_path / "run", [job("a", 0, rows)], metrics=("consensus",)))
    axes = curves_figure([record], "consensus").axes[0]
    assert axes.get_yscale() == "log"
    assert axes.get_ylabel() == "consensus error" + note
    assert np.nanmin(axes.lines[0].get_ydata()) == bottom
    assert bottom / 10 < axes.get_ylim()[0] < bottom


def test_a_diverged_curve_does_not_squash_the_others(tmp_path: Path) -> None:
    blowing_up = [{"round": 0, "train_loss": 1.0}, {"round": 10, "train_loss": 1e30}]
    jobs = [job("wild", 0, blowing_up, "diverged"), job("calm", 0, accuracies(0.1, 0.4))]
    record = load_record(write_run(tmp_path / "run", jobs))
    axes = curves_figure([record], "train_loss").axes[0]
    assert axes.get_ylim() == pytest.approx((0.6 - 0.015, 0.9 + 0.015))
    assert axes.lines[0].get_label() == "wild (diverged at round 10)"


def test_styles_are_distinct_and_belong_to_labels(good_run: RunRecord, tmp_path: Path) -> None:
    jobs = [
        job(algorithm, 0, accuracies(0.1), axes={"algorithm.lr": lr})
        for algorithm in ("a", "b", "c", "d")
        for lr in ("1", "2", "3")
    ]
    many = curve_styles([load_record(write_run(tmp_path / "many", jobs, axes=("algorithm.lr",)))])
    assert len(set(many.values())) == 12
    assert many["a lr=1"].colour == many["a lr=2"].colour != many["b lr=1"].colour
    few = curve_styles([good_run])
    assert few["local-gecl"].colour != few["gossip"].colour
    assert few["local-gecl"].dash != few["gossip"].dash


def test_unknown_metric_and_axis(good_run: RunRecord) -> None:
    with pytest.raises(HoldfastError, match="unknown metric 'stationarity'"):
        curves_figure([good_run], "stationarity")
    with pytest.raises(HoldfastError, match="unknown axis 'bytes'"):
        curves_figure([good_run], "test_accuracy", "bytes")


def test_history_figure() -> None:
    axes = history_figure([0, 1, 2], [0.1, 0.2, 0.4], "test_accuracy").axes[0]
    np.testing.assert_allclose(axes.lines[0].get_xydata(), [[0, 10], [1, 20], [2, 40]], rtol=1e-14)
    assert axes.figure.legends == []
    diverged = history_figure([0, 1, 2], [1.0, 30.0, float("inf")], "train_loss").axes[0]
    np.testing.assert_allclose(diverged.lines[0].get_xydata(), [[0, 1], [1, 30]], rtol=1e-14)
    assert diverged.lines[0].get_label() == "not finite from round 2 on"


def test_partition_figure() -> None:
    axes = partition_figure(np.array([[3, 4], [5, 0], [0, 4]]), ["cat", "dog"]).axes[0]
    assert sorted(text.get_text() for text in axes.texts) == ["3", "4", "4", "5"]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["cat", "dog"]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["0  (7)", "1  (5)", "2  (4)"]
    large = partition_figure(np.ones((100, 62), dtype=int))
    assert len(large.axes[0].texts) == 0
    assert len(large.axes) == 2  # the second is the scale of colours


@pytest.mark.parametrize("nodes", [5, 70])  # on a circle, and by springs
def test_network_figure_draws_every_node_and_link(nodes: int) -> None:
    links = [(i, i + 1, 0.5) for i in range(nodes - 1)]
    axes = network_figure(nodes, links, is_server=False).axes[0]
    dots = [c for c in axes.collections if isinstance(c, PathCollection)]
    lines = [c for c in axes.collections if isinstance(c, LineCollection)]
    assert len(dots[0].get_offsets()) == nodes
    assert len(lines[0].get_segments()) == nodes - 1


def test_network_figure_of_a_server_and_of_too_many_nodes() -> None:
    axes = network_figure(4, [], is_server=True).axes[0]
    lines = next(c for c in axes.collections if isinstance(c, LineCollection))
    assert len(lines.get_segments()) == 4
    assert [text.get_text() for text in axes.texts] == ["0", "1", "2", "3", "server"]
    crowd = network_figure(1000, [(0, 1, 1.0)], is_server=False).axes[0]
    assert crowd.texts[0].get_text() == "1,000 nodes, 1 links:\ntoo many to draw"


def test_saved_figures(good_run: RunRecord, tmp_path: Path) -> None:
    figure = curves_figure([good_run], "test_accuracy")
    save_figure(figure, tmp_path / "v1.5")
    assert (tmp_path / "v1.5.png").read_bytes().startswith(b"\x89PNG")
    svg = (tmp_path / "v1.5.svg").read_text(encoding="utf-8")
    assert "local-gecl" in "".join(ElementTree.fromstring(svg).itertext())
    assert svg_text(curves_figure([good_run], "test_accuracy")) == svg  # the same data give the same bytes


def test_pyplot_is_never_touched(good_run: RunRecord) -> None:
    code = (
        "import sys; from pathlib import Path; from holdfast.experiments.record import load_record\n"
        "assert 'torch' not in sys.modules and 'matplotlib' not in sys.modules\n"
        "from holdfast.report.html import report_html\n"
        "report_html([load_record(Path(sys.argv[1]))])\n"
        "assert 'matplotlib.pyplot' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code, str(good_run.path)], check=True)
