"""Rankings and metrics against loops over the definitions."""

from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oracles import metrics as oracle
from proxymetric.metrics import evaluate, left_out, per_query, rank, scores
from proxymetric.metrics.ranking import Ranking, search
from proxymetric.metrics.similarity import _distinct

NAMES = ["R@1", "R@3", "R@50", "P@1", "P@4", "P@R", "MAP@R", "MAP@1", "MAP@5", "nDCG@1", "nDCG@4", "nDCG@20"]

# Directions whose lengths are powers of two: their cosines are exact in any precision, so ties are real ties.
DIRECTIONS = [(0, 0, 0, 0), (1, 0, 0, 0), (0, -2, 0, 0), (0, 0, 4, 0), (1, 1, 1, 1), (2, -2, 2, 2), (-1, 1, -1, 1)]
# Whole numbers: exact squared distances.
CORNERS = [(0, 0), (1, 0), (0, 1), (2, 1), (-1, 2), (3, 3)]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Small problems: more threads only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@st.composite
def problems(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, np.ndarray | None, np.ndarray | None, str]:
    distance = draw(st.sampled_from(["cosine", "euclidean"]))
    rows = st.sampled_from(DIRECTIONS if distance == "cosine" else CORNERS)

    def some(least: int) -> tuple[np.ndarray, np.ndarray]:
        vectors = draw(st.lists(rows, min_size=least, max_size=14))
        labels = draw(st.lists(st.integers(-1, 3), min_size=len(vectors), max_size=len(vectors)))
        return np.array(vectors, dtype=draw(st.sampled_from(["float32", "float64", "int64"]))), np.array(labels)

    embeddings, labels = some(2)
    gallery, gallery_labels = some(1) if draw(st.booleans()) else (None, None)
    return embeddings, labels, gallery, gallery_labels, distance


@settings(max_examples=200, deadline=None)
@given(problems(), st.sampled_from([None, 1, 5]), st.integers(1, 20))
def test_ties_and_values_like_the_oracle(problem: tuple, block: int | None, k: int) -> None:
    embeddings, labels, gallery, gallery_labels, distance = problem
    lists = oracle.results(embeddings, gallery, distance)
    expected, nobody = oracle.all_queries(NAMES, *problem[:4], distance=distance)
    options = {"gallery": gallery, "gallery_labels": gallery_labels, "distance": distance, "block": block}

    ranking = rank(embeddings, labels, k, **options)
    assert ranking.left_out == nobody == left_out(labels, gallery_labels)
    assert ranking.hits.shape == ranking.neighbours.shape == (len(labels) - nobody, k)
    for row, query in enumerate(ranking.queries.tolist()):
        wanted = [*lists[query][:k], *[-1] * (k - len(lists[query]))]
        assert ranking.neighbours[row].tolist() == wanted

    if nobody == len(labels):
        with pytest.raises(ValueError, match=f"none of the {nobody} queries"):
            evaluate(embeddings, labels, NAMES, **options)
        return
    found = evaluate(embeddings, labels, NAMES, **options)
    assert found == pytest.approx({name: np.mean(values) for name, values in expected.items()}, abs=1e-12)
    deep = rank(embeddings, labels, 50, **options)
    for name, values in per_query(deep, NAMES).items():
        assert values.tolist() == pytest.approx(expected[name], abs=1e-12)
    assert scores(deep, NAMES) == pytest.approx(found, abs=1e-12)


@pytest.mark.parametrize("distance", ["cosine", "euclidean"])
@pytest.mark.parametrize("repeated", [False, True])
def test_random_vectors_like_the_oracle(distance: str, repeated: bool) -> None:
    draw = np.random.default_rng(3)
    embeddings = draw.normal(size=(90, 7))
    if repeated:
        embeddings = embeddings[draw.integers(0, 12, 90)]
    labels = draw.integers(0, 12, 90)
    expected, _ = oracle.all_queries(NAMES, embeddings, labels, distance=distance)
    found = evaluate(embeddings, labels, NAMES, distance=distance)
    assert found == pytest.approx({name: np.mean(values) for name, values in expected.items()}, abs=1e-12)


@pytest.mark.parametrize("memory", [2**28, 1])
def test_duplicates_tie_exactly_in_float32_wherever_they_stand(memory: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A product's edge columns may be summed in another order (here: one query at a time, where the budget is one
    byte): copies must still come in the gallery's order."""
    monkeypatch.setattr("proxymetric.metrics.ranking.MEMORY", memory)
    torch.manual_seed(0)
    few = torch.randn(11, 67)
    kind = torch.randint(0, 11, (1003,))
    queries = torch.randn(301, 67)
    found = rank(queries, torch.zeros(301, dtype=torch.long), 1003, gallery=few[kind], gallery_labels=[0] * 1003)
    for row in found.neighbours:
        groups = kind[row]
        starts = torch.cat(
            [torch.tensor([0]), (groups[1:] != groups[:-1]).nonzero().flatten() + 1, torch.tensor([1003])]
        )
        assert len(starts) == 12  # each kind is one run of results
        for start, stop in pairwise(starts.tolist()):
            assert (row[start:stop].diff() > 0).all()


