"""The report of a run: one self-contained HTML page."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from proxymetric.metrics.names import lower_is_better
from proxymetric.plots.certainty import Certainty, certainty_html
from proxymetric.plots.confusion import ConfusedPair, confusion_html
from proxymetric.plots.curve import curve_svg, metric_columns
from proxymetric.plots.error_rates import error_rates_svg, thresholds_html
from proxymetric.plots.escaping import escaped
from proxymetric.plots.fewer_classes import fewer_classes_html
from proxymetric.plots.gallery import GalleryRow, gallery_html
from proxymetric.plots.scatter import Scatter, scatter_svg
from proxymetric.plots.small_vectors import small_vectors_svg
from proxymetric.plots.style import CSS
from proxymetric.system.files import replacing

PICKED_NOTE = (
    "The queries were sorted by average precision and cut into equal parts; one was drawn from each. "
    "So the rows run from the best to the worst, and failures appear as often as they happen."
)
UNSEEN_NOTE = "Retrieval on classes never seen in training, in per cent."
SIZES_NOTE = (
    "The vectors of the trained encoder, cut to their first dimensions and stored as 32-bit numbers, as 8-bit numbers "
    "or as signs (bits, without re-ranking), in per cent."
)
FEWER_NOTE = (
    "The same images, searched among some of these classes only. A line is the mean over all choices of so many "
    "classes; for the solid line, 9 of 10 choices lie in the band (all classes are one choice). Among few classes a "
    "search is easy: compare scores at the same number of classes, and expect lower ones with more."
)
PAGE_MARK = '<meta name="generator" content="proxymetric">'
"""what every page holds near its beginning, so that a page is recognised before it is replaced"""


def is_page(file: Path) -> bool:
    """Whether a file is a page that `write_report` wrote."""
    with file.open("rb") as page:
        return PAGE_MARK.encode() in page.read(1000)


def write_report(
    path: str | Path,
    *,
    title: str,
    facts: dict[str, str],
    table: list[dict[str, Any]],
    curve: list[dict[str, Any]],
    gallery: list[GalleryRow],
    scatter: Scatter | None,
    notes: list[str],
    gallery_note: str = PICKED_NOTE,
    confused: Sequence[ConfusedPair] = (),
    hardest: Sequence[GalleryRow] = (),
    certainty: Certainty | None = None,
    results_note: str = UNSEEN_NOTE,
    remarks: Sequence[str] = (),
    map_heading: str = "Map of the unseen classes",
    sizes: Sequence[Mapping[str, Any]] = (),
    thresholds: dict[str, Any] | None = None,
    fewer_classes: Mapping[str, Sequence[Mapping[str, Any]]] = MappingProxyType({}),
    curve_classes: str = "held-out classes",
) -> Path:
    """Write the page. It replaces an existing file only when it is complete.

    Sections without content are left out: those of an empty list, and of a scatter or certainty that is None.

    Args:
        path: path of the HTML file; its folder is created.
        title: heading of the page.
        facts: facts about the run, name to value.
        table: rows such as ``{"name": "trained encoder", "R@1": 0.91, "MAP@R": 0.62}``. Floats are fractions, shown in
            per cent with one decimal. ``"intervals": {"R@1": (0.87, 0.94)}`` adds intervals below the numbers. A row
            that is best in every metric it has is marked.
        curve: records such as ``{"epoch": 3, "loss": 1.2, "MAP@R": 0.41, "chosen": True}``.
        gallery: queries with their results; see `pick_queries` and `gallery_rows`.
        scatter: a map of the embeddings; see `tsne`.
        notes: sentences at the end of the page.
        gallery_note: how the queries were chosen; by default as in `pick_queries`.
        confused: pairs of confused classes, most frequent first.
        hardest: the queries with the worst results, in the form of `gallery`.
        certainty: the training classes about which the method is most and least certain.
        results_note: what the classes in the table are.
        remarks: sentences above the table that say what it means.
        map_heading: heading of the map.
        sizes: scores of the same vectors cut and made smaller, see `small_vectors_svg`.
        thresholds: thresholds of similarity, see `runs.thresholds`.
        fewer_classes: by row of the table, its scores among fewer classes; see `fewer_classes_html`.
        curve_classes: the classes of the curve, in words.

    Returns:
        The path.

    Example:
        >>> import tempfile
        >>> folder = tempfile.TemporaryDirectory()
        >>> rows = [{"name": "raw pixels", "R@1": 0.5}, {"name": "trained", "R@1": 0.875}]
        >>> empty = dict(facts={}, curve=[], gallery=[], scatter=None, notes=[])
        >>> page = write_report(Path(folder.name) / "report.html", title="Demo", table=rows, **empty)
        >>> "87.5" in page.read_text()
        True
        >>> folder.cleanup()
    """
    path = Path(path)
    results = Results(table, results_note, remarks)
    page = _page(
        title,
        facts,
        results,
        curve,
        gallery,
        scatter,
        notes,
        gallery_note,
        confused,
        hardest,
        certainty,
        map_heading,
        sizes,
        thresholds,
        fewer_classes,
        curve_classes,
    )
    with replacing(path) as draft:
        draft.write_text(page, encoding="utf-8", errors="backslashreplace")
    return path


class Results(NamedTuple):
    """The section with the table of scores."""

    table: list[dict[str, Any]]
    note: str
    remarks: Sequence[str]

    def html(self) -> str:
        """The section; empty without a table."""
        if not self.table:
            return ""
        sentences = "".join(f'<p class="remark">{escaped(remark)}</p>' for remark in self.remarks)
        ranges = any(row.get("intervals") for row in self.table)
        key = '<p class="under">Small numbers: 95 % interval over classes (bootstrap).</p>' if ranges else ""
        return _section("Results", self.note, sentences + _SWIPE + _table(self.table) + key)


def _page(
    title: str,
    facts: dict[str, str],
    results: Results,
    curve: list[dict[str, Any]],
    gallery: list[GalleryRow],
    scatter: Scatter | None,
    notes: list[str],
    gallery_note: str,
    confused: Sequence[ConfusedPair],
    hardest: Sequence[GalleryRow],
    certainty: Certainty | None,
    map_heading: str,
    sizes: Sequence[Mapping[str, Any]],
    thresholds: dict[str, Any] | None,
    fewer_classes: Mapping[str, Sequence[Mapping[str, Any]]],
    curve_classes: str,
) -> str:
    parts = [results.html()] if results.table else []
    if picture := fewer_classes_html(fewer_classes):
        parts.append(_section("More classes, lower scores", FEWER_NOTE, picture))
    if sizes:
        parts.append(_section("Smaller vectors", SIZES_NOTE, _sizes_html(sizes)))
    if gallery:
        hint = f"Each query on the left, its nearest images on the right, nearest first. {gallery_note}"
        parts.append(_section("What it finds", hint, _KEY + gallery_html(gallery)))
    if confused:
        hint = "Each pair is a class and the class whose images its queries find most often instead of their own."
        parts.append(_section("Confused classes", hint, confusion_html(confused)))
    if hardest:
        hint = (
            "The queries with the worst results: look for wrong labels, near-duplicates in two classes, odd pictures."
        )
        parts.append(_section("Hardest queries", hint, _KEY + gallery_html(hardest)))
    pictures = curve_svg(curve, curve_classes)
    if pictures:
        parts.append(
            _section("Training", _chosen_note(curve, curve_classes), f'<div class="chart">{"".join(pictures)}</div>')
        )
    if certainty is not None:
        hint = (
            f"Some training images of the classes with the lowest and the highest uncertainty. {certainty.note}".strip()
        )
        parts.append(_section("Certainty about classes", hint, certainty_html(certainty)))
    if thresholds is not None:
        hint = (
            f"All pairs of {thresholds['images']} images of {thresholds['classes']} held-out classes: a pair with a "
            "similarity above the threshold is taken for one class. Each threshold was chosen on these classes, at the "
            f"rate of false matches beside it. Equal error rate {100 * thresholds['eer'][0]:.1f} %."
        )
        picture = f'<div class="chart">{error_rates_svg(thresholds)}{thresholds_html(thresholds)}</div>'
        parts.append(_section("Same class or not", hint, picture))
    if scatter is not None:
        hint = f"{scatter.caption}. Points that are close are images with similar embeddings (t-SNE)."
        picture = f'{_SWIPE}<div class="wide">{scatter_svg(scatter)}</div>'
        parts.append(_section(escaped(map_heading), hint, picture))
    if notes:
        items = "".join(f"<li>{escaped(note)}</li>" for note in notes)
        parts.append(_section("Notes", "", f'<ul class="notes">{items}</ul>'))
    cards = "".join(f"<div><dt>{escaped(name)}</dt><dd>{escaped(value)}</dd></div>" for name, value in facts.items())
    head = escaped(title)
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f"{PAGE_MARK}"
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'; "
        'img-src data:">'
        f'<link rel="icon" href="data:,"><title>{head}</title><style>{CSS}</style></head>\n'
        f"<body><header><h1>{head}</h1>"
        + (f'<dl class="facts">{cards}</dl>' if facts else "")
        + "</header>\n<main>\n"
        + "\n".join(parts)
        + "\n</main></body></html>\n"
    )


_SWIPE = '<p class="swipe" aria-hidden="true">swipe sideways to see all of it →</p>'
_KEY = (
    '<p class="key"><span class="right"><span class="mark">✓</span> same class as the query</span>'
    '<span class="wrong"><span class="mark">✗</span> another class</span>'
    "<span>the number is the cosine similarity</span></p>"
)


def _section(heading: str, hint: str, body: str) -> str:
    lead = f'<p class="hint">{escaped(hint)}</p>' if hint else ""
    return f"<section><h2>{heading}</h2>{lead}{body}</section>"


def _sizes_html(sizes: Sequence[Mapping[str, Any]]) -> str:
    metric = "MAP@R" if "MAP@R" in sizes[0]["scores"] else next(iter(sizes[0]["scores"]))
    table = [
        {"name": f"{each['dim']} dimensions, {each['vectors']}", "bytes": f"{each['bytes']:,}", **each["scores"]}
        for each in sizes
    ]
    return f'<div class="chart">{small_vectors_svg(sizes, metric)}</div>{_SWIPE}{_table(table)}'


def _columns(table: Sequence[dict[str, Any]]) -> list[str]:
    return list(dict.fromkeys(key for row in table for key in row if key not in ("name", "intervals")))


def _table(table: Sequence[dict[str, Any]]) -> str:
    columns = _columns(table)
    numbers = [key for key in columns if any(isinstance(row.get(key), float) for row in table)]
    best_values = {
        key: (min if lower_is_better(key) else max)(row[key] for row in table if isinstance(row.get(key), float))
        for key in numbers
    }
    head = "".join(f'<th scope="col">{escaped(key)}</th>' for key in columns)
    body = []
    has_best_row = False
    for row in table:
        row_metrics = [key for key in numbers if isinstance(row.get(key), float)]
        is_best = (
            len(table) > 1
            and not has_best_row
            and len(row_metrics) * 2 > len(numbers)
            and all(row[key] == best_values[key] for key in row_metrics)
        )
        has_best_row |= is_best
        badge = ' <span class="badge">best</span>' if is_best else ""
        ranges = row.get("intervals") or {}
        cells = "".join(_cell(row.get(key), best_values.get(key), ranges.get(key)) for key in columns)
        name = escaped(row.get("name", ""))
        opening = '<tr class="best">' if is_best else "<tr>"
        body.append(f'{opening}<th scope="row">{name}{badge}</th>{cells}</tr>')
    return (
        f'<div class="wide"><table><thead><tr><th scope="col"></th>{head}</tr></thead>'
        f"<tbody>{''.join(body)}</tbody></table></div>"
    )


def _cell(value: Any, best_value: float | None, interval: tuple[float, float] | None = None) -> str:
    if isinstance(value, float):
        text = f"{100 * value:.1f}"
        content = f"<strong>{text}</strong>" if value == best_value else text
        if interval:
            content += f'<span class="range">{100 * interval[0]:.1f} – {100 * interval[1]:.1f}</span>'
        return f'<td class="number" style="--share:{min(max(value, 0.0), 1.0):.3f}">{content}</td>'
    return f"<td>{'–' if value is None else escaped(value)}</td>"


def _chosen_note(curve: Sequence[dict[str, Any]], classes: str) -> str:
    chosen_records = [record for record in curve if record.get("chosen")]
    if not chosen_records:
        return ""
    metrics = [key for key in metric_columns(curve) if isinstance(chosen_records[0].get(key), float)]
    values = ", ".join(f"{key} {100 * chosen_records[0][key]:.1f}" for key in metrics)
    return f"Epoch {round(chosen_records[0]['epoch'], 2)} was chosen on {classes}" + (
        f": {values} %." if values else "."
    )
