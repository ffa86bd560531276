"""The page of a run: well formed, self-contained, escaped, written at once or not at all."""

import re
import subprocess
import sys
from html import escape
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from proxymetric.metrics import Ranking, per_query, rank
from proxymetric.plots import (
    Certainty,
    ClassSamples,
    ConfusedPair,
    GalleryHit,
    GalleryRow,
    Scatter,
    pick_queries,
    tsne,
    write_report,
)
from proxymetric.plots.curve import curve_svg
from proxymetric.plots.gallery import data_uri
from proxymetric.plots.report import is_page
from proxymetric.plots.scatter import _separate_labels, scatter_svg
from training_runs import run as tiny_run

VOID = {"meta", "link", "img", "br", "hr", "input"}
LOADS = {"src", "href", "xlink:href", "srcset", "poster", "data", "action", "background"}
NASTY = '<b>Kea & "Co"</b>'


class Page(HTMLParser):
    """Checks that tags nest, and gathers what a browser would load and the text."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.loaded: list[str] = []
        self.ids: list[str] = []
        self.tags: list[str] = []
        self.text = ""
        self.feed(text)
        self.close()
        assert self.open == [], self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._attributes(tag, attrs)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._attributes(tag, attrs)

    def handle_endtag(self, tag: str) -> None:
        assert self.open, tag
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data

    def _attributes(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        for name, value in attrs:
            if name in LOADS:
                self.loaded.append(value or "")
            if name == "id":
                self.ids.append(value or "")


def picture(shade: int, size: tuple[int, int] = (300, 200)) -> Image.Image:
    return Image.new("RGB", size, (shade, 255 - shade, 40))


def content() -> dict:
    hits = [GalleryHit(picture(30 * n), NASTY if n else "owl", 0.987 - 0.1 * n, n == 0) for n in range(8)]
    return {
        "title": f"Run {NASTY}",
        "facts": {NASTY: NASTY, "seed": "0"},
        "table": [
            {"name": "raw pixels", "R@1": 0.2564, "MAP@R": 0.1011, "nDCG@8": 0.3333},
            {"name": NASTY, "R@1": 0.8126, "MAP@R": 0.6049, "note": NASTY},
        ],
        "curve": [{"epoch": e, "loss": 3.0 / e, "MAP@R": 0.1 * e, "chosen": e == 4} for e in range(1, 6)],
        "gallery": [GalleryRow(picture(9), NASTY, hits), GalleryRow(picture(200), "owl", hits[:3])],
        "scatter": Scatter(
            np.random.default_rng(0).normal(size=(40, 2)), np.arange(40) % 2, [NASTY, "$owl_$"], "40 images"
        ),
        "notes": [NASTY],
    }


@pytest.fixture
def page(tmp_path: Path) -> str:
    return write_report(tmp_path / "new" / "report.html", **content()).read_text(encoding="utf-8")


def test_the_page_is_well_formed(page: str) -> None:
    read = Page(page)
    assert page.startswith("<!DOCTYPE html>")
    assert len(read.ids) == len(set(read.ids))
    assert read.tags.count("section") == 5
    assert read.tags.count("img") == 2 + 8 + 3


def test_nothing_is_loaded_from_elsewhere(page: str) -> None:
    read = Page(page)
    assert all(address.startswith(("data:", "#")) for address in read.loaded), read.loaded
    assert "script" not in read.tags
    assert "@import" not in page
    assert re.findall(r"url\((?!#)", page) == []
    names = re.findall(r'xmlns(?::\w+)?="https?://', page)  # names of SVG, not addresses
    assert len(re.findall("https?://", page)) == len(names)
    assert re.findall(r"url\(#([^)]+)\)", page) != []
    assert set(re.findall(r'url\(#([^)]+)\)|href="#([^"]+)"', page)) <= {(i, "") for i in read.ids} | {
        ("", i) for i in read.ids
    }


def test_names_are_escaped(page: str) -> None:
    assert "<b>" not in page
    # Title twice, a fact's name and value, a row and a cell, the query, seven and two results, a map label with its
    # title, a note.
    assert Page(page).text.count(NASTY) == 2 + 2 + 2 + 1 + 7 + 2 + 2 + 1


def test_the_numbers_given_are_there(page: str) -> None:
    text = Page(page).text
    for number in ("25.6", "10.1", "33.3", "81.3", "60.5", "0.99", "0.29", "1 of 8 right", "1 of 3 right"):
        assert number in text, number
    assert "Epoch 4 was chosen on held-out classes: MAP@R 40.0 %." in text
    assert "sorted by average precision" in text


def test_the_best_row_and_values_are_marked(page: str) -> None:
    rows = re.findall(r"<tr.*?</tr>", page)
    assert [("best" in row) for row in rows] == [False, False, True]
    assert re.findall(r"<strong>([\d.]+)</strong>", page) == ["33.3", "81.3", "60.5"]


def test_right_and_wrong_differ_in_more_than_colour(page: str) -> None:
    hits = re.findall(r'<li class="(right|wrong)">(.*?)</li>', page)
    assert [verdict for verdict, _ in hits] == ["right", *["wrong"] * 7, "right", "wrong", "wrong"]
    for verdict, hit in hits:
        assert ("✓" in hit, "✗" in hit) == (verdict == "right", verdict == "wrong")
        assert f", {verdict}, class" in hit


def test_empty_parts_are_left_out(tmp_path: Path) -> None:
    path = write_report(
        tmp_path / "r.html", title="t", facts={}, table=[], curve=[], gallery=[], scatter=None, notes=[]
    )
    assert Page(path.read_text()).tags.count("section") == 0


def test_classes_at_both_ends_of_certainty(tmp_path: Path) -> None:
    sure = [ClassSamples(NASTY, 1.2345, [picture(shade) for shade in (1, 2, 3, 4)])]
    unsure = [ClassSamples("owl", 20.5, [picture(5)]), ClassSamples("gone", 22.6, [])]
    path = write_report(tmp_path / "r.html", **content(), certainty=Certainty(sure, unsure, "A note & more."))
    text = path.read_text(encoding="utf-8")
    read = Page(text)
    assert read.tags.count("section") == 6
    assert read.tags.count("img") == 13 + 5
    assert "<b>" not in text
    part = read.text[read.text.index("Certainty about classes") :]
    assert part.index("most certain") < part.index(NASTY) < part.index("uncertainty 1.23")
    assert part.index("uncertainty 1.23") < part.index("least certain") < part.index("owl") < part.index("20.5")
    assert "A note & more." in part


def test_the_same_input_gives_the_same_page(tmp_path: Path, page: str) -> None:
    assert write_report(tmp_path / "again.html", **content()).read_text(encoding="utf-8") == page


def test_a_failing_write_leaves_the_old_page(tmp_path: Path) -> None:
    """The failure is real: the process may not write files of more than 20 kB."""
    path = tmp_path / "report.html"
    path.write_text("old")
    program = """
