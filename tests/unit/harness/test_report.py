"""Figures of a run, the tables on the terminal, and the one-file report."""

import io
import math
import re
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser

import pytest
from rich.console import Console

from harness import SetupError
from harness.cli import kernel_report, report
from harness.page import summary
from tests.support.run_records import make_record, with_kernels


def test_percentile() -> None:
    values = [4.0, 1.0, 3.0, 2.0]
    assert [summary.percentile(values, q) for q in (0, 0.5, 0.9, 1)] == [1, 2.5, pytest.approx(3.7), 4]
    assert summary.percentile([7], 0.99) == 7
    assert math.isnan(summary.percentile([], 0.5))


def test_summary_leaves_the_prefill_out() -> None:
    row = summary.summarise(make_record([1000, 10, 20, 30]))
    assert (row.n, row.ttft_ms, row.median_ms, row.max_ms) == (3, 1000, 20, 30)
    assert row.tokens_per_s == pytest.approx(50)
    assert row.buffers_created == pytest.approx(2 / 3)
    assert row.label == "static, adaptive"


@pytest.mark.parametrize("times", [[], [5]])
def test_summary_of_a_run_without_a_decode_step(times: list[float]) -> None:
    row = summary.summarise(make_record(times))
    assert row.n == 0
    assert math.isnan(row.median_ms)
    assert math.isnan(row.tokens_per_s)


def test_boundaries() -> None:
    found = summary.boundaries(make_record([1] * 7, classes=3))
    assert [(token["index"], before, after) for token, before, after in found] == [
        (3, 65536, 131072),
        (6, 131072, 262144),
    ]
    assert summary.boundaries(make_record([1] * 7)) == []


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (65536, "64 KiB"), (98_351_360, "93.8 MiB"), (3 << 30, "3 GiB")]
)
def test_size(count: int, text: str) -> None:
    assert summary.size(count) == text


def shown(*renderables: object) -> str:
    out = io.StringIO()
    console = Console(file=out, width=80)
    for renderable in renderables:
        console.print(renderable)
    return out.getvalue()


def test_tables_fit_a_terminal() -> None:
    record = make_record([1234.5] + [10.25] * 40, classes=20)
    text = shown(summary.token_table(record), summary.summary_table([record]))
    assert "…" in text.replace(" …\n", "…")
    rows = [line.split() for line in text.splitlines()]
    assert ["0", "3", "1,234", "123", "617", "7", "0", "0", "0", "0", "2.0", "3.0"] in rows
    assert any(row[:2] == ["20", "23"] for row in rows)
    assert any(row[:2] == ["40", "43"] for row in rows)
    assert not any(row[:2] == ["21", "24"] for row in rows)
    assert all(len(line) <= 80 for line in text.splitlines())
    assert len(re.findall("…", text)) == 2


def test_tables_of_nothing() -> None:
    assert "static, adaptive" in shown(summary.token_table(make_record([])), summary.summary_table([make_record([])]))


def test_the_table_of_kernels_fits_a_terminal() -> None:
    record = with_kernels(make_record([100, 10, 10]))
    text = shown(kernel_report.table(record))
    assert all(len(line) <= 80 for line in text.splitlines())
    rows = [line.split() for line in text.splitlines()]
    assert ["gate_up", "matvec", "3072x16384", "u4", "32", "24.0", "16.0", "512", "31.5", "1,966", "46.5%"] in rows
    assert ["<argmax>", "argmax", "-", "35", "8.0", "0.0", "0", "-", "-", "0.0%"] in rows
    products, whole, method = kernel_report.lines(record)
    assert "2,400.0 MB per token in 1,000 µs net (2,032 µs with their 129 passes), 2,400 GB/s" in products
    assert products.endswith("58% of the 4,150 GB/s of a plain read of 1,024 MiB")
    assert "all 165 launches: 1,100 µs net" in whole and "an empty pass takes 8.0 µs" in whole
    assert "24 steps at position 44, measured after the run" in method


def test_what_the_table_of_kernels_cannot_tell() -> None:
    record = with_kernels(
        make_record([100, 10, 10]), coarse_clock=True, clock_us=65.536, plain_read_gb_s=None, plain_read_bytes=None
    )
    products, *_, warning = kernel_report.lines(record)
    assert "no plain read to compare with" in products
    assert "steps of 65.5 µs" in warning and "--enable-webgpu-developer-features" in warning
    record["kernels"]["clock_us"] = None
    assert "did not move at all" in list(kernel_report.lines(record))[-1]


def test_the_table_of_kernels_for_a_document() -> None:
    text = kernel_report.markdown(with_kernels(make_record([100, 10, 10])))
    assert text.startswith("tiny on google swiftshader, static KV. ")
    table = [line.split(" | ") for line in text.splitlines() if line.startswith("|")]
    assert len(table) == 2 + 6
    assert {len(row) for row in table} == {len(kernel_report.HEADER)}
    assert "- products with weights: 2,400.0 MB per token" in text


