"""Hooks of mkdocs: add the generated pages to the site and to its navigation."""

from __future__ import annotations

import logging
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from generator.growth import growth_pictures
from generator.methods import method_pages
from generator.reference import reference_pages
from generator.scores import ROOT
from generator.study_pages import ARCHIVE, study_pages

COPIED = {"contributing.md": "CONTRIBUTING.md", "changelog.md": "CHANGELOG.md", "examples.md": "examples/README.md"}
"""pages of the site that are copies of other files in the repository"""
_pages: dict[str, str] = {}
_pictures: dict[str, bytes] = {}


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Generate the pages, and add them to the navigation in place of entries such as `methods/*`."""
    logging.getLogger("matplotlib").setLevel(logging.ERROR)
    studies, pictures = study_pages()
    _pages.clear()
    _pages.update(method_pages() | studies | reference_pages())
    _pictures.clear()
    _pictures.update(pictures | growth_pictures())
    for place in ("benchmarks/results/losses-cuda.png", "results/figures/ccp-mnist.png"):
        if (ROOT / place).is_file():
            _pictures[f"images/{Path(place).name}"] = (ROOT / place).read_bytes()
    assert config.nav is not None
    config.nav = _expand(config.nav)
    return config


def _expand(nav: list[Any]) -> list[Any]:
    """The navigation, with an entry such as `methods/*` replaced by the generated pages of that folder."""
    entries: list[Any] = []
    for entry in nav:
        if isinstance(entry, str) and entry.endswith("/*"):
            generated_pages = {page for page in _pages if page.startswith(entry[:-1]) and not page.endswith("index.md")}
            entries += _with_archive([page for page in _pages if page in generated_pages])
        elif isinstance(entry, dict):
            entries.append({title: _expand(part) if isinstance(part, list) else part for title, part in entry.items()})
        else:
            entries.append(entry)
    return entries


def _with_archive(pages: list[Any]) -> list[Any]:
    """Pages of the navigation, with the archive and the pages behind it in a section of their own."""
    if ARCHIVE not in pages:
        return pages
    place = pages.index(ARCHIVE)
    return [*pages[:place], {"Archive: degraded copies": pages[place:]}]


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add generated pages, copied pages and pictures."""
    for place, content in (_pages | _pictures).items():
        files.append(File.generated(config, place, content=content))
    for place, source in COPIED.items():
        files.append(File.generated(config, place, content=copied(source)))
    return files


def on_page_markdown(markdown: str, **kwargs: Any) -> str:
    """Keep a mean and its interval on one line."""
    return markdown.replace(" ± ", "\u00a0±\u00a0")


def copied(source: str) -> str:
    """A Markdown file of the repository; relative links become plain text."""
    text = (ROOT / source).read_text(encoding="utf-8")
    return re.sub(r"\[([^\]]+)\]\((?!https?:|#)[^)]+\)", r"`\1`", text)
