"""Debian's Chromium without a window, driven by playwright; tests are skipped where either is missing."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from typing import Any

CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
ARGUMENTS = ["--no-sandbox", "--disable-dev-shm-usage", "--use-gl=angle", "--use-angle=swiftshader",
             "--enable-unsafe-swiftshader", "--disable-gpu-compositing"]  # fmt: skip
"""WebGL without a graphics card; the emulated card draws the map only: drawing the page on it too takes a core"""
CAMERA = ["--use-fake-device-for-media-stream", "--use-fake-ui-for-media-stream"]
"""a camera that shows a moving pattern, and that every page may use"""


def missing() -> str:
    """Why there is no browser; empty if there is one."""
    try:
        import playwright  # noqa: F401
    except ImportError:
        return "playwright is not installed"
    return "" if CHROMIUM else "Chromium is not installed"


@contextlib.contextmanager
def browser() -> Iterator[Any]:
    """Start the browser."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=CHROMIUM, args=[*ARGUMENTS, *CAMERA])
        try:
            yield started
        finally:
            started.close()
