"""The report in a real browser: its curves, controls and keys, in light and dark, narrow and on paper."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import CHROMIUM, Browser, browser
from command_line import SMALL, holdfast
from sample_run import accuracies, job, troubled_sweep, two_algorithms, write_run

from holdfast.experiments.record import load_record
from holdfast.report.format import format_value
from holdfast.report.html import report_html

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: no chromium or google-chrome was found"),
]


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("profile")) as found:
        yield found
        assert found.complaints == []
        assert {url.split(":")[0] for url in found.requests} <= {"file", "data"}


def opened(page: Browser, folder: Path, *runs: Path, **options: object) -> Browser:
    target = folder / "report.html"
    target.write_text(report_html([load_record(run) for run in runs]), encoding="utf-8")
    page.open(target.as_uri(), **options)
    page.wait("document.querySelector('#curves .chart .line') !== null")
    return page


@pytest.fixture
def good(page: Browser, tmp_path: Path) -> Browser:
    return opened(page, tmp_path, two_algorithms(tmp_path / "good"))


def tip(page: Browser) -> str:
    return str(page.js("document.querySelector('.tip:not([hidden])')?.innerText ?? ''"))


def test_curves_are_those_of_python(good: Browser, tmp_path: Path) -> None:
    record = load_record(tmp_path / "good")
    for metric in record.metrics:
        for axis in ("round", "payload_bytes"):
            for order, ours in enumerate(record.series(metric, axis)):
                theirs = good.js(f"holdfast.series(holdfast.data.curves[{order}], '{metric}', '{axis}')")
                for name in ("x", "mean", "low", "high"):
                    assert theirs[name] == pytest.approx(getattr(ours, name), rel=1e-5)
    assert good.js("document.querySelectorAll('#curves figure').length") == 3
    assert good.js("document.querySelectorAll('#curves .band').length") == 6
    assert good.js("document.querySelectorAll('.static').length") == 0


def test_numbers_are_written_as_python_writes_them(good: Browser) -> None:
    kinds = {
        "train_loss": "number",
        "payload_bytes": "bytes",
        "gradient_evaluations": "count",
        "seconds": "seconds",
    }
    for column, kind in kinds.items():
        for value in (
            0,
            0.123456,
            1.2345e-5,
            8.26,
            59.97,
            125.4,
            1023,
            1536,
            3725,
            32_000,
            1_250_000,
            2e7,
            4.9e10,
        ):
            assert good.js(f"holdfast.valueText('{kind}', {value})") == format_value(column, value), (
                kind,
                value,
            )
    assert good.js("holdfast.valueText('accuracy', 0.95249)") == "95.2 %"


def test_hovering_reads_the_values(good: Browser) -> None:
    good.hover("#curves .chart", 0.98)
    words = " ".join(tip(good).split())
    assert (
        words == "communication round: 20 local-gecl 92.0 % 90.0 % to 94.0 % gossip 55.0 % 50.0 % to 60.0 %"
    )
    assert good.js("document.querySelectorAll('#curves .cross line').length") == 3  # in all figures
    good.hover("h1")
    assert tip(good) == ""


def test_the_keyboard_reads_the_values(good: Browser) -> None:
    good.js("document.querySelector('#curves .chart').focus()")
    good.press("ArrowRight")
    assert "communication round: 0" in tip(good)
    good.press("ArrowRight")
    assert "communication round: 10" in tip(good)
    good.press("End")
    assert "communication round: 20" in tip(good)
    good.press("Escape")
    assert tip(good) == ""


def test_curves_can_be_hidden_shown_and_highlighted(good: Browser) -> None:
    shown = "[...document.querySelectorAll('#curves figure:first-child .curve')].map((c) => c.dataset.label)"
    assert good.js(shown) == ["local-gecl", "gossip"]
    good.js("document.querySelector('.entry').focus()")
    dimmed = "document.querySelectorAll('.curve.dimmed[data-label=gossip]').length"
    assert good.js(dimmed) == 3
    good.press(" ")
    assert good.js(shown) == ["gossip"]
    assert good.js("document.activeElement.getAttribute('aria-pressed')") == "false"
    good.click(".legend .all")
    assert good.js(shown) == ["local-gecl", "gossip"]
    good.hover(".entry:nth-child(2)")
    assert good.js("document.querySelectorAll('.curve.dimmed[data-label=local-gecl]').length") == 3
    good.hover("tr[data-curve='0']")  # a line of the table does the same
    assert good.js(dimmed) == 3


def test_the_x_axis_and_the_scale_can_be_chosen(good: Browser) -> None:
    axis = "document.querySelector('#curves .axis').textContent"
    heads = "[...document.querySelectorAll('#curves h3')].map((h) => h.textContent)"
    assert good.js(axis) == "communication round"
    assert good.js(heads) == ["Mean test accuracy %", "Training loss log scale", "Consensus error"]
    good.js("document.querySelector('input[name=axis]').focus()")
    good.press("ArrowRight")  # as radio buttons do
    assert good.js(axis) == "data sent by all nodes (MiB)"
    for value, text in (("gradient_evaluations", "gradients computed by all nodes"), ("seconds", "time (s)")):
        good.click(f"input[value={value}]")
        assert good.js(axis) == text
    good.click("input[value=log]")
    assert good.js(heads)[0] == "Mean test accuracy %, log scale"
    assert good.js(heads)[2] == "Consensus error log scale, start not shown"
    good.click("input[value=linear]")
    assert good.js(heads)[1] == "Training loss"


def test_many_curves_are_small_multiples_by_method(page: Browser, tmp_path: Path) -> None:
    jobs = [
        job(name, 0, accuracies(0.1, 0.5, lr / 10), axes={"algorithm.lr": str(lr)})
        for name in ("a", "b", "c")
        for lr in (1, 2, 3, 4)
    ]
    opened(page, tmp_path, write_run(tmp_path / "run", jobs, axes=("algorithm.lr",)))
    assert page.js("[...document.querySelectorAll('#curves h3')].map((h) => h.firstChild.textContent)") == [
        "a",
        "b",
        "c",
    ]
    assert (
        page.js("document.querySelectorAll('#curves figure:first-child .curve:not(.backdrop)').length") == 4
    )
    assert page.js("document.querySelectorAll('#curves figure:first-child .curve.backdrop').length") == 8
    page.click("input[value=metrics]")
    assert page.js("document.querySelectorAll('#curves figure').length") == 3  # now one for each metric
    assert (
        page.js("document.querySelectorAll('#curves figure:first-child .curve:not(.backdrop)').length") == 12
    )
    assert page.js("document.querySelectorAll('#sweep0 .best-dot').length") == 3
    assert page.js("document.querySelector('#sweep0 .flag').textContent") == "best 4, at the edge"


def test_names_from_files_are_text(page: Browser, tmp_path: Path) -> None:
    evil = "</script><img src=x onerror=\"document.title='taken'\"><b>"
    jobs = [job(evil, 0, accuracies(0.1, 0.5)), job(evil + "2", 0, accuracies(0.1, 0.6))]
    partition = f'node,samples,"{evil.replace(chr(34), chr(39))}",dog\n0,7,3,4\n1,5,5,0\n2,4,0,4\n'
    opened(page, tmp_path, write_run(tmp_path / "run", jobs, name="<i>run</i>", partition=partition))
    page.hover("#curves .chart", 0.9)
    page.hover(".partition")
    assert page.js("document.title") == "<i>run</i>: holdfast report"
    assert page.js("document.querySelectorAll('img, b, h1 i').length") == 0
    assert page.js("document.querySelector('.entry span').textContent") == evil
    page.js("document.body.insertAdjacentHTML('beforeend', '<p id=probe onclick=\"document.title=1\">')")
    page.click("#probe")  # the policy would stop what the escaping let through
    assert page.js("document.title") == "<i>run</i>: holdfast report"
    assert all("Content Security Policy" in text for text in page.complaints)
    page.complaints.clear()


def test_nodes_can_be_read_and_coloured(good: Browser) -> None:
    assert good.js("document.querySelectorAll('.network .nodes circle').length") == 3
    good.js("document.querySelector('.network').focus()")
    good.press("ArrowRight")
    assert " ".join(tip(good).split()) == "node 0 samples: 7"
    good.js("document.querySelector('.partition').focus()")
    good.press("End")
    assert " ".join(tip(good).split()) == "node 2: 4 samples dog: 4"


def test_nodes_go_by_their_names(page: Browser, tmp_path: Path) -> None:
    partition = (
        "node,name,samples,cat,dog\n0,Northern Bank of Commerce,7,3,4\n1,Harbour,5,5,0\n2,<b>Lake,4,0,4\n"
    )
    opened(page, tmp_path, two_algorithms(tmp_path / "run", partition=partition))
    names = "[...document.querySelectorAll('.network > text')].map((text) => text.textContent)"
    assert page.js(names) == ["Northern Bank…", "Harbour", "<b>Lake"]
    rows = "[...document.querySelectorAll('.partition > text')].map((text) => text.textContent)"
    assert "Northern Bank of Commerce" in page.js(rows)
    page.js("document.querySelector('.partition').focus()")
    page.press("Home")
    assert "Northern Bank of Commerce: 7 samples" in tip(page)


def test_a_thousand_nodes_and_thousands_of_rounds(page: Browser, tmp_path: Path) -> None:
    rows = [{"round": r, "test_accuracy": r / 9000, "train_loss": 1.0, "consensus": 0.1} for r in range(6000)]
    partition = "node,samples,cat,dog,emu,fox\n" + "".join(f"{i},4,1,1,1,1\n" for i in range(1000))
    network = "i,j,weight\n" + "".join(f"{i},{i + 1},0.5\n" for i in range(999))
    run = write_run(tmp_path / "run", [job("a", 0, rows)], partition=partition, network=network)
    opened(page, tmp_path, run)
    assert page.js("document.querySelectorAll('.network .nodes rect').length") == 1000
    assert page.js("document.querySelectorAll('.partition image').length") == 1
    assert page.js("document.querySelector('#curves .line').getAttribute('d').length") < 60_000
    page.hover("#curves .chart", 0.99)
    assert "66.7 %" in tip(page)
    assert page.overflow == 0


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [1280, 360])
def test_light_dark_and_narrow(page: Browser, tmp_path: Path, width: int, dark: bool) -> None:
    opened(page, tmp_path, troubled_sweep(tmp_path / "run"), width=width, dark=dark)
    assert page.overflow == 0
    ground = "getComputedStyle(document.body).backgroundColor"
    light, night = "rgb(255, 255, 255)", "rgb(20, 24, 29)"
    assert page.js(ground) == (night if dark else light)
    assert page.js("document.querySelector('.theme').textContent") == ("Light" if dark else "Dark")
    page.click(".theme")
    assert page.js(ground) == (light if dark else night)


def test_without_a_script_the_report_has_pictures(page: Browser, tmp_path: Path) -> None:
    target = tmp_path / "report.html"
    target.write_text(report_html([load_record(two_algorithms(tmp_path / "good"))]), encoding="utf-8")
    page.call("Emulation.setScriptExecutionDisabled", value=True)
    try:
        page.open("about:blank#")
        page.call("Page.navigate", url=target.as_uri())
        page.wait("document.querySelectorAll('.static svg').length === 6")  # four curves, network, partition
        assert page.js("document.querySelectorAll('.results tr').length") == 3
        assert page.js("document.querySelector('.static svg').getBoundingClientRect().height") > 100
    finally:
        page.call("Emulation.setScriptExecutionDisabled", value=False)


def test_the_default_experiment_prints_on_two_pages(page: Browser, tmp_path: Path) -> None:
    """With few rounds, which does not change what stands on the pages."""
    assert holdfast("run", "rounds=4", "--quiet", "--runs-dir", tmp_path, "--name", "run").code == 0
    page.open((tmp_path / "run" / "report.html").as_uri(), dark=True)
    page.wait("document.querySelector('#curves .chart .line') !== null")
    page.pdf(tmp_path / "report.pdf")
    assert len(re.findall(rb"/Type\s*/Page\b", (tmp_path / "report.pdf").read_bytes())) == 2
    assert page.js("document.querySelector('#curves .chart').viewBox.baseVal.width") > 400  # as before


def test_a_small_real_run(page: Browser, tmp_path: Path) -> None:
    (tmp_path / "small.toml").write_text(SMALL)
    arguments = ('metrics=["default","node_accuracy"]', "--quiet", "--runs-dir", tmp_path, "--name", "run")
    assert holdfast("run", tmp_path / "small.toml", *arguments).code == 0
    page.open((tmp_path / "run" / "report.html").as_uri())
    page.wait("document.querySelector('.colouring option') !== null")
    options = page.js("[...document.querySelectorAll('.network ~ .colouring option')].map((o) => o.value)")
    assert options == ["samples", "accuracy with local-gecl", "accuracy with gossip"]
