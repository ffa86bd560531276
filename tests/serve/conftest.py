"""An index of the pictures of the tests, and the service for it."""

from __future__ import annotations

import pytest

from proxymetric.serve.settings import Settings
from terminal import proxymetric


@pytest.fixture(scope="session")
def index_folder(photos, finished, tmp_path_factory):
    place = tmp_path_factory.mktemp("serve")
    (place / "items.csv").write_text("file,shop\nclass0/1.png,Ulm\nclass4/2.png,Ulm\n")
    words = ["index", finished, photos, "--out", place / "a.index", "--metadata", place / "items.csv"]
    answer = proxymetric(*words)
    assert answer.code == 0, answer
    return place / "a.index"


@pytest.fixture(scope="session")
def settings(index_folder):
    return Settings(str(index_folder), device="cpu", port=0, max_bytes=1_000_000, max_pixels=2_000_000)


@pytest.fixture(scope="session")
def client(settings):
    from service import serving

    with serving(settings) as client:
        yield client
