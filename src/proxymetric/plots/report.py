"""The report of a run: one self-contained HTML page."""

import html
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from proxymetric.files import printable, replacing
from proxymetric.plots.certainty import Certainty, certainty_html
from proxymetric.plots.confusion import ConfusedPair, confusion_html
from proxymetric.plots.curve import curve_svg, metric_columns
from proxymetric.plots.gallery import GalleryRow, gallery_html
from proxymetric.plots.scatter import Scatter, scatter_svg
from proxymetric.plots.style import CSS

PICKED = (
    "The queries were sorted by average precision and cut into equal parts; one was drawn from each. "
    "So the rows run from the best to the worst, and failures appear as often as they happen."
)


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
    gallery_note: str = PICKED,
    confused: Sequence[ConfusedPair] = (),
    hardest: Sequence[GalleryRow] = (),
    certainty: Certainty | None = None,
) -> Path:
    """Write the page. It replaces an existing file only when it is complete.

    Sections without content are left out: those of an empty list, and of a scatter or certainty that is None.

    Args:
        path: path of the HTML file; its folder is created.
        title: heading of the page.
        facts: facts about the run, name to value.
        table: rows such as ``{"name": "trained encoder", "R@1": 0.91, "MAP@R": 0.62}``. Floats are fractions, shown in
            per cent with one decimal. The row with the best MAP@R, or else the best first metric, is marked.
        curve: records such as ``{"epoch": 3, "loss": 1.2, "MAP@R": 0.41, "chosen": True}``.
        gallery: queries with their results; see `pick_queries` and `gallery_rows`.
        scatter: a map of the embeddings; see `tsne`.
        notes: sentences at the end of the page.
        gallery_note: how the queries were chosen; by default as in `pick_queries`.
        confused: pairs of confused classes, most frequent first.
        hardest: the queries with the worst results, in the form of `gallery`.
        certainty: the training classes about which the method is most and least certain.

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
    page = _page(title, facts, table, curve, gallery, scatter, notes, gallery_note, confused, hardest, certainty)
    with replacing(path) as draft:
        draft.write_text(printable(page), encoding="utf-8")
    return path


def _page(
    title: str,
    facts: dict[str, str],
    table: list[dict[str, Any]],
    curve: list[dict[str, Any]],
    gallery: list[GalleryRow],
    scatter: Scatter | None,
    notes: list[str],
    gallery_note: str,
    confused: Sequence[ConfusedPair],
    hardest: Sequence[GalleryRow],
    certainty: Certainty | None,
) -> str:
    parts = []
    if table:
        parts.append(_section("Results", "Retrieval on classes never seen in training, in per cent.", _table(table)))
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
    pictures = curve_svg(curve)
    if pictures:
        parts.append(_section("Training", _chosen(curve), f'<div class="chart">{"".join(pictures)}</div>'))
    if certainty is not None:
        hint = (
            f"Some training images of the classes with the lowest and the highest uncertainty. {certainty.note}".strip()
        )
        parts.append(_section("Certainty about classes", hint, certainty_html(certainty)))
    if scatter is not None:
        hint = f"{scatter.caption}. Points that are close are images with similar embeddings (t-SNE)."
        parts.append(_section("Map of the unseen classes", hint, f'<div class="wide">{scatter_svg(scatter)}</div>'))
    if notes:
        items = "".join(f"<li>{html.escape(note)}</li>" for note in notes)
        parts.append(_section("Notes", "", f'<ul class="notes">{items}</ul>'))
    cards = "".join(
        f"<div><dt>{html.escape(str(name))}</dt><dd>{html.escape(str(value))}</dd></div>"
        for name, value in facts.items()
    )
    head = html.escape(title)
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
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


_KEY = (
    '<p class="key"><span class="right"><span class="mark">✓</span> same class as the query</span>'
    '<span class="wrong"><span class="mark">✗</span> another class</span>'
    "<span>the number is the cosine similarity</span></p>"
)


def _section(heading: str, hint: str, body: str) -> str:
    lead = f'<p class="hint">{html.escape(hint)}</p>' if hint else ""
    return f"<section><h2>{heading}</h2>{lead}{body}</section>"


def _columns(table: Sequence[dict[str, Any]]) -> list[str]:
    return list(dict.fromkeys(key for row in table for key in row if key != "name"))


def _table(table: Sequence[dict[str, Any]]) -> str:
    columns = _columns(table)
    numbers = [key for key in columns if any(isinstance(row.get(key), float) for row in table)]
    tops = {key: max(row[key] for row in table if isinstance(row.get(key), float)) for key in numbers}
    leading = "MAP@R" if "MAP@R" in tops else next(iter(tops), None)
    head = "".join(f'<th scope="col">{html.escape(key)}</th>' for key in columns)
    body = []
    marked = False
    for row in table:
        best = len(table) > 1 and not marked and leading is not None and row.get(leading) == tops[leading]
        marked |= best
        badge = ' <span class="badge">best</span>' if best else ""
        cells = "".join(_cell(row.get(key), tops.get(key)) for key in columns)
        name = html.escape(str(row.get("name", "")))
        opening = '<tr class="best">' if best else "<tr>"
        body.append(f'{opening}<th scope="row">{name}{badge}</th>{cells}</tr>')
    return (
        f'<div class="wide"><table><thead><tr><th scope="col"></th>{head}</tr></thead>'
        f"<tbody>{''.join(body)}</tbody></table></div>"
    )


def _cell(value: Any, top: float | None) -> str:
    if isinstance(value, float):
        shown = f"{100 * value:.1f}"
        strong = f"<strong>{shown}</strong>" if value == top else shown
        return f'<td class="number" style="--share:{min(max(value, 0.0), 1.0):.3f}">{strong}</td>'
    return f"<td>{'–' if value is None else html.escape(str(value))}</td>"


def _chosen(curve: Sequence[dict[str, Any]]) -> str:
    chosen = [record for record in curve if record.get("chosen")]
    if not chosen:
        return ""
    metrics = [key for key in metric_columns(curve) if isinstance(chosen[0].get(key), float)]
    values = ", ".join(f"{key} {100 * chosen[0][key]:.1f}" for key in metrics)
    return f"Epoch {round(chosen[0]['epoch'], 2)} was chosen on validation classes" + (
        f": {values} %." if values else "."
    )
