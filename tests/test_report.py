"""Tables, figures and the HTML report of small runs whose numbers are known."""

from __future__ import annotations

import re
import subprocess
import sys
from html import escape
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from matplotlib.collections import LineCollection, PathCollection, PolyCollection
from rich.console import Console
from sample_run import accuracies, job, troubled_sweep, two_algorithms, write_run

from holdfast.errors import HoldfastError
from holdfast.metrics.measured import METRICS
from holdfast.report import format as words
from holdfast.report.figures import (
    curve_styles,
    curves_figure,
    history_figure,
    network_figure,
    partition_figure,
    save_figure,
    svg_text,
)
from holdfast.report.html import report_html, write_plots, write_report
from holdfast.report.terminal import HEADS, summary_table
from holdfast.report.verdict import troubles, verdict
from holdfast.runs.record import RunRecord, Spread, load_record

VOID = {"meta", "br", "img", "link", "input", "hr"}


class Page(HTMLParser):
    """Reads a page strictly: every tag closed in order; keeps tables, text and attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tables: list[list[list[str]]] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)
        if tag == "table":
            self.tables.append([])
        if tag == "tr":
            self.tables[-1].append([])
        if tag in ("td", "th"):
            self.tables[-1][-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value or "") for name, value in attrs]

    def handle_data(self, data: str) -> None:
        if "style" in self.open:
            return
        self.words.append(data)
        if "td" in self.open or "th" in self.open:
            self.tables[-1][-1][-1] += data


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> RunRecord:
    return load_record(two_algorithms(tmp_path_factory.mktemp("runs") / "good"))


@pytest.fixture(scope="module")
def troubled(tmp_path_factory: pytest.TempPathFactory) -> RunRecord:
    return load_record(troubled_sweep(tmp_path_factory.mktemp("runs") / "troubled"))


@pytest.fixture(scope="module")
def reports(good: RunRecord, troubled: RunRecord) -> dict[str, str]:
    """The HTML of a good run, of a troubled one, and of both overlaid."""
    runs = {"good": [good], "troubled": [troubled], "both": [good, troubled]}
    return {name: report_html(records) for name, records in runs.items()}


def printed(records: list[RunRecord], width: int = 100) -> str:
    console = Console(width=width)
    with console.capture() as capture:
        console.print(summary_table(records, width))
    return capture.get()


# --- words and numbers ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("column", "value", "text"),
    [
        ("test_accuracy", 0.95249, "95.2"),
        ("train_loss", 0.123456, "0.1235"),
        ("train_loss", 1234.5, "1234"),
        ("consensus", 1.2345e-5, "1.23e-05"),
        ("consensus", 0.0, "0"),
        ("consensus", 2e7, "2.00e+07"),
        ("grad_norm2", float("nan"), "nan"),
        ("payload_bytes", 1023, "1,023 B"),
        ("payload_bytes", 45.94 * 2**30, "45.94 GiB"),
        ("payload_bytes", 1536, "1.50 KiB"),
        ("payload_bytes", 512.4 * 2**20, "512.4 MiB"),
        ("gradient_evaluations", 32_000, "32,000"),
        ("gradient_evaluations", 1_250_000, "1.25 M"),
        ("seconds", 8.26, "8.3 s"),
        ("seconds", 59.97, "1 min 0 s"),
        ("seconds", 125.4, "2 min 5 s"),
        ("seconds", 3725, "1 h 2 min"),
        ("my_own_metric", 0.5, "0.5"),
    ],
)
def test_values_as_people_read_them(column: str, value: float, text: str) -> None:
    assert words.format_value(column, value) == text


def test_spreads() -> None:
    assert words.spread_text("test_accuracy", Spread(0.952, 0.0031)) == "95.2 ± 0.3"
    assert words.spread_text("train_loss", Spread(0.12345, 0.01234)) == "0.1235 ± 0.012"
    assert words.spread_text("train_loss", Spread(0.5, None)) == "0.5"


def test_every_metric_has_words_and_a_place_in_the_terminal() -> None:
    for metric in METRICS:
        assert words.quantity(metric).reading
        assert words.quantity(metric).better
        assert metric in HEADS


def test_best_lines_count_ties_as_shown_and_finished_lines_only(tmp_path: Path) -> None:
    jobs = [
        job("a", 0, accuracies(0.1, 0.9001)),
        job("b", 0, accuracies(0.1, 0.9002)),
        job("c", 0, accuracies(0.1, 0.5)),
        job("d", 0, accuracies(0.1, 0.99), "diverged"),
    ]
    rows = load_record(write_run(tmp_path / "run", jobs)).final_table()
    assert words.best_lines(rows, "test_accuracy") == {0, 1}
    assert words.best_lines(rows, "train_loss") == {1}
    assert words.best_lines(rows, "payload_bytes") == set()
    assert words.best_lines(rows[:2], "test_accuracy") == set()  # shown alike: nobody is best


# --- verdict and troubles ---------------------------------------------------------------------------------


def plain(text: str) -> str:
    return text.replace("\N{NO-BREAK SPACE}", " ")


def test_verdict(good: RunRecord) -> None:
    assert plain(verdict([good])) == (
        "After 20 rounds, local-gecl reaches 92.0 ± 2.8 % mean test accuracy; gossip 55.0 ± 7.1 %."
    )
    assert troubles(good) == []


def test_verdict_of_a_sweep_names_the_best_setting(troubled: RunRecord) -> None:
    assert plain(verdict([troubled])) == (
        "After 20 rounds, local-gecl lr=0.1 reaches 92.0 ± 2.8 % mean test accuracy "
        "(the best setting of each algorithm)."
    )


def test_problems_are_not_ranked_against_each_other(tmp_path: Path) -> None:
    jobs = [
        job(algorithm, 0, accuracies(0.1, 0.2, final), axes={"problem.partition.h": h})
        for algorithm, h, final in [("a", "0.1", 0.5), ("b", "0.1", 0.4), ("a", "10", 0.8), ("b", "10", 0.9)]
    ]
    record = load_record(write_run(tmp_path / "run", jobs, axes=("problem.partition.h",)))
    assert plain(verdict([record])) == (
        "With h=0.1, after 20 rounds, a reaches 50.0 % mean test accuracy; b 40.0 %. "
        "With h=10, after 20 rounds, b reaches 90.0 % mean test accuracy; a 80.0 %."
    )
    assert [row.label for row in record.final_table()] == ["a h=0.1", "b h=0.1", "a h=10", "b h=10"]
    assert words.best_lines(record.final_table(), "test_accuracy") == {0, 3}


def test_verdict_without_accuracy_goes_by_the_loss(tmp_path: Path) -> None:
    jobs = [
        job("a", 0, [{"round": 20, "train_loss": 0.5}]),
        job("b", 0, [{"round": 10, "train_loss": 0.25}], "running"),
    ]
    record = load_record(write_run(tmp_path / "run", jobs, metrics=("train_loss",)))
    assert plain(verdict([record])) == "b reaches 0.25 training loss (round 10); a 0.5 (round 20)."


def test_verdict_when_there_is_little_to_say(tmp_path: Path) -> None:
    waiting = load_record(write_run(tmp_path / "waiting", [job("a", 0, [], "pending")], status="running"))
    assert verdict([waiting]) == "Nothing was recorded yet."
    assert "Nothing was recorded yet." in " ".join(Page(report_html([waiting])).words)
    assert "a: not started" in printed([waiting])
    diverged = load_record(write_run(tmp_path / "diverged", [job("a", 0, accuracies(0.1), "diverged")]))
    assert verdict([diverged]) == "Every algorithm diverged."


def test_troubles(troubled: RunRecord) -> None:
    assert troubles(troubled) == [
        "This run was interrupted: 5 of 8 jobs are finished; 'holdfast resume troubled' continues it.",
        "<b>&gossip lr=0.1, seed 1: NaN: <smaller> lr",
    ]


# --- the HTML report --------------------------------------------------------------------------------------


def test_results_in_the_report(good: RunRecord, reports: dict[str, str]) -> None:
    page = Page(reports["good"])
    head, gecl, gossip = page.tables[0]
    assert dict(zip(head, gecl, strict=True)) == {
        "algorithm": "local-gecl",
        "seeds": "2",
        "round": "20",
        "accuracy (%)": "92.0± 2.8",
        "best round (%)": "92.0± 2.8",
        "train loss": "0.08± 0.028",
        "consensus": "0.01± 0",
        "traffic": "20.00 MiB",
        "gradients": "2,000",
        "time": "10.0 s",
    }
    assert dict(zip(head, gossip, strict=True))["traffic"] == "10.00 MiB"
    assert dict(zip(head, gossip, strict=True))["best round (%)"] == "60.0± 0.0"
    assert escape(verdict([good])) in reports["good"]


@pytest.mark.parametrize("name", ["good", "troubled", "both"])
def test_report_is_one_sound_file(name: str, reports: dict[str, str]) -> None:
    text = reports[name]
    page = Page(text)
    assert not re.search(r"https?:", text)
    assert "<script" not in text
    assert not [tag for tag, name, _ in page.attributes if name in ("src", "srcset") or tag == "link"]
    ids = [value for _, name, value in page.attributes if name == "id"]
    assert len(set(ids)) == len(ids)
    references = [value for _, name, value in page.attributes if name.endswith("href")]
    references += re.findall(r"url\((#[^)]*)\)", text)
    assert references
    assert {reference.removeprefix("#") for reference in references} <= set(ids)


def test_names_from_outside_are_escaped(reports: dict[str, str]) -> None:
    text = reports["troubled"]
    assert "<b>" not in text
    assert "&lt;b&gt;&amp;gossip lr=0.1" in text
    assert "NaN: &lt;smaller&gt; lr" in text
    assert "a &lt;b&gt; &amp; c" in text  # from environment.json


def test_report_says_what_went_wrong(reports: dict[str, str]) -> None:
    page = Page(reports["troubled"])
    told = " ".join(page.words)
    assert "This run was interrupted: 5 of 8 jobs are finished" in told
    assert "<b>&gossip lr=0.1, seed 1: NaN" in told
    lines = {line[0]: line for line in page.tables[0]}
    assert "<b>&gossip lr=0.01" + "2 of 2 seeds unfinished" in lines
    assert lines["<b>&gossip lr=0.1" + "1 of 2 seeds diverged at round 20"][2] == "10/20"


def test_report_of_two_runs(good: RunRecord, tmp_path: Path) -> None:
    other = load_record(two_algorithms(tmp_path / "other", name="other"))
    page = Page(report_html([good, other]))
    assert [line[0] for line in page.tables[0][1:]] == [
        "sample: local-gecl",
        "sample: gossip",
        "other: local-gecl",
        "other: gossip",
    ]
    assert "holdfast run good/experiment.toml" in " ".join(page.words)
    assert "holdfast run other/experiment.toml" in " ".join(page.words)


def test_report_of_a_regression_on_a_server(tmp_path: Path) -> None:
    rows = [{"round": 0, "train_loss": 2.0}, {"round": 20, "train_loss": 0.5}]
    record = load_record(
        write_run(
            tmp_path / "run",
            [job("fedavg", 0, rows)],
            metrics=("train_loss",),
            partition="node,samples\n0,7\n1,5\n",
            network="i,j,weight\n",
        )
    )
    told = " ".join(Page(report_html([record])).words)
    assert "All nodes talk to the server only." in told
    assert "samples of each class" not in told
    assert "accuracy" not in told


def test_write_report_and_plots(good: RunRecord, tmp_path: Path) -> None:
    write_report([good], tmp_path / "report.html")
    assert Page((tmp_path / "report.html").read_text(encoding="utf-8")).tables
    write_plots(good, tmp_path / "plots")
    stems = [
        "consensus",
        "network",
        "partition",
        "test_accuracy",
        "test_accuracy_by_payload_bytes",
        "train_loss",
    ]
    # No plot against gradients: a round takes as many in both algorithms.
    assert sorted(path.name for path in (tmp_path / "plots").iterdir()) == sorted(
        f"{stem}.{kind}" for stem in stems for kind in ("png", "svg")
    )
    with pytest.raises(HoldfastError, match="cannot write the report"):
        write_report([good], tmp_path / "nowhere" / "report.html")


# --- figures ----------------------------------------------------------------------------------------------


def test_curves_show_the_data_in_readable_units(good: RunRecord) -> None:
    axes = curves_figure([good], "test_accuracy", "payload_bytes").axes[0]
    assert axes.get_xlabel() == "data sent by all nodes (MiB)"
    assert axes.get_ylabel() == "mean test accuracy (%)"
    gecl, gossip = axes.lines
    assert gecl.get_label() == "local-gecl"
    np.testing.assert_allclose(gecl.get_xydata(), [[0, 10], [10, 75], [20, 92]], rtol=1e-14)
    np.testing.assert_allclose(gossip.get_xydata(), [[0, 10], [5, 55], [10, 55]], rtol=1e-14)
    bands = [band for band in axes.collections if isinstance(band, PolyCollection)]
    assert len(bands) == 2
    np.testing.assert_allclose(bands[0].get_paths()[0].get_extents().extents, [0, 10, 20, 94], rtol=1e-14)


def test_logarithmic_only_over_more_than_a_decade(good: RunRecord, tmp_path: Path) -> None:
    assert curves_figure([good], "train_loss").axes[0].get_yscale() == "log"  # 0.9 to 0.06
    assert curves_figure([good], "test_accuracy").axes[0].get_yscale() == "linear"
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


def test_styles_are_distinct_and_belong_to_labels(good: RunRecord, tmp_path: Path) -> None:
    jobs = [
        job(algorithm, 0, accuracies(0.1), axes={"algorithm.lr": lr})
        for algorithm in ("a", "b", "c", "d")
        for lr in ("1", "2", "3")
    ]
    many = curve_styles([load_record(write_run(tmp_path / "many", jobs, axes=("algorithm.lr",)))])
    assert len(set(many.values())) == 12
    assert many["a lr=1"].colour == many["a lr=2"].colour != many["b lr=1"].colour
    few = curve_styles([good])
    assert few["local-gecl"].colour != few["gossip"].colour
    assert few["local-gecl"].dash != few["gossip"].dash


def test_unknown_metric_and_axis(good: RunRecord) -> None:
    with pytest.raises(HoldfastError, match="unknown metric 'stationarity'"):
        curves_figure([good], "stationarity")
    with pytest.raises(HoldfastError, match="unknown axis 'bytes'"):
        curves_figure([good], "test_accuracy", "bytes")


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


def test_saved_figures(good: RunRecord, tmp_path: Path) -> None:
    figure = curves_figure([good], "test_accuracy")
    save_figure(figure, tmp_path / "v1.5")
    assert (tmp_path / "v1.5.png").read_bytes().startswith(b"\x89PNG")
    svg = (tmp_path / "v1.5.svg").read_text(encoding="utf-8")
    assert "local-gecl" in "".join(ElementTree.fromstring(svg).itertext())
    assert svg_text(curves_figure([good], "test_accuracy")) == svg  # the same data give the same bytes


def test_pyplot_is_never_touched(good: RunRecord) -> None:
    code = (
        "import sys; from pathlib import Path; from holdfast.runs.record import load_record\n"
        "assert 'torch' not in sys.modules and 'matplotlib' not in sys.modules\n"
        "from holdfast.report.html import report_html\n"
        "report_html([load_record(Path(sys.argv[1]))])\n"
        "assert 'matplotlib.pyplot' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code, str(good.path)], check=True)


# --- the terminal -----------------------------------------------------------------------------------------


def test_table_in_the_terminal(good: RunRecord) -> None:
    lines = printed([good]).splitlines()
    assert " ".join(lines[3].split()) == "local-gecl 20 92.0±2.8 0.08 0.01 20.0 MiB 2,000 10.0 s"
    assert " ".join(lines[4].split()) == "gossip 20 55.0±7.1 0.45 0.01 10.0 MiB 2,000 10.0 s"
    assert lines[5].startswith("Means over 2 seeds; accuracy ± its sample standard deviation.")
    table = summary_table([good])
    accuracy = list(table.columns[2].cells)
    assert [cell.style for cell in accuracy] == ["bold", ""]


def test_troubles_in_the_terminal(troubled: RunRecord) -> None:
    text = printed([troubled])
    assert "<b>&gossip lr=0.1: 1 of 2 seeds diverged at round 20" in text
    assert "<b>&gossip lr=0.01: 2 of 2 seeds unfinished" in text
    assert re.search(r"<b>&gossip lr=0\.1 +2 +10/20 ", text)


def test_default_metrics_fit_and_narrow_terminals_lose_columns_aloud(tmp_path: Path) -> None:
    default = [
        "test_accuracy",
        "worst_accuracy",
        "average_accuracy",
        "average_loss",
        "train_loss",
        "consensus",
    ]
    rows = [{"round": 20, **dict.fromkeys(default, 0.51234)}]
    jobs = [job("local-gecl", seed, [rows[0] | {"test_accuracy": 0.5 + 0.1 * seed}]) for seed in (0, 1)]
    record = load_record(write_run(tmp_path / "run", jobs, metrics=tuple(default)))
    wide = summary_table([record], width=100)
    assert len(wide.columns) == 2 + len(default) + 3
    assert max(map(len, printed([record], width=100).splitlines())) <= 100
    narrow = printed([record], width=60)
    assert max(map(len, narrow.splitlines())) <= 60
    assert "Not shown for lack of width, but in the report: test loss, gradients" in " ".join(narrow.split())
    assert "55.0±7.1" in narrow
