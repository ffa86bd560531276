"""Error rates of pairs against loops over their definitions."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oracles import verification as oracle
from proxymetric.metrics import evaluate, verification
from proxymetric.metrics import pairs as pairs_module
from proxymetric.metrics import verification_intervals as intervals_module
from proxymetric.metrics.names import names, parse
from proxymetric.metrics.pairs import STEPS, Tally
from proxymetric.metrics.ranking import search
from proxymetric.metrics.verification_intervals import resample, verification_estimate

RATES = (0.0, 0.1, 1 / 3, 1.0)


@st.composite
def problems(draw: st.DrawFn) -> dict:
    """Few vectors with many ties: copies, multiples, orthogonal ones, zeros, and similarities next to each other."""
    dim = draw(st.integers(1, 3))
    step = draw(st.sampled_from([0.0, 1e-9, 2.0**-16, 1e-5]))
    number = st.tuples(st.integers(-2, 2), st.integers(-1, 1)).map(lambda pair: pair[0] + step * pair[1])
    stock = draw(st.lists(st.tuples(*[number] * dim), min_size=2, max_size=5))
    kind = draw(st.sampled_from(["float32", "float64"]))

    def some() -> tuple[np.ndarray, list[int]]:
        rows = draw(st.lists(st.sampled_from(stock), min_size=3, max_size=9))
        # A genuine and an impostor pair are there in any case.
        labels = [0, 0, 1, *draw(st.lists(st.integers(0, 2), min_size=len(rows) - 3, max_size=len(rows) - 3))]
        return np.array(rows).astype(kind), labels

    vectors, labels = some()
    if draw(st.booleans()):
        return {"embeddings": vectors, "labels": labels}
    gallery, gallery_labels = some()
    return {"embeddings": vectors, "labels": labels, "gallery": gallery, "gallery_labels": gallery_labels}


@given(problem=problems())
@settings(max_examples=25, deadline=None)
def test_error_rates_follow_their_definitions(problem):
    genuine, impostor = oracle.pair_scores(**problem)
    found = verification(**problem, fmr=RATES)
    assert found.pairs == (len(genuine), len(impostor))
    assert found.eer == pytest.approx(float(oracle.equal_error_rate(genuine, impostor)), abs=1e-12)
    for rate in RATES:
        missed, threshold = oracle.fnmr_at_fmr(genuine, impostor, rate)
        point = found.points[rate]
        assert point.fnmr == float(missed)
        assert point.fmr <= rate
        if threshold >= -1:
            assert point.threshold == float(threshold)
            assert point.fmr == float(oracle.rates(genuine, impostor, threshold)[0])
    for threshold, fmr, fnmr in zip(*found.roc):
        expected = oracle.rates(genuine, impostor, round(threshold * STEPS) / oracle.Fraction(STEPS))
        assert (fmr, fnmr) == tuple(map(float, expected))


def test_blocks_do_not_change_the_result(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    vectors, labels = torch.randn(90, 8, generator=generator), torch.arange(90) % 7
    whole = verification(vectors, labels, RATES)
    sides = {"gallery": vectors[50:], "gallery_labels": labels[50:]}
    against = verification(vectors[:50], labels[:50], RATES, **sides)
    monkeypatch.setattr(pairs_module, "BLOCK_ROWS", 16)
    monkeypatch.setattr(pairs_module, "MAX_CELLS", 16 * 24)
    blockwise = verification(vectors, labels, RATES)
    assert (blockwise.pairs, blockwise.eer, blockwise.points) == (whole.pairs, whole.eer, whole.points)
    assert verification(vectors[:50], labels[:50], RATES, **sides).points == against.points
    assert sum(whole.pairs) == 90 * 89 // 2
    assert sum(against.pairs) == 50 * 40


def test_similarities_in_the_middle_between_two_steps_are_decided_exactly():
    # The cosines are k / 2^33: half of them lie exactly in the middle, where float64 products may go either way.
    numbers = torch.tensor([0.0, 1.0, 2.0, 3.0, 5.0, 7.0], dtype=torch.float64) / 2**33
    vectors = torch.stack([numbers, (1 - numbers**2).sqrt()], dim=1)
    problem = {
        "embeddings": torch.cat([vectors, torch.eye(2, dtype=torch.float64)]).numpy(),
        "labels": [0, 0, 1, 1, 2, 2, 0, 1],
    }
    genuine, impostor = oracle.pair_scores(**problem)
    point = verification(**problem, fmr=[0.2]).points[0.2]
    missed, threshold = oracle.fnmr_at_fmr(genuine, impostor, 0.2)
    assert (point.threshold, point.fnmr) == (float(threshold), float(missed))


def test_intervals_of_classes_cover_what_new_classes_score():
    """Intervals from half of the classes hold the rates of the other half, and resamples of one seed are paired."""
    generator = torch.Generator().manual_seed(0)
    centres = torch.randn(60, 16, generator=generator)
    labels = torch.arange(480) % 60
    vectors = centres[labels] + 0.9 * torch.randn(480, 16, generator=generator)
    first, second = labels < 30, labels >= 30
    task = search(vectors[first], labels[first], None, None, "cosine", None, None)
    found = verification_estimate(task, [0.1, 0.01], repeats=200)
    others = verification(vectors[second], labels[second], [0.1, 0.01])
    assert found.eer.low < found.eer.value < found.eer.high
    assert found.eer.low < others.eer < found.eer.high
    for rate, point in found.points.items():
        assert point.threshold.low < point.threshold.value < point.threshold.high
        assert point.fnmr.low < point.fnmr.value < point.fnmr.high
        assert point.fnmr.low < others.points[rate].fnmr < point.fnmr.high
        assert 0.9 * rate < point.fmr <= rate
    again = resample(task, [0.1], repeats=200)
    nearly = search(vectors[first] + 1e-4, labels[first], None, None, "cosine", None, None)
    differences = again.eer - resample(nearly, [0.1], repeats=200).eer
    assert np.abs(differences).max() < 0.1 * (found.eer.high - found.eer.low)


def test_resamples_are_the_rates_of_the_drawn_classes(monkeypatch):
    """A resample equals the rates of a set that holds each class as often as it was drawn."""
    generator = torch.Generator().manual_seed(1)
    labels = torch.arange(24) % 4
    vectors = torch.eye(4)[labels] + 0.7 * torch.randn(24, 4, generator=generator)

    def edges_of_every_similarity(tally: Tally) -> np.ndarray:
        occupied = np.flatnonzero(tally.genuine + tally.impostor)
        return np.unique([occupied, occupied + 1])

    monkeypatch.setattr(intervals_module, "_edges", edges_of_every_similarity)
    task = search(vectors, labels, None, None, "cosine", None, None)
    values = resample(task, [0.1], repeats=12, seed=5).eer
    draws = np.random.default_rng(5).integers(4, size=(12, 4))
    genuine, impostor = {}, {}
    for a in range(4):
        for b in range(a, 4):
            rows, columns = vectors[labels == a].numpy(), vectors[labels == b].numpy()
            if a == b:
                genuine[a] = oracle.pair_scores(rows, [0] * 6)[0]
            else:
                impostor[a, b] = oracle.pair_scores(rows, [0] * 6, columns, [1] * 6)[1]
    for value, drawn in zip(values, draws, strict=True):
        classes = sorted(drawn.tolist())
        same = [score for a in classes for score in genuine[a]]
        pairs = [(a, b) for i, a in enumerate(classes) for b in classes[i + 1 :] if a != b]
        different = [score for pair in pairs for score in impostor[pair]]
        if not different:
            assert np.isnan(value)
        else:
            assert value == pytest.approx(float(oracle.equal_error_rate(same, different)), abs=1e-9)


@pytest.mark.parametrize("with_gallery", [False, True])
@pytest.mark.parametrize("with_differs", [False, True])
def test_a_rate_without_enough_pairs_has_no_figure(with_gallery: bool, with_differs: bool) -> None:
    """The number of impostor pairs is counted one by one here."""
    generator = torch.Generator().manual_seed(0)
    count = 17
    vectors, labels, values = (
        torch.randn(count, 3, generator=generator),
        torch.arange(count) % 4,
        torch.arange(count) % 5,
    )
    queries = list(range(6)) if with_gallery else list(range(count))
    items = list(range(6, count)) if with_gallery else queries
    pairs = sum(
        bool(labels[i] != labels[j] and not (with_differs and values[i] == values[j]))
        for i in queries
        for j in items
        if with_gallery or i < j
    )
    sides = {"embeddings": vectors[queries], "labels": labels[queries]}
    if with_gallery:
        sides |= {"gallery": vectors[items], "gallery_labels": labels[items]}
    if with_differs:
        sides |= {"differs": values[queries]} | ({"gallery_differs": values[items]} if with_gallery else {})
    enough, too_low = f"FNMR@FMR={1 / pairs!r}", f"FNMR@FMR={0.999 / pairs!r}"
    with pytest.warns(UserWarning, match="the figure is left out") as caught:
        found = evaluate(**sides, metrics=[too_low, "EER", enough, "FNMR@FMR=0"])
    assert list(found) == ["EER", enough, "FNMR@FMR=0"]
    (said,) = (str(each.message) for each in caught)
    assert said.startswith(f"{too_low}: got {pairs} pairs of different classes, expected at least {pairs + 1}, ")
    assert caught[0].filename == __file__
    with pytest.warns(UserWarning, match="expected at least 10,000,000, so that one false match is a rate of 1e-07"):
        assert evaluate(**sides, metrics="FNMR@FMR=1e-7") == {}


def test_names_and_evaluate():
    assert names(["EER", "FNMR@FMR=0.001", "FNMR@FMR=1e-4"]) == ("EER", "FNMR@FMR=0.001", "FNMR@FMR=1e-4")
    assert parse("FNMR@FMR=1e-4").fmr == 1e-4
    assert [parse(name).lower_is_better for name in ("EER", "FNMR@FMR=0.1", "MAP@R")] == [True, True, False]
    for wrong, nearest in (("eer", "EER"), ("FNMR@0.01", "FNMR@FMR=0.01"), ("fnmr", "FNMR@FMR=0.001")):
        with pytest.raises(ValueError, match=f"did you mean '{nearest}'"):
            names([wrong])
    with pytest.raises(ValueError, match="expected a false-match rate from 0 to 1"):
        names(["FNMR@FMR=2"])
    vectors = torch.tensor([[1.0, 0.0], [0.8, 0.6], [0.0, 1.0], [0.6, 0.8]])
    found = evaluate(vectors, [0, 0, 1, 1], ["FNMR@FMR=0.25", "R@1", "EER"])
    assert found == {"FNMR@FMR=0.25": 0.0, "R@1": 0.5, "EER": 0.25}
    with pytest.raises(ValueError, match="distance: got 'euclidean', expected 'cosine'"):
        evaluate(vectors, [0, 0, 1, 1], "EER", distance="euclidean")
    with pytest.raises(ValueError, match="labels: got no impostor pair"):
        verification(vectors, [0, 0, 0, 0])
    with pytest.raises(ValueError, match="labels: got no genuine pair"):
        verification(vectors, [0, 1, 2, 3])
    with pytest.raises(ValueError, match=r"fmr: got 1\.5, expected"):
        verification(vectors, [0, 0, 1, 1], fmr=[1.5])
