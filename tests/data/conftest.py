"""What several tests of images need."""

from __future__ import annotations

import pytest

from proxymetric.data import decoding, folders


@pytest.fixture
def without_heic(monkeypatch: pytest.MonkeyPatch) -> None:
    """The extra `heic` is not installed."""
    monkeypatch.setattr(decoding, "READS_HEIC", False)
    monkeypatch.setattr(
        folders, "ENDINGS", tuple(ending for ending in folders.ENDINGS if ending not in folders.HEIC_ENDINGS)
    )
