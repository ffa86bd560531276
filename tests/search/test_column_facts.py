"""What the columns of an index hold, before and after changes."""

from __future__ import annotations

import torch

from proxymetric.search import Index
from proxymetric.search.column_facts import ColumnFacts, facts_of_columns


def test_kinds_and_values_are_those_that_items_have(tmp_path):
    index = Index.create(tmp_path / "a.index", dim=2, map="none")
    metadata = [
        {"price": 3, "added": "2026-01-31", "brand": "b", "code": "007", "tags": ["new", "red"], "gone": 1},
        {"price": "12.5", "added": "2026-02-01T10:00", "brand": "a", "sold": True},
    ]
    index.add(["x", "y"], torch.eye(2), metadata=metadata)

    def check(brands, greatest):
        assert facts_of_columns(index.store) == [
            ColumnFacts("added", "date", least="2026-01-31", greatest="2026-02-01"),
            ColumnFacts("brand", "text", values=brands),
            ColumnFacts("code", "text", values=["007"]),
            ColumnFacts("price", "number", least=3, greatest=greatest),
            ColumnFacts("sold", "text", values=["true"]),
            ColumnFacts("tags", "words", values=["new", "red"]),
        ]

    index.update(["x"], metadata=[{key: value for key, value in metadata[0].items() if key != "gone"}])
    check(["a", "b"], 12.5)
    index.compact()
    check(["a", "b"], 12.5)
    index.update(["y"], metadata=[metadata[1] | {"brand": "c", "price": 99}])
    check(["b", "c"], 99)
    index.update(["y"], metadata=[metadata[1] | {"price": "cheap"}])
    assert facts_of_columns(index.store)[3] == ColumnFacts("price", "text", values=["3", "cheap"])
    index.put([f"many{n}" for n in range(101)], torch.ones(101, 2), metadata=[{"brand": f"{n}x"} for n in range(101)])
    assert facts_of_columns(index.store)[1] == ColumnFacts("brand", "text")