import resource, signal, sys
from proxymetric.plots import write_report
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
empty = dict(facts={}, table=[], curve=[], gallery=[], scatter=None)
try:
    write_report(sys.argv[1], title="t", notes=["x" * 100_000], **empty)
except OSError as error:
    print("refused")
"""
    done = subprocess.run([sys.executable, "-c", program, str(path)], capture_output=True, text=True, check=True)
    assert done.stdout == "refused\n"
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_failing_picture_leaves_the_old_page(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    path.write_text("old")
    broken = content() | {"gallery": [GalleryRow(None, "owl", [])]}  # type: ignore[arg-type]
    with pytest.raises(AttributeError):
        write_report(path, **broken)
    assert path.read_text() == "old"


@pytest.mark.parametrize("mode", ["RGB", "L", "P", "RGBA", "I;16", "CMYK"])
def test_thumbnails_are_small_and_of_any_mode(mode: str) -> None:
    import base64
    import io

    uri = data_uri(Image.new(mode, (640, 320)))
    shown = Image.open(io.BytesIO(base64.b64decode(uri.split(",")[1])))
    assert shown.size == (96, 48)
    assert Image.open(io.BytesIO(base64.b64decode(data_uri(Image.new(mode, (5, 7))).split(",")[1]))).size == (5, 7)


def test_a_curve_with_gaps() -> None:
    records = [
        {"epoch": 0, "MAP@R": 0.1},
        {"epoch": 1, "loss": float("nan"), "MAP@R": None},
        {"epoch": 2, "loss": 2.0, "MAP@R": 0.3, "R@1": 0.5, "chosen": True},
    ]
    loss, metrics = curve_svg(records)
    assert "training loss" in loss
    assert "R@1" in metrics
    assert "#0" not in loss + metrics  # the page defines all colours
    assert curve_svg([]) == []
    assert len(curve_svg([{"epoch": 1, "loss": 1.0}])) == 1


def ticks(curve: list[dict]) -> list[str]:
    """The labels on the axis of the epochs."""
    (picture,) = curve_svg(curve)
    axis = picture[
        picture.index('"training-loss-matplotlib.axis_1"') : picture.index('"training-loss-matplotlib.axis_2"')
    ]
    return re.findall(r">([\d.]+)</text>", axis)


def test_a_curve_over_fractions_of_epochs() -> None:
    short = [{"epoch": step / 40, "step": step, "loss": 1.0, "figures": {"radius": 0.5}} for step in range(5, 26, 5)]
    assert {"0.2", "0.4", "0.6"} <= set(ticks(short)), "whole numbers alone would leave the axis bare"
    long = [{"epoch": step / 40, "loss": 1.0} for step in range(0, 401, 25)]
    assert ticks(long) == ["0", "2", "4", "6", "8", "10"]
    assert ticks([{"epoch": epoch, "loss": 1.0} for epoch in range(3)]) == ["0", "1", "2"]


def test_a_chosen_fraction_is_said_shortly(tmp_path: Path) -> None:
    curve = [{"epoch": 7 / 3, "loss": 1.0, "MAP@R": 0.5, "chosen": True}, {"epoch": 3, "loss": 0.9, "MAP@R": 0.4}]
    path = write_report(tmp_path / "r.html", **content() | {"curve": curve})
    assert "Epoch 2.33 was chosen on held-out classes: MAP@R 50.0 %." in Page(path.read_text()).text


def test_scores_among_fewer_classes_are_drawn_with_one_legend(tmp_path: Path) -> None:
    def records(*means: float) -> list[dict]:
        values = [(2**power, mean) for power, mean in enumerate(means, 1)]
        return [{"classes": n, "R@1": [mean, mean - 0.05, mean], "MAP@R": [mean / 2] * 3} for n, mean in values]

    rows = {"raw pixels": records(0.6, 0.4, 0.2), "untrained": records(0.9, 0.8, 0.7), NASTY: records(1.0, 0.9, 0.85)}
    page = Page(text := write_report(tmp_path / "r.html", **content() | {"fewer_classes": rows}).read_text())
    part = text[text.index("More classes, lower scores") : text.index("What it finds")]
    assert [part.count(f"</svg> {name}<") for name in ("raw pixels", "untrained", escape(NASTY))] == [1, 1, 1]
    assert part.count("<polyline") == 2 * 3
    assert part.count("<polygon") == 2, "only the last row has a band"
    assert {"7 4", "2 4"} < set(re.findall('stroke-dasharray="([^"]*)"', part)), "not by colour alone"
    for words in (f"{NASTY}, 8 classes: R@1 85.0 % (80.0 to 85.0)", "raw pixels, 4 classes: MAP@R 20.0 %"):
        assert words in page.text
    without = write_report(tmp_path / "r.html", **content() | {"fewer_classes": {"one number": records(0.5)}})
    assert "More classes" not in without.read_text()


def test_imports_are_light_and_drawing_leaves_pyplot_and_settings_alone() -> None:
    program = """
