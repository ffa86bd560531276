"""The JSON files of a run keep their keys and the settings that they record."""

from __future__ import annotations

import json

import pytest

from golden.files import FILE, METHODS, files


@pytest.mark.parametrize("method", METHODS)
def test_the_files_of_a_run_are_what_they_were(method: str):
    stored = json.loads(FILE.read_text())[method]
    assert files(method) == stored