def test_two_rows_of_one_hash_are_still_two_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """All hash factors zero: every row has the same hash."""
    monkeypatch.setattr(torch, "randint", lambda *args, **options: torch.full(args[2], -0.5))
    first, group = _distinct(torch.tensor([[2.0, 1.0], [1.0, 1.0], [2.0, 1.0], [0.0, 3.0], [-0.0, 3.0]]))
    assert sorted(first.tolist()) == [0, 1, 3]
    assert first[group].tolist() == [0, 1, 0, 3, 3]


def test_multiples_of_a_vector_are_the_same_direction() -> None:
    pixels = torch.tensor([[3, 7, 11], [9, 21, 33], [6, 14, 22], [1, 0, 0]], dtype=torch.uint8)
    found = rank(pixels, [0, 0, 0, 1], 2, gallery=pixels.flip(0), gallery_labels=[1, 0, 0, 0])
    assert found.neighbours[:3].tolist() == [[1, 2]] * 3


@pytest.mark.parametrize("distance", ["cosine", "euclidean"])
def test_the_block_changes_nothing_to_the_last_bit(distance: str) -> None:
    torch.manual_seed(1)
    embeddings = torch.randn(700, 33).repeat(2, 1)[torch.randperm(1400)]
    labels = (torch.randn(1400).abs() * 20).long()  # classes of very different sizes
    whole = evaluate(embeddings, labels, NAMES, distance=distance)
    first = rank(embeddings, labels, distance=distance)
    for block in (1, 129, 300, 100_000):
        assert evaluate(embeddings, labels, NAMES, distance=distance, block=block) == whole
        for a, b in zip(rank(embeddings, labels, distance=distance, block=block), first):
            assert torch.equal(torch.as_tensor(a), torch.as_tensor(b))
    assert scores(rank(embeddings, labels, 300, distance=distance), NAMES) == pytest.approx(whole, abs=1e-12)


def test_a_small_memory_budget_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(2)
    embeddings = torch.randn(300, 5, dtype=torch.float64)
    labels = torch.arange(300) % 40
    whole = evaluate(embeddings, labels, NAMES)
    monkeypatch.setattr("proxymetric.metrics.ranking.MEMORY", 20_000)
    task = search(embeddings, labels, None, None, "cosine", None, None)
    sizes = [len(found.queries) for found in task.run(lambda relevant: relevant)]
    assert max(sizes) * 300 * 8 <= 20_000
    assert sum(sizes) == 300
    assert evaluate(embeddings, labels, NAMES) == pytest.approx(whole, abs=1e-12)


# Table 3 of the MPA paper: the first ten results of a query with four relevant items, in per cent.
TABLE_3 = [
    ([1, 0, 0, 0, 0, 0, 0, 0, 0, 0], [100.0, 10.0, 25.0, 10.0, 39.0]),
    ([1, 0, 0, 0, 0, 0, 0, 0, 0, 1], [100.0, 20.0, 25.0, 12.0, 50.3]),
    ([1, 0, 1, 0, 0, 0, 0, 0, 0, 0], [100.0, 20.0, 41.7, 16.7, 58.6]),
    ([1, 0, 1, 0, 0, 0, 1, 0, 0, 1], [100.0, 40.0, 41.7, 25.0, 82.9]),
    ([1, 1, 1, 1, 0, 0, 0, 0, 0, 0], [100.0, 40.0, 100.0, 40.0, 100.0]),
]
COLUMNS = ["R@10", "P@10", "MAP@R", "MAP@10", "nDCG@10"]


@pytest.mark.parametrize(("pattern", "printed"), TABLE_3)
def test_table_3_of_the_mpa_paper(pattern: list[int], printed: list[float]) -> None:
    hits = torch.tensor([pattern], dtype=torch.bool)
    ranking = Ranking(hits, torch.tensor([4]), torch.arange(10)[None], torch.tensor([0]), 0)
    assert [round(100 * value, 1) for value in scores(ranking, COLUMNS).values()] == printed
    # The same from vectors: one query, items ever farther away, the relevant ones that the list lacks at the end.
    labels = [1 - hit for hit in pattern] + [0] * (4 - sum(pattern))
    gallery = torch.tensor([[1.0, 0.1 * place] for place in range(len(labels))])
    found = evaluate(torch.tensor([[1.0, 0.0]]), [0], COLUMNS, gallery=gallery, gallery_labels=labels)
    assert [round(100 * value, 1) for value in found.values()] == printed


def test_equal_to_pytorch_metric_learning() -> None:
    calculators = pytest.importorskip("pytorch_metric_learning.utils.accuracy_calculator")
    torch.manual_seed(4)
    labels = torch.randint(0, 25, (400,))
    embeddings = torch.nn.functional.normalize(torch.randn(400, 16) + 0.8 * torch.randn(25, 16)[labels])
    wanted = ("precision_at_1", "r_precision", "mean_average_precision_at_r")
    theirs = calculators.AccuracyCalculator(include=wanted, k="max_bin_count", device=torch.device("cpu")).get_accuracy(
        embeddings, labels
    )
    ours = evaluate(embeddings, labels, ["P@1", "P@R", "MAP@R"])
    assert list(ours.values()) == pytest.approx([theirs[name] for name in wanted], abs=1e-6)
    assert 0.2 < ours["MAP@R"] < 0.9  # neither chance nor perfect