import sys
import proxymetric.metrics
assert "PIL" not in sys.modules
import proxymetric.plots
assert "matplotlib" not in sys.modules and "sklearn" not in sys.modules
import matplotlib
before = {k: matplotlib.rcParams[k] for k in matplotlib.rcParams if k != 'backend'}  # reading that starts pyplot
from proxymetric.plots.curve import curve_svg
curve_svg([{"epoch": 1, "loss": 1.0}])
assert {k: matplotlib.rcParams[k] for k in before} == before
assert "matplotlib.pyplot" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_picked_queries_run_from_good_to_bad() -> None:
    hits = torch.zeros(100, 10, dtype=torch.bool)
    hits[torch.arange(100), torch.arange(100) // 10] = True  # each query has one hit, at a rank from 0 to 9
    places = torch.zeros(100, 10, dtype=torch.long)
    ranking = Ranking(hits, torch.full((100,), 10), places, torch.arange(100), 0)
    rows = pick_queries(ranking, 10, seed=3)
    quality = per_query(ranking, "MAP@R")["MAP@R"][rows]
    assert (quality[:-1] > quality[1:]).all()
    assert [row // 10 for row in rows] == list(range(10))
    assert rows == pick_queries(ranking, 10, seed=3)
    assert rows != pick_queries(ranking, 10, seed=4)
    assert sorted(pick_queries(ranking, 1000)) == list(range(100))
    with pytest.raises(ValueError, match="count: got 0"):
        pick_queries(ranking, 0)


def test_queries_can_be_picked_from_a_short_ranking() -> None:
    short = rank(torch.eye(6), [0] * 6, k=2)
    assert len(pick_queries(short, 3)) == 3
    assert pick_queries(rank(torch.eye(3), [0, 1, 2]), 3) == []


def test_tsne_is_deterministic_and_keeps_classes_together() -> None:
    draw = np.random.default_rng(0)
    labels = np.repeat(np.arange(6), 20)
    embeddings = draw.normal(size=(6, 16))[labels] * 4 + 0.5 * draw.normal(size=(120, 16))
    first = tsne(embeddings, labels, list("abcdef"), limit=80, classes=4, seed=1)
    again = tsne(torch.as_tensor(embeddings), torch.as_tensor(labels), list("abcdef"), limit=80, classes=4, seed=1)
    assert np.array_equal(first.points, again.points)
    assert first.caption == "80 images of 4 of 6 classes"
    assert len(first.names) == 4
    assert np.bincount(first.labels).tolist() == [20] * 4
    nearest = rank(first.points, first.labels, 1, distance="euclidean")
    assert nearest.hits.float().mean() > 0.95
    other = tsne(embeddings, labels, list("abcdef"), limit=50, classes=4, seed=2)
    assert len(other.points) == 50
    assert other.names != first.names


@pytest.mark.parametrize("rows", [1, 2, 5])
@pytest.mark.parametrize("dim", [1, 2, 7])
def test_a_map_of_very_few_points(rows: int, dim: int) -> None:
    few = tsne(np.ones((rows, dim)), [0] * rows, ["only"])
    assert few.points.shape == (rows, 2)
    assert np.isfinite(few.points).all()
    assert "only" in Page(scatter_svg(few)).text


def test_mistakes_about_the_map_are_named() -> None:
    with pytest.raises(ValueError, match=r"embeddings: got shape \(3, 2\) for 2 labels"):
        tsne(np.ones((3, 2)), [0, 0], ["a"])
    with pytest.raises(ValueError, match="limit: got 0"):
        tsne(np.ones((2, 2)), [0, 0], ["a"], limit=0)


def test_labels_of_the_map_do_not_cover_each_other() -> None:
    centres = np.tile([450.0, 320.0], (12, 1))
    placed = _separate_labels(centres, np.full(12, 80.0))
    assert np.diff(np.sort(placed[:, 1])).min() >= 17.9
    edge = _separate_labels(np.array([[0.0, 0.0], [900.0, 640.0]]), np.array([100.0, 100.0]))
    assert edge[:, 0].tolist() == [50.0, 850.0]


def row_of(page: str, name: str) -> str:
    (row,) = [row for row in re.findall(r"<tr.*?</tr>", page) if f'scope="row">{name}' in row]
    return row


def test_a_row_that_fell_somewhere_is_not_best(tmp_path: Path) -> None:
    table = [{"name": "untrained", "R@1": 0.8, "MAP@R": 0.3}, {"name": "trained", "R@1": 0.7, "MAP@R": 0.4}]
    page = write_report(tmp_path / "r.html", **{**content(), "table": table}).read_text()
    assert "badge" not in "".join(re.findall(r"<tr.*?</tr>", page))
    table[1]["R@1"] = 0.9
    page = write_report(tmp_path / "r.html", **{**content(), "table": table}).read_text()
    assert "best" in row_of(page, "trained")


def test_intervals_and_remarks_are_in_the_results(tmp_path: Path) -> None:
    table = [{"name": "trained", "R@1": 0.7, "intervals": {"R@1": (0.612, 0.788)}}]
    more = {"table": table, "remarks": [f"worse {NASTY}"], "results_note": "on these classes", "map_heading": "Map it"}
    page = write_report(tmp_path / "r.html", **{**content(), **more}).read_text()
    assert "61.2 – 78.8" in row_of(page, "trained")
    assert "95 % interval over classes" in page
    text = Page(page).text
    for part in (f"worse {NASTY}", "on these classes", "Map it"):
        assert part in text
    assert "never seen in training" not in text


def test_a_page_is_recognised(tmp_path: Path, page: str) -> None:
    ours = write_report(tmp_path / "r.html", **content())
    assert is_page(ours)
    (tmp_path / "other.html").write_text("<!DOCTYPE html>\n<html><body>mine</body></html>")
    assert not is_page(tmp_path / "other.html")


def test_pictures_have_the_names_of_their_files(tmp_path: Path) -> None:
    hit = GalleryHit(picture(3), "owl", 0.5, True, file=f"owl/{NASTY}.png")
    more = {
        "gallery": [GalleryRow(picture(9), "owl", [hit], file="owl/query.png")],
        "confused": [ConfusedPair("owl", "kea", 0.2, picture(1), picture(2), 0.1, "owl/a.png", "kea/b.png")],
        "certainty": Certainty([ClassSamples("owl", 1.0, [picture(4)], ["owl/c.png"])], []),
    }
    page = write_report(tmp_path / "r.html", **{**content(), **more}).read_text()
    for name in ("owl/query.png", "owl/a.png", "kea/b.png", "owl/c.png", "owl/&lt;b&gt;Kea"):
        assert f'title="{name}' in page
    assert "20.0 % of its results, 10.0 % the other way round" in page


def test_long_names_are_readable(tmp_path: Path) -> None:
    name = "God-Morgon-Orange-Red-Grapefruit-1L"
    more = {"gallery": [GalleryRow(picture(9), name, [])]}
    page = write_report(tmp_path / "r.html", **{**content(), **more}).read_text()
    assert "text-overflow: ellipsis" not in page
    assert f">{name}</span>" in page
    points = Scatter(np.random.default_rng(0).normal(size=(40, 2)), np.arange(40) % 2, [name, f"{name}-2"], "")
    texts = re.findall(r"</tspan> ([^<]*)</text>", scatter_svg(points))
    assert len(set(texts)) == 2, "names that differ at their end stay different"


@pytest.mark.parametrize("share", [0.2, 0.5])
def test_the_report_of_a_run_says_what_chose_the_epoch(photos: Path, tmp_path: Path, share: float) -> None:
    run = tiny_run(photos, tmp_path / "run", data__validation=0.3, **({"data__test": 0.5} if share == 0.5 else {}))
    text = Page((run.folder / "report.html").read_text(encoding="utf-8")).text
    chose = "not trained on, but they chose the epoch"
    assert text.count(chose) == (2 if share == 0.2 else 0), "in the head and in the results"
    assert ("never seen in training" in text) == (share == 0.5)
    assert "without the new head" in text
    part = "test" if share == 0.5 else "held-out"
    classes = run.result.data[run.result.evaluated_on]["classes"]
    assert f"of 100 images of the {classes} {part} classes ({8 * classes} images)" in text
    for name, records in run.result.fewer_classes.items():
        assert records[-1]["classes"] == classes
        for metric in ("R@1", "MAP@R"):
            assert records[-1][metric] == pytest.approx([run.result.rows[name][metric]] * 3, abs=1e-5)
    assert list(run.result.fewer_classes) == ["raw pixels", "untrained encoder", "trained encoder"]
    assert re.search(r"\ds on a CPU \(\w+, \d+ cores\)", text)
    assert "images per class8" in text


def test_mirrored_pairs_are_one(photos: Path, tmp_path: Path) -> None:
    run = tiny_run(photos, tmp_path / "run", data__validation=0.5, train__epochs=1)
    page = (run.folder / "report.html").read_text(encoding="utf-8")
    names = re.findall(
        r'<span class="name" title="([^"]*)">[^<]*</span><span class="name" title="([^"]*)">confused', page
    )
    assert len(names) > 1
    assert len({frozenset(pair) for pair in names}) == len(names)
    assert "the other way round" in page