class Tags(HTMLParser):
    """Collects tags, attributes and text, and checks that elements are closed in order."""

    VOID = frozenset({"meta", "line"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.tags: list[str] = []
        self.words = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words += data


def parse(html: str) -> Tags:
    tags = Tags()
    tags.feed(html)
    assert tags.open == []
    return tags


RUNS = [
    make_record([100.0] + [10.0] * 9),
    make_record([100.0] + [20.0] * 9, kv="grow", classes=5),
    make_record([100.0] + [30.0] * 9, kv="grow", policy="bucket"),
]


def test_the_report_is_one_file_with_everything_in_it() -> None:
    tags = parse(report.render(RUNS))
    assert not [value for name, value in tags.attributes if name in ("src", "href")]
    assert not {"script", "link", "img", "iframe"} & set(tags.tags)
    for words in (
        "Software adapter",
        "All 3 runs gave the same 10 tokens",
        "grow, bucket",
        "64 KiB → 128 KiB",
        "<script>alert",
    ):
        assert words in tags.words
    assert "url(" not in report.render(RUNS)


def test_the_report_has_the_table_of_kernels() -> None:
    tags = parse(report.render([RUNS[0], with_kernels(make_record([100.0] + [10.0] * 9, kv="grow"))]))
    for words in ("GPU time per kernel of one decode step", "3072x16384 u4", "<argmax>", "58% of the 4,150 GB/s"):
        assert tags.words.count(words) == 1
    assert "GPU time per kernel" not in parse(report.render(RUNS[:1])).words


def test_what_the_model_wrote_is_text() -> None:
    html = report.render(RUNS[:1])
    assert "<script" not in html
    assert "&lt;b&gt;Hi&lt;/b&gt; &amp; bye" in html


def test_a_hardware_report_has_no_software_label() -> None:
    record = make_record([100, 10, 10])
    record["environment"]["adapter"].update(
        vendor="nvidia", architecture="hopper", is_software=False, is_fallback=False
    )
    assert "Software adapter" not in report.render([record])
    with pytest.raises(SetupError, match="never share a chart"):
        report.render([record, RUNS[0]])


def test_the_number_of_runs_is_bounded() -> None:
    for records in ([], RUNS * 3):
        with pytest.raises(SetupError, match="1 to 6 runs"):
            report.render(records)


def test_different_tokens_are_a_defect() -> None:
    other = make_record([100.0] + [10.0] * 9, policy="bucket")
    other["token_ids"][4] = other["tokens"][4]["id"] = 9
    check = report.same_tokens([RUNS[0], other])
    assert not check.holds
    assert "token 4 differs" in check.text
    assert "token 4 differs" in parse(report.render([RUNS[0], other])).words


def test_the_chart_is_drawn_inside_its_frame() -> None:
    outlier = make_record([100.0] + [10.0] * 60 + [5000.0])
    chart = report.chart([outlier])
    points = [tuple(map(float, pair.split(","))) for pair in chart["lines"][0]["points"].split()]
    assert len(points) == 61
    assert all(chart["left"] <= x <= chart["right"] and chart["top"] <= y <= chart["bottom"] for x, y in points)
    assert points[-1][1] == chart["top"]
    assert [x for x, _ in points] == sorted(x for x, _ in points)
    assert chart["y_ticks"][0] == {"at": chart["bottom"], "text": "0"}


def test_a_chart_of_one_step() -> None:
    svg = re.search(r"<svg.*?</svg>", report.render([make_record([5, 5])]), re.DOTALL)
    assert svg
    assert ElementTree.fromstring(svg.group()).find("polyline") is not None


@pytest.mark.parametrize(
    ("low", "high", "count", "expected"),
    [
        (0, 10, 5, [0, 2, 4, 6, 8, 10]),
        (0, 0.3, 3, [0, 0.1, 0.2, 0.3]),
        (38, 101, 8, [40, 50, 60, 70, 80, 90, 100]),
        (5, 5, 4, [5]),
    ],
)
def test_ticks(low: float, high: float, count: int, expected: list[float]) -> None:
    assert report.ticks(low, high, count) == pytest.approx(expected)


def test_the_launch_line_says_what_was_replayed_and_why_not() -> None:
    record = make_record([30, 10, 10, 10])
    for token, refused in zip(record["tokens"], ("prefill", "recorded", None, None), strict=True):
        token |= {"refused": refused, "replayed": int(refused is None)}
    assert summary.launch_line(record) == (
        "parameters: immediates; kernels: quad, subgroups of 4; 2 of 3 decode steps replayed, recorded: 1; 50% of "
        "bindings seen before"
    )
    record["launch"]["identity_rate"] = None
    for token in record["tokens"]:
        token["gpu_ms"] = 2.5
    assert summary.launch_line(record).endswith("replayed, recorded: 1; GPU 2.50 ms per token (median)")
    record["launch"]["kernels"] = {"kernels": "split", "fused": True, "subgroups": 32, "dot4": True, "f16": True}
    assert "; kernels: split, fused, subgroups of 32, dot4, f16; 2 of 3" in summary.launch_line(record)
    record["launch"]["kernels"] = None
    assert summary.launch_line(record).startswith("parameters: immediates; 2 of 3")
