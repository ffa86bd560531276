"""Classes of an index, "none of these" at a stated rate, and classes that are added without training."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from proxymetric.search import Identifier, Index
from proxymetric.search.calibration import Impostors, decide
from proxymetric.search.class_centres import ClassCentres
from proxymetric.search.identify import FILE
from proxymetric.search.run_knowledge import HELD_OUT, RunKnowledge, run_knowledge, write_knowledge

DIM = 12


def classes(number: int, images: int, seed: int, spread: float = 0.55) -> tuple[torch.Tensor, list[str]]:
    """Unit vectors of classes that look alike in pairs, as similar species do."""
    generator = torch.Generator().manual_seed(seed)
    pairs = torch.randn((number + 1) // 2, DIM, generator=generator).repeat_interleave(2, 0)[:number]
    centres = torch.nn.functional.normalize(pairs + 0.6 * torch.randn(number, DIM, generator=generator))
    noise = spread * torch.randn(number * images, DIM, generator=generator) / DIM**0.5 * 2
    vectors = torch.nn.functional.normalize(centres.repeat_interleave(images, 0) + noise)
    return vectors, [f"{seed}-{c:03}" for c in range(number) for _ in range(images)]


def filled(folder, vectors, labels) -> Index:
    index = Index.create(folder, DIM, map="none")
    index.add([f"{i:05}" for i in range(len(labels))], vectors, labels=labels)
    return index


def test_centres_follow_their_definition():
    """Two centres for a class of two groups, and an image is left out of its own centre, as if it were not there."""
    generator = torch.Generator().manual_seed(0)
    ends = torch.eye(DIM)[[0] * 6 + [1] * 4 + [2] * 5]
    vectors = torch.nn.functional.normalize(ends + 0.1 * torch.randn(15, DIM, generator=generator))
    labels = ["a"] * 10 + ["b"] * 5
    centres = ClassCentres.of(vectors, labels, per_class=2)
    assert centres.names == ["a", "b"]
    assert len(centres.centre_of[:6].unique()) == len(centres.centre_of[6:10].unique()) == 1
    expected = []
    for row in range(15):
        group = [other for other in range(15) if centres.centre_of[other] == centres.centre_of[row] and other != row]
        own = vectors[row] @ torch.nn.functional.normalize(vectors[group].sum(0), dim=0) if group else -2.0
        rest = [
            vectors[row] @ torch.nn.functional.normalize(centres.sums[c], dim=0)
            for c in range(len(centres.owner))
            if c != centres.centre_of[row] and centres.names[centres.owner[c]] == labels[row]
        ]
        expected.append(max(float(own), *map(float, rest)) if rest else float(own))
    found = centres.scores(vectors, torch.arange(15))
    own_class = torch.tensor([centres.names.index(label) for label in labels])
    np.testing.assert_allclose(found[torch.arange(15), own_class], expected, atol=1e-5)


def test_copies_and_single_images_are_classes_too():
    centres = ClassCentres.of(torch.eye(DIM)[[0, 0, 0, 1]], ["copies"] * 3 + ["single"], per_class=3)
    assert centres.counts.tolist() == [3, 1]
    scores = centres.scores(torch.eye(DIM)[[0, 1]], torch.tensor([0, 3]))
    np.testing.assert_allclose(scores, [[1, 0], [0, -2]], atol=1e-6)


def test_the_rate_that_was_asked_for_is_met_by_new_classes(tmp_path):
    """Over several draws of classes, images of classes that the index does not have are accepted at about the rate."""
    accepted, plain, named = [], [], []
    for seed in range(6):
        vectors, labels = classes(60, 12, seed, spread=0.4)
        order = np.random.default_rng(seed).permutation(60)
        in_index = np.isin(np.arange(720) // 12, order[:30])
        known = in_index & (np.arange(720) % 2 == 0)
        index = filled(tmp_path / f"{seed}.index", vectors[known], [labels[row] for row in np.flatnonzero(known)])
        answers = index.identify(vectors[~in_index], far=0.1)
        accepted.append(np.mean([answer.label is not None for answer in answers]))
        impostors = Identifier(index).impostors
        plain_threshold = np.quantile(impostors.scores(), 0.9)
        plain.append(np.mean([answer.score > plain_threshold for answer in answers]))
        queries = in_index & ~known
        found = index.identify(vectors[queries], far=0.1)
        right = [answer.label == labels[row] for answer, row in zip(found, np.flatnonzero(queries), strict=True)]
        named.append(np.mean(right))
        assert Identifier(index).recognised(0.1) == pytest.approx(np.mean(right), abs=0.15)
    assert 0.07 < np.mean(accepted) < 0.13
    assert np.mean(accepted) < np.mean(plain), "a plain quantile accepts more"
    assert np.mean(named) > 0.4


def test_an_item_is_left_out_of_its_own_class(tmp_path):
    """As if the index had been made without it, also if the query is not quite the vector of the index."""
    vectors, labels = classes(12, 8, 0)
    index = filled(tmp_path / "a.index", vectors, labels)
    items = [index.at(row).id for row in (0, 17, 95)]
    queries = torch.nn.functional.normalize(index.vectors[[0, 17, 95]] + 0.01)
    found = index.identify(queries, far=0.1, without=items)
    plain = index.identify(queries, far=0.1)
    centres = ClassCentres.of(index.vectors, index.labels)
    for query, row, answer, before in zip(queries, (0, 17, 95), found, plain, strict=True):
        centre = int(centres.centre_of[row])
        sums = centres.sums.clone()
        sums[centre] -= index.vectors[row]
        similarities = torch.nn.functional.normalize(sums) @ query
        best = max(range(len(sums)), key=lambda number: float(similarities[number]))
        assert answer.best == centres.names[centres.owner[best]]
        assert answer.similarity == pytest.approx(float(similarities[best]), abs=1e-5)
        assert answer.similarity <= before.similarity
    assert index.identify(queries, far=0.1, without=[None, "another", None]) == plain
    with pytest.raises(ValueError, match="without: got 1 ids for 3 queries"):
        index.identify(queries, without=["00000"])


def test_thresholds_rise_with_strictness_and_rare_events_are_extrapolated(tmp_path):
    index = filled(tmp_path / "a.index", *classes(12, 8, 0))
    identifier = Identifier(index)
    thresholds = [identifier.threshold(far) for far in (0.3, 0.1, 0.03, 0.001, 1e-5)]
    values = [threshold.value for threshold in thresholds]
    assert values == sorted(values)
    assert len(set(values)) == 5
    assert [threshold.is_extrapolated for threshold in thresholds] == [False, False, False, True, True]
    assert all(threshold.low <= threshold.value + 0.05 and threshold.low < threshold.high for threshold in thresholds)
    assert values[-1] > identifier.impostors.scores().max()
    assert all(threshold.high > threshold.value for threshold in thresholds[3:]), "the tail is uncertain to both sides"
    for far in (0.0, 1.0, float("nan")):
        with pytest.raises(ValueError, match="far: got"):
            identifier.threshold(far)


def test_left_out_classes_are_no_answers():
    impostors = Impostors(
        groups=np.array([0, 1, 2]),
        values=np.array([[0.9, 0.5, 0.1], [0.8, 0.4, -2], [0.7, -2, -2]]),
        answers=np.array([[1, 2, 3], [0, 3, 1], [1, 0, 0]]),
        candidates=3,
        classes=4,
    )
    np.testing.assert_allclose(impostors.scores(), [0.75, 0.68, 0.7])
    np.testing.assert_allclose(impostors.scores(without=1), [0.5 - 0.03, 0.68, -2])
    np.testing.assert_allclose(decide(impostors.values)[:1], [0.75])


def test_the_calibration_is_stored_and_follows_the_index(tmp_path):
    index = filled(tmp_path / "a.index", *classes(8, 6, 1))
    assert index.identify(index.vectors[:1], far=0.2)[0].best == index.labels[0]
    stored = (index.folder / FILE).read_bytes()
    Identifier(Index(index.folder))
    assert (index.folder / FILE).read_bytes() == stored
    vectors, _ = classes(2, 6, 9)
    index.add([f"new{i}" for i in range(6)], vectors[:6], labels=["new"] * 6)
    assert index.classes["new"] == 6
    assert index.identify(vectors[:1], far=0.2)[0].best == "new"
    assert (index.folder / FILE).read_bytes() != stored
    (index.folder / FILE).write_bytes(b"damaged")
    assert Identifier(Index(index.folder)).classes == sorted(set(index.labels))


def test_an_index_of_trained_classes_is_calibrated_by_the_held_out_ones(tmp_path):
    vectors, labels = classes(40, 10, 2)
    run = tmp_path / "run"
    run.mkdir()
    trained, held_out = sorted(set(labels))[:20], sorted(set(labels))[20:]
    uncertainty = {name: 1.0 + 0.1 * number for number, name in enumerate(trained)}
    rows = [row for row, label in enumerate(labels) if label in held_out]
    write_knowledge(run, RunKnowledge(trained, vectors[rows], [labels[row] for row in rows], uncertainty))
    index = Index.create(tmp_path / "a.index", DIM, map="none", run={"run": str(run)})
    known = [row for row, label in enumerate(labels) if label in trained]
    ids = [f"{row:05}" for row in known]
    index.add(ids, vectors[known], labels=[labels[row] for row in known])
    identifier = Identifier(index)
    assert identifier.facts["source"] == "held-out"
    assert "20 of the 20 classes were trained on" in identifier.note
    assert "200 images of 20 held-out classes" in identifier.note
    accepted = np.mean([answer.label is not None for answer in identifier(vectors[rows], 0.1)])
    assert accepted == pytest.approx(0.1, abs=0.03)
    answer = identifier(vectors[known[:1]], 0.1)[0]
    assert answer.uncertainty == uncertainty[answer.best]
    index.add(["new1", "new2"], torch.eye(DIM)[[0, 0]] + 0.01, labels=["new", "new"])
    new = index.identify(torch.eye(DIM)[:1], 0.1)[0]
    assert (new.best, new.uncertainty, new.has_uncertainty) == ("new", None, True), "a new class has no uncertainty"
    (run / HELD_OUT).unlink()
    assert run_knowledge(run).trained == []
    assert "not known" in Identifier(Index(index.folder), run=tmp_path).note


def test_the_calibration_follows_what_the_run_knows(tmp_path):
    """`evaluate` may write the held-out vectors of a run after an index was calibrated without them."""
    vectors, labels = classes(20, 6, 5)
    run = tmp_path / "run"
    run.mkdir()
    index = filled(tmp_path / "a.index", vectors[:60], labels[:60])
    assert Identifier(index, run=run).facts["source"] == "index"
    write_knowledge(run, RunKnowledge(sorted(set(labels[:60])), vectors[60:], labels[60:], {}))
    assert Identifier(index, run=run).facts["source"] == "held-out"
    (run / HELD_OUT).unlink()
    assert Identifier(index, run=run).facts["source"] == "held-out", "a run that is gone changes nothing"


def test_held_out_vectors_are_cut_as_the_index_is(tmp_path):
    vectors, labels = classes(40, 10, 3)
    trained, run, dim = sorted(set(labels))[:20], tmp_path / "run", vectors.shape[1] // 2
    run.mkdir()
    rows = [row for row, label in enumerate(labels) if label not in trained]
    write_knowledge(run, RunKnowledge(trained, vectors[rows], [labels[row] for row in rows], {}))
    known = [row for row, label in enumerate(labels) if label in trained]
    index = Index.create(tmp_path / "cut.index", dim, map="none", run={"run": str(run)})
    index.add([f"{row:05}" for row in known], vectors[known, :dim], labels=[labels[row] for row in known])
    identifier = Identifier(index)
    assert identifier.facts["source"] == "held-out"
    assert "200 images of 20 held-out classes" in identifier.note


def test_the_uncertainty_of_classes_is_used_where_it_names_more_images(tmp_path):
    spreads = [0.3] * 10 + [0.8] * 10
    parts = [classes(20, 10, 3, spread) for spread in spreads]
    vectors = torch.cat([part[0][10 * c : 10 * c + 10] for c, part in enumerate(parts)])
    labels = [f"c{c:02}" for c in range(20) for _ in range(10)]
    run = tmp_path / "run"
    run.mkdir()
    doubt = {f"c{c:02}": spread for c, spread in enumerate(spreads)}
    # Images of other classes look like those of the uncertain ones.
    held_out = vectors[100:] + 0.15 * torch.randn(100, DIM, generator=torch.Generator().manual_seed(0))
    names = [f"h{label}" for label in labels[100:]]
    write_knowledge(run, RunKnowledge(list(doubt), held_out, names, doubt))
    with_doubt = filled(tmp_path / "a.index", vectors, labels)
    identifier, plain = Identifier(with_doubt, run=run), run.with_name("plain")
    plain.mkdir()
    write_knowledge(plain, RunKnowledge(list(doubt), held_out, names, {}))
    without = Identifier(with_doubt, run=plain)
    assert float(without.offsets.abs().max()) == 0
    assert identifier.recognised(0.1) > without.recognised(0.1)
    weight = identifier.facts["uncertainty_weight"]
    assert weight != 0
    assert (weight * (identifier.offsets[10:] - identifier.offsets[:10].max()) > 0).all(), "uncertain classes differ"
    way = "more" if weight > 0 else "less"
    assert f"classes with a high uncertainty are accepted {way} readily, which names more images" in identifier.note
    assert "uncertainty" not in without.note


def test_mistakes_are_refused(tmp_path):
    index = Index.create(tmp_path / "a.index", DIM, map="none")
    index.add(["a"], torch.eye(DIM)[:1])
    with pytest.raises(ValueError, match="where no item has a class"):
        index.identify(torch.eye(DIM)[:1])
    index.update(["a"], labels=["only"])
    with pytest.raises(ValueError, match="far: got 1 classes to calibrate with, expected at least 2"):
        index.identify(torch.eye(DIM)[:1])
    with pytest.raises(ValueError, match=r"queries: got a tensor of shape \(1, 3\)"):
        index.identify(torch.zeros(1, 3))


def test_a_few_changes_are_followed_without_a_new_calibration(tmp_path):
    """The centres are those of the items that are there; a new class is an answer at once."""
    vectors, labels = classes(40, 12, 0)
    index = filled(tmp_path / "a.index", vectors, labels)
    index.identify(vectors[:1], far=0.1)
    stored = (index.folder / FILE).read_bytes()
    new, _ = classes(1, 3, 77)
    index.add(["n0", "n1", "n2"], new, labels=["new"] * 3)
    index.delete(["00000", "00013"])
    index.update(["00030"], labels=[labels[60]])
    for opened in (index, Index(index.folder)):
        answer = opened.identify(new[:1] + 0.01, far=0.1)[0]
        assert answer.label == "new"
        identifier = Identifier(opened)
        assert identifier.changes == 6
        assert "the threshold is that of before the last changes, of 6 items" in identifier.note
        members = [[row for row, label in enumerate(opened.labels) if label == name] for name in identifier.classes]
        for code, rows in enumerate(members):
            of_class = identifier.centres.owner == code
            summed = identifier.centres.sums[of_class].sum(0)
            torch.testing.assert_close(summed, opened.vectors[rows].sum(0), atol=1e-5, rtol=0)
            assert int(identifier.centres.counts[of_class].sum()) == len(rows)
    assert (index.folder / FILE).read_bytes() == stored
    without = index.identify(new[:1], far=0.1, without=["n0"])[0]
    assert without.similarity < index.identify(new[:1], far=0.1)[0].similarity
    index.renew()
    assert (index.folder / FILE).read_bytes() != stored
    assert Identifier(index).changes == 0
    index.delete([f"{number:05}" for number in range(100, 160)])
    assert Identifier(index).changes == 0, "too many changes: it was calibrated anew"
