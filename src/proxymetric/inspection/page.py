"""The page of an inspection: one HTML file without scripts, with the pictures inside."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path

from proxymetric.data import BadImage
from proxymetric.inspection.findings import Findings
from proxymetric.plots.escaping import escaped
from proxymetric.plots.gallery import data_uri, title_of
from proxymetric.plots.report import PAGE_MARK
from proxymetric.plots.style import CSS
from proxymetric.system.files import replacing

MAX_SHOWN = 200
"""entries of a list on the page; the CSV files hold all"""
PIXELS = 144
PAGE_CSS = """
.found { display: grid; grid-template-columns: repeat(auto-fill, minmax(330px, 1fr)); gap: 14px; margin: 0;
  padding: 0; list-style: none; }
.found > li { border: 1px solid var(--line); border-radius: 12px; padding: 12px; min-width: 0; }
.found .row { display: grid; grid-template-columns: repeat(3, minmax(0, 1fr)); gap: 12px; }
.found figure { margin: 0; min-width: 0; }
.found .why { margin: 0 0 8px; font-size: .88rem; overflow-wrap: anywhere; }
.found .it .frame { border-color: var(--accent); }
.found .wrong .frame { border-color: var(--wrong); }
.found .right .frame { border-color: var(--right); border-style: solid; }
.found .tag { color: var(--soft); display: block; font-size: .74rem; }
.found .file { color: var(--soft); display: block; font-size: .7rem; overflow-wrap: anywhere; }
.two { color: var(--wrong); font-weight: 700; }
td.text, th.text { text-align: left; white-space: normal; overflow-wrap: anywhere; }
nav { display: flex; flex-wrap: wrap; gap: 8px 18px; margin: 0 0 24px; }
nav a { color: var(--accent); text-decoration: none; font-weight: 600; }
nav a:hover { text-decoration: underline; }
@media (max-width: 720px) { .found { grid-template-columns: minmax(0, 1fr); } }
"""


def write_page(path: Path, inspection: Findings) -> Path:
    """Write the page. It replaces an existing file only when it is complete."""
    pictures = _Pictures(inspection)
    sections = [
        _wrong_labels(inspection, pictures),
        _duplicates(inspection, pictures),
        _lonely(inspection, pictures),
        _unreadable(inspection),
    ]
    images, name = inspection.contents.images, escaped(f"{inspection.contents.images.name}: inspection")
    facts = {
        "images": f"{len(images):,} of {len(images.classes):,} classes",
        "labels likely wrong": f"{len(inspection.wrong_labels.listed):,}",
        "wrong labels, estimated": f"{100 * inspection.wrong_labels.share:.1f} % of all",
        "groups of duplicates": f"{len(inspection.duplicates):,}, {_two_labels(inspection):,} with two labels",
        "lonely images": f"{len(inspection.lonely.listed):,}",
        "unreadable files": f"{len(inspection.contents.unreadable):,}",
    }
    cards = "".join(f"<div><dt>{escaped(key)}</dt><dd>{escaped(value)}</dd></div>" for key, value in facts.items())
    page = (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">{PAGE_MARK}'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'; "
        f'img-src data:"><link rel="icon" href="data:,"><title>{name}</title><style>{CSS}{PAGE_CSS}</style></head>\n'
        f'<body><header><h1>{name}</h1><dl class="facts">{cards}</dl><nav aria-label="lists">'
        '<a href="#wrong-labels">Likely wrong labels</a><a href="#duplicates">Duplicates</a>'
        '<a href="#lonely">Lonely images</a><a href="#unreadable">Unreadable files</a></nav></header>\n<main>\n'
        + "\n".join(sections)
        + "\n</main></body></html>\n"
    )
    with replacing(path) as draft:
        draft.write_text(page, encoding="utf-8", errors="backslashreplace")
    return path


class _Pictures:
    """Figures of images, each read once."""

    def __init__(self, inspection: Findings) -> None:
        self.inspection = inspection
        self._uri: Callable[[int], str] = lru_cache(maxsize=4096)(self._read)

    def figure(self, row: int, tag: str, kind: str = "") -> str:
        """An image with its label, what it is here, and its file; nothing for -1."""
        if row < 0:
            return ""
        label, file = escaped(self.inspection.label(row)), self.inspection.file(row)
        source = self._uri(row)
        picture = f'<img src="{source}" alt="{escaped(tag)}, label {label}"{title_of(file)}>' if source else ""
        return (
            f'<figure class="{kind}"><div class="frame">{picture}</div><figcaption>'
            f'<span class="tag">{escaped(tag)}</span><span class="name">{label}</span>'
            f'<span class="file">{escaped(Path(file).name)}</span></figcaption></figure>'
        )

    def _read(self, row: int) -> str:
        contents = self.inspection.contents
        try:
            return data_uri(contents.images.read(int(contents.kept[row]), min_side=PIXELS), PIXELS)
        except BadImage:  # it was there a moment ago
            return ""


def _wrong_labels(inspection: Findings, pictures: _Pictures) -> str:
    entries = [
        _entry(
            f"{escaped(inspection.label(each.row))} → "
            f"<strong>{escaped(inspection.contents.images.classes[each.suggestion])}</strong>? "
            f"wrong with probability {each.probability:.2f}",
            pictures.figure(each.row, "this image", "it"),
            pictures.figure(each.nearest_of_label, "nearest of its label", "wrong"),
            pictures.figure(each.nearest_of_suggestion, "nearest of the suggestion", "right"),
        )
        for each in inspection.wrong_labels.listed[:MAX_SHOWN]
    ]
    hint = (
        f"Labels that are wrong with a probability of {inspection.wrong_labels.limit:g} or more, by the class centres "
        "of all other images. The most likely ones come first; a rare view of its class can stand here too, so look "
        "before you change anything. Go through the whole list before you run the command again: the fewer labels are "
        "wrong, the surer it must be of the others."
    )
    return _section("wrong-labels", "Likely wrong labels", hint, entries, len(inspection.wrong_labels.listed))


def _duplicates(inspection: Findings, pictures: _Pictures) -> str:
    entries = []
    for group in inspection.duplicates[:MAX_SHOWN]:
        kinds = {pair.second: pair.kind for pair in sorted(group.copies, key=lambda pair: pair.correlation)}
        figures = [pictures.figure(row, kinds.get(row, "the first"), "it") for row in group.rows[:MAX_SHOWN]]
        labels = '<span class="two">two labels</span>' if group.two_labels else "same label"
        entries.append(_entry(f"{len(group.rows)} images, {labels}", *figures))
    hint = (
        "Images that show the same picture, also if it was compressed, scaled, cut a little or mirrored. Groups with "
        "two labels come first: at least one of their labels is wrong, or the picture shows both."
    )
    return _section("duplicates", "Duplicates", hint, entries, len(inspection.duplicates))


def _lonely(inspection: Findings, pictures: _Pictures) -> str:
    entries = [
        _entry(
            f"similarity {each.similarity:.2f} with the nearest image",
            pictures.figure(each.row, "this image", "it"),
            pictures.figure(each.nearest, "nearest of all"),
            pictures.figure(each.nearest_of_label, f"nearest of its label, {each.similarity_of_label:.2f}")
            if each.nearest_of_label != each.nearest
            else "",
        )
        for each in inspection.lonely.listed[:MAX_SHOWN]
    ]
    limit = inspection.lonely.limit
    rule = "" if math.isnan(limit) else f", here below {limit:.2f}"
    hint = (
        "Images far from every other: the similarity with the nearest one is lower than chance explains among so many "
        f"images (Chauvenet's criterion{rule}). Often they do not belong to the set at all."
    )
    return _section("lonely", "Lonely images", hint, entries, len(inspection.lonely.listed))


def _unreadable(inspection: Findings) -> str:
    rows = inspection.tables()["unreadable"]
    body = "".join(
        f'<tr><th scope="row" class="text">{escaped(row["file"])}</th><td class="text">{escaped(row["label"])}</td>'
        f'<td class="text">{escaped(row["reason"])}</td></tr>'
        for row in rows[:MAX_SHOWN]
    )
    table = (
        '<div class="wide"><table><thead><tr><th scope="col" class="text">file</th><th scope="col" class="text">label'
        f'</th><th scope="col" class="text">reason</th></tr></thead><tbody>{body}</tbody></table></div>'
    )
    hint = f"Files that training leaves out, because they cannot be read as images.{_more(len(rows), 'unreadable')}"
    return _card("unreadable", "Unreadable files", hint, table if rows else _NONE)


_NONE = '<p class="under">None.</p>'


def _section(name: str, heading: str, hint: str, entries: Sequence[str], total: int) -> str:
    body = f'<ol class="found">{"".join(entries)}</ol>' if entries else _NONE
    return _card(name, heading, hint + _more(total, name), body)


def _card(name: str, heading: str, hint: str, body: str) -> str:
    return f'<section id="{name}"><h2>{heading}</h2><p class="hint">{escaped(hint)}</p>{body}</section>'


def _more(total: int, name: str) -> str:
    return f" The first {MAX_SHOWN} of {total:,}; {name}.csv has all." if total > MAX_SHOWN else ""


def _entry(why: str, *figures: str) -> str:
    return f'<li><p class="why">{why}</p><div class="row">{"".join(figures)}</div></li>'


def _two_labels(inspection: Findings) -> int:
    return sum(group.two_labels for group in inspection.duplicates)
