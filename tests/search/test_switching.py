"""Two indexes exchange their names: what goes with the name, what readers see, and what is refused."""

from __future__ import annotations

import shutil
import threading

import pytest
import torch

from proxymetric.search import Index
from proxymetric.search.switching import switch
from proxymetric.system.lock import locked

IDS = [f"item {n}" for n in range(20)]


@pytest.fixture
def folders(tmp_path):
    """The index in use and one beside it; each has vectors of a direction of its own."""
    for number, name in enumerate(("used", "beside")):
        index = Index.create(tmp_path / name, dim=2, model=name, map="none")
        index.add(IDS, torch.eye(2)[number].expand(20, 2), labels=[name] * 20)
    return tmp_path / "used", tmp_path / "beside"


def test_the_vectors_change_and_classes_and_metadata_stay(folders):
    used, beside = folders
    Index(used).update(IDS[:1], metadata=[{"price": 3}])
    index = switch(used, beside)
    assert (index.folder, index.model, Index(beside).model) == (used, "beside", "used")
    assert (index[IDS[0]].metadata, set(index.labels)) == ({"price": 3}, {"used"})
    assert torch.equal(index.vector(IDS[0]), torch.eye(2)[1])
    index.update(IDS[:1], metadata=[{"price": 4}])
    back = switch(used, beside)
    assert (back.model, back[IDS[0]].metadata) == ("used", {"price": 4})
    for folder in folders:
        Index(folder).verify()
        Index(folder).delete(IDS[1:2])


def test_a_copy_that_has_changed_since_is_another_index(folders, tmp_path):
    used, copy = folders[0], shutil.copytree(folders[0], tmp_path / "copy")
    reader = Index(used)
    Index(used).update(IDS[:1], labels=["before"])
    Index(copy).put(IDS, torch.eye(2)[1].expand(20, 2), labels=["after"] * 20)
    assert Index(used).manifest.generation == Index(copy).manifest.generation
    reader.reload()
    switch(used, copy)
    assert reader.reload()
    assert torch.equal(reader.vectors, torch.eye(2)[1].expand(20, 2))
    assert Index(used).manifest.identity != Index(copy).manifest.identity


def test_what_cannot_be_switched_is_as_it_was(folders, tmp_path):
    used, beside = folders
    Index(used).add(["only here"], torch.ones(1, 2))
    with pytest.raises(ValueError, match=r"lacks 1 of the 21 items of .*'only here'; expected all of them, or --drop"):
        switch(used, beside)
    with pytest.raises(ValueError, match="which is the index itself"):
        switch(used, used)
    with pytest.raises(ValueError, match="does not exist"):
        switch(used, tmp_path / "gone")
    with locked(beside), pytest.raises(ValueError, match="in use by"):
        switch(used, beside)
    assert [Index(folder).model for folder in folders] == ["used", "beside"]
    assert len(switch(used, beside, drop_missing=True)) == 20


def test_a_reader_never_sees_vectors_of_the_one_with_the_model_of_the_other(folders):
    used, beside = folders
    is_done, troubles = threading.Event(), []

    def read():
        index = Index(used)
        while not is_done.is_set():
            index.reload()
            for state in (index.state, Index(used).state):
                direction = 0 if state.manifest.model == "used" else 1
                if not (state.floats(state.living)[:, direction] == 1).all():
                    troubles.append(state.manifest)

    reader = threading.Thread(target=read)
    reader.start()
    for _ in range(8):
        switch(used, beside)
    is_done.set()
    reader.join()
    assert not troubles
