"""A manifest that is damaged or forged is refused with a sentence that says where."""

from __future__ import annotations

import json
import random

import pytest
import torch

from proxymetric.search import Index
from proxymetric.search.manifest import FILE


@pytest.fixture
def folder(tmp_path):
    index = Index.create(tmp_path / "a.index", 4)
    index.add(["a", "b"], torch.eye(2, 4))
    return tmp_path / "a.index"


def changed(folder, change):
    content = json.loads((folder / FILE).read_text())
    change(content)
    (folder / FILE).write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda m: m.update(vectors={"kimd": "float32"}), "vectors: got no kind, expected one of float32, int8"),
        (lambda m: m["vectors"].update(kind="flgat32"), "vectors: got 'flgat32', expected one of float32, int8"),
        (lambda m: m["files"].update({"../../etc/passwd": [1, 2]}), "files: got '../../etc/passwd', expected the name"),
        (lambda m: m["files"].update({"/etc/passwd": [1, 2]}), "files: got '/etc/passwd', expected the name"),
        (lambda m: m["files"].update({"..": [1, 2]}), "files: got '..', expected the name"),
        (lambda m: m["files"].update({"items.sqlite": "large"}), "files: got 'large', expected a size"),
        (lambda m: m["derived"].update({"a/b": [1, 2]}), "files: got 'a/b', expected the name"),
        (lambda m: m.update(rows=-1), "rows: got -1, expected a number of at least 0"),
        (lambda m: m.update(model="another"), "its checksum is that of another content"),
        (lambda m: m.update(engine={"nome": "exact"}), "engine: got no name, expected text"),
        (lambda m: m.update(map={}), "map: got no method, expected text"),
        (lambda m: m.update(photos=["/"]), "photos: got ['/'], expected text or null"),
        (lambda m: m.update(dim=-1), "dim: got -1, expected a number of at least 1"),
        (lambda m: m.update(count=True), "count: got True, expected a number"),
        (lambda m: m.update(columns=[1]), "columns, run: got what is no text"),
    ],
)
def test_a_wrong_value_is_named(folder, change, said):
    changed(folder, change)
    with pytest.raises(ValueError, match="is damaged") as caught:
        Index.open(folder)
    assert said in str(caught.value)


def test_flipped_bits_never_end_in_another_error(folder):
    """What is still JSON is opened, or refused with a sentence."""
    content, draw = (folder / FILE).read_bytes(), random.Random(5)
    for _ in range(300):
        damaged = bytearray(content)
        damaged[draw.randrange(len(damaged))] ^= 1 << draw.randrange(8)
        (folder / FILE).write_bytes(damaged)
        try:
            Index.open(folder)
        except ValueError as error:
            assert ": got " in str(error), error
