"""A Parquet file holds what the index holds."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from proxymetric.search import Index
from proxymetric.search.parquet import ROWS_PER_GROUP, write_parquet

pq = pytest.importorskip("pyarrow.parquet", reason="the extra `parquet` is not installed")


def test_it_holds_what_the_index_holds(tmp_path):
    count = ROWS_PER_GROUP + 3
    index = Index.create(tmp_path / "a.index", dim=3, model="m", map="none")
    index.add(
        [f"{number:05d} ß" for number in range(count)],
        torch.randn(count, 3),
        labels=["cat", None, "dog"] * (count // 3) + ["cat"] * (count % 3),
        metadata=[{"shop": "Ulm", "price": number} for number in range(count)],
    )
    file = write_parquet(index, tmp_path / "out" / "a.parquet")
    table = pq.read_table(file)
    assert table.column_names == ["id", "class", "metadata", "stamp", "vector", "thumbnail"]
    assert table["id"].to_pylist() == index.ids
    assert table["class"].to_pylist() == index.labels
    assert json.loads(table["metadata"][7].as_py()) == {"shop": "Ulm", "price": 7}
    np.testing.assert_array_equal(np.stack(table["vector"].to_numpy(zero_copy_only=False)), index.vectors.numpy())
    assert table.schema.metadata[b"model"] == b"m"
    index.delete(index.ids[5:])
    assert pq.read_table(write_parquet(index, file)).num_rows == 5, "its own file is replaced"
    again = Index.from_parquet(tmp_path / "b.index", file, map="none")
    assert (again.ids, again.labels, again.model) == (index.ids, index.labels, "m")
    assert torch.equal(again.vectors, index.vectors)
    assert again["00004 ß"].metadata == {"shop": "Ulm", "price": 4}
    (tmp_path / "photo.jpg").write_bytes(b"a photo")
    with pytest.raises(ValueError, match="which exists and is not a Parquet file"):
        write_parquet(index, tmp_path / "photo.jpg")
