"""Rankings and metrics against loops over the definitions."""

from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oracles import metrics as oracle
from proxymetric.metrics import evaluate, kmeans, left_out, per_query, rank, scores
from proxymetric.metrics.knn.duplicates import distinct
from proxymetric.metrics.ranking import Ranking, search
from sampled import examples

NAMES = [
    "R@1",
    "R@3",
    "R@50",
    "P@1",
    "P@4",
    "P@R",
    "MAP@R",
    "MAP@1",
    "MAP@5",
    "AP@1",
    "AP@5",
    "AP@50",
    "AP",
    "MRR",
    "MRR@1",
    "MRR@4",
    "nDCG@1",
    "nDCG@4",
    "nDCG@20",
]


CUT_NAMES = [name for name in NAMES if name not in ("AP", "MRR")]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Use one thread: for small problems, more threads only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@st.composite
def problems(draw: st.DrawFn) -> dict:
    """Few items with many ties: whole numbers, copies, multiples, and numbers that float32 cannot tell apart."""
    dim = draw(st.integers(1, 4))
    kind = draw(st.sampled_from(["float32", "float64", "int64"]))
    numbers = st.integers(-2, 3).map(float)
    if kind != "int64":
        step = draw(st.sampled_from([0.0, 1e-8, 2.0**-13, 1e-15]))
        numbers = st.tuples(numbers, st.integers(-2, 2)).map(lambda pair: pair[0] + step * pair[1])
    stock = draw(st.lists(st.tuples(*[numbers] * dim), min_size=1, max_size=6))
    far = draw(st.sampled_from([0.0, 1e4])) if kind != "int64" else 7.0

    def some(least: int) -> tuple[np.ndarray, np.ndarray]:
        rows = draw(st.lists(st.sampled_from(stock), min_size=least, max_size=12))
        labels = draw(st.lists(st.integers(-1, 3), min_size=len(rows), max_size=len(rows)))
        return (np.array(rows) + far).astype(kind), np.array(labels)

    embeddings, labels = some(2)
    gallery, gallery_labels = some(1) if draw(st.booleans()) else (None, None)
    return {
        "embeddings": embeddings,
        "labels": labels,
        "gallery": gallery,
        "gallery_labels": gallery_labels,
        "distance": draw(st.sampled_from(["cosine", "euclidean"])),
    }


@st.composite
def settings_of_the_search(draw: st.DrawFn) -> dict[str, object]:
    """Small problems would always be ranked by whole rows on the CPU: make the tiles and the memory small too."""
    inside: dict[str, object] = {}
    if draw(st.booleans()):
        inside["knn.topk.use_numpy"] = lambda _: False  # as on a GPU
    if draw(st.booleans()):
        inside["knn.search.MIN_ITEMS_PER_RESULT"] = 0
        inside["knn.search.TILE_ROWS"] = {"cpu": draw(st.integers(1, 7))}
        inside["knn.search.MEMORY_BYTES"] = draw(st.sampled_from([2**28, 500]))
        inside["knn.candidates.SPARE_PER_QUERY"] = draw(st.sampled_from([64, 0]))
    return inside


@settings(max_examples=examples(150), deadline=None)
@given(problems(), settings_of_the_search(), st.sampled_from([None, None, 1, 5]), st.integers(1, 15))
def test_ties_and_values_like_the_oracle(problem: dict, inside: dict, block: int | None, k: int) -> None:
    lists = oracle.results(problem["embeddings"], problem["gallery"], problem["distance"])
    expected, nobody = oracle.all_queries(NAMES, lists, problem["labels"], problem["gallery_labels"])
    with pytest.MonkeyPatch.context() as patch:
        set_inside(patch, inside)
        ranking = rank(**problem, k=k, block=block)
        assert ranking.left_out == nobody == left_out(problem["labels"], problem["gallery_labels"])
        assert ranking.hits.shape == ranking.neighbours.shape == (len(lists) - nobody, k)
        for row, query in enumerate(ranking.queries.tolist()):
            wanted = [*lists[query][:k], *[-1] * (k - len(lists[query]))]
            assert ranking.neighbours[row].tolist() == wanted

        if nobody == len(lists):
            with pytest.raises(ValueError, match=f"labels: got {nobody} queries without"):
                evaluate(**problem, metrics=NAMES, block=block)
            return
        found = evaluate(**problem, metrics=NAMES, block=block)
        deep = rank(**problem, k=50, block=block)
    assert found == pytest.approx({name: np.mean(values) for name, values in expected.items()}, abs=1e-12)
    for name, values in per_query(deep, NAMES).items():
        assert values.tolist() == pytest.approx(expected[name], abs=1e-12)
    assert scores(deep, NAMES) == pytest.approx(found, abs=1e-12)


@pytest.mark.parametrize("distance", ["cosine", "euclidean"])
@pytest.mark.parametrize("repeated", [False, True])
def test_random_vectors_like_the_oracle(distance: str, repeated: bool) -> None:
    draw = np.random.default_rng(3)
    embeddings = draw.normal(size=(60, 5))
    if repeated:
        embeddings = embeddings[draw.integers(0, 12, 60)]
    labels = draw.integers(0, 12, 60)
    expected, _ = oracle.all_queries(NAMES, oracle.results(embeddings, distance=distance), labels)
    found = evaluate(embeddings, labels, NAMES, distance=distance)
    assert found == pytest.approx({name: np.mean(values) for name, values in expected.items()}, abs=1e-12)


BY_TILES = {"knn.search.MIN_ITEMS_PER_RESULT": 0, "knn.search.TILE_ROWS": {"cpu": 5}}
BY_ROWS = {"knn.search.MIN_ITEMS_PER_RESULT": 10**6}


def set_inside(patch: pytest.MonkeyPatch, inside: dict) -> None:
    for name, value in inside.items():
        patch.setattr(f"proxymetric.metrics.{name}", value)


@pytest.mark.parametrize("inside", [BY_TILES, BY_ROWS])
@pytest.mark.parametrize("distance", ["cosine", "euclidean"])
def test_ties_of_real_numbers_that_float64_would_break(
    inside: dict, distance: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Permuted and multiplied vectors are equally far from a diagonal; their float64 products differ by rounding."""
    set_inside(monkeypatch, inside)
    draw = np.random.default_rng(0)
    vector = draw.normal(size=37)
    gallery = np.stack([draw.permutation(vector) for _ in range(40)]).astype("float32")
    if distance == "cosine":
        gallery *= 2.0 ** draw.integers(-3, 4, size=(40, 1))
    found = rank(np.full((1, 37), 0.7), [0], 30, gallery=gallery, gallery_labels=[0] * 40, distance=distance)
    assert found.neighbours[0].tolist() == list(range(30))


@pytest.mark.parametrize("inside", [BY_TILES, BY_ROWS])
def test_how_fine_is_exact(inside: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cosines (1 - 2^-62 j^2) / sqrt 2 and 1 - 2^-67 j^2 are all the same in float64; differences of 2^-90 are ties."""
    set_inside(monkeypatch, inside)
    query = torch.tensor([[1.0, 0.0, 0.0]], dtype=torch.float64)
    elsewhere = torch.tensor([[-1.0, 0.0, 0.0]], dtype=torch.float64)  # so that the directions are not all close
    steps = torch.arange(19, -1, -1, dtype=torch.float64)
    for side, power in ((1.0, -30), (0.0, -33), (0.0, -46)):
        items = torch.stack([torch.ones(20), torch.full((20,), side), steps * 2.0**power], dim=1).double()
        wanted = list(range(20)) if power == -46 else list(range(19, -1, -1))
        for gallery in (items, torch.cat([items, elsewhere])):
            found = rank(query, [0], 20, gallery=gallery, gallery_labels=[0] * len(gallery))
            assert found.neighbours[0].tolist() == wanted


@pytest.mark.parametrize("crowd", [1e-7, 1e-5, 1e-3])
@pytest.mark.parametrize("others", [0, 700])
def test_a_crowd_of_nearly_equal_directions(crowd: float, others: int) -> None:
    """More near-ties than the pool keeps, with and without vectors elsewhere; -|q/|q| - g/|g||^2 is precise there."""
    torch.manual_seed(0)
    vectors = torch.cat([1 + crowd * torch.randn(300, 8).double(), torch.randn(others, 8).double()])
    unit = torch.nn.functional.normalize(vectors)
    scores = -(unit[:, None] - unit).square().sum(dim=2)
    scores.fill_diagonal_(-torch.inf)
    found = rank(vectors, torch.zeros(len(vectors), dtype=torch.long), 3).neighbours
    assert torch.equal(found, scores.sort(dim=1, descending=True, stable=True).indices[:, :3])


@pytest.mark.parametrize("memory", [2**28, 1])
def test_duplicates_tie_exactly_in_float32_wherever_they_stand(memory: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A product's edge columns may be summed in another order (here: one query at a time, where the budget is one
    byte): copies must still come in the gallery's order."""
    monkeypatch.setattr("proxymetric.metrics.knn.search.MEMORY_BYTES", memory)
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
    group = distinct(torch.tensor([[2.0, 1.0], [1.0, 1.0], [2.0, 1.0], [0.0, 3.0], [-0.0, 3.0]]))
    assert group is not None
    a, b, c, d, e = group.tolist()
    assert a == c != b
    assert d == e
    assert len({a, b, d}) == 3
    assert distinct(torch.tensor([[2.0, 1.0], [1.0, 1.0]])) is None


def test_multiples_of_a_vector_are_the_same_direction() -> None:
    pixels = torch.tensor([[3, 7, 11], [9, 21, 33], [6, 14, 22], [1, 0, 0]], dtype=torch.uint8)
    found = rank(pixels, [0, 0, 0, 1], 2, gallery=pixels.flip(0), gallery_labels=[1, 0, 0, 0])
    assert found.neighbours[:3].tolist() == [[1, 2]] * 3


@pytest.mark.parametrize("distance", ["cosine", "euclidean"])
def test_the_block_changes_nothing_to_the_last_bit(distance: str) -> None:
    torch.manual_seed(1)
    embeddings = torch.randn(300, 33).repeat(2, 1)[torch.randperm(600)]
    labels = (torch.randn(600).abs() * 20).long()  # classes of very different sizes
    whole = evaluate(embeddings, labels, CUT_NAMES, distance=distance)
    first = rank(embeddings, labels, distance=distance)
    for block in (7, 129, 100_000):
        assert evaluate(embeddings, labels, CUT_NAMES, distance=distance, block=block) == whole
        for a, b in zip(rank(embeddings, labels, distance=distance, block=block), first):
            assert torch.equal(torch.as_tensor(a), torch.as_tensor(b))
    assert scores(rank(embeddings, labels, 300, distance=distance), CUT_NAMES) == pytest.approx(whole, abs=1e-12)


def test_a_small_memory_budget_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(2)
    embeddings = torch.randn(300, 5, dtype=torch.float64)
    labels = torch.arange(300) % 40
    whole = evaluate(embeddings, labels, NAMES)
    monkeypatch.setattr("proxymetric.metrics.knn.search.MEMORY_BYTES", 20_000)
    searcher = search(embeddings, labels, None, None, "cosine", None, None)._searcher(300)
    sizes = [len(best.queries) for best in searcher.run(torch.full((300,), 200))]
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


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("with_gallery", [False, True])
def test_equal_to_pytorch_metric_learning(seed: int, with_gallery: bool) -> None:
    """Its k=None ranks the whole gallery; its clusters are ours, because each library seeds its own k-means."""
    calculators = pytest.importorskip("pytorch_metric_learning.utils.accuracy_calculator")
    torch.manual_seed(seed)
    labels = torch.randint(0, 25, (300,))
    labels[0] = 25 + seed  # a class with a single item, which both leave out
    embeddings = torch.nn.functional.normalize(torch.randn(300, 16) + 0.8 * torch.randn(28, 16)[labels])
    wanted = {
        "precision_at_1": "P@1",
        "r_precision": "P@R",
        "mean_average_precision_at_r": "MAP@R",
        "mean_average_precision": "AP",
        "mean_reciprocal_rank": "MRR",
    }
    wanted |= {} if with_gallery else {"NMI": "NMI", "AMI": "AMI"}  # it clusters the queries alone
    calculator = calculators.AccuracyCalculator(
        include=tuple(wanted),
        k=None,
        device=torch.device("cpu"),
        kmeans_func=lambda vectors, clusters: kmeans(vectors, clusters).assignment,
    )
    queries, gallery = (slice(0, 100), slice(100, 300)) if with_gallery else (slice(None), slice(None))
    given = (embeddings[gallery], labels[gallery]) if with_gallery else ()
    theirs = calculator.get_accuracy(embeddings[queries], labels[queries], *given)
    ours = evaluate(
        embeddings[queries],
        labels[queries],
        list(wanted.values()),
        gallery=given[0] if given else None,
        gallery_labels=given[1] if given else None,
    )
    assert ours == pytest.approx({name: theirs[peer] for peer, name in wanted.items()}, abs=1e-6)
    assert 0.2 < ours["MAP@R"] < ours["AP"] < ours["MRR"] < 0.95  # neither chance nor perfect


def test_metrics_of_the_whole_ranking_refuse_one_that_ends_early() -> None:
    vectors, labels = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.9, 0.1], [0.1, 0.9]]), [0, 0, 1, 1]
    assert per_query(rank(vectors, labels, 2), "MRR@2")["MRR@2"].tolist() == [0.0, 0.0, 0.5, 0.5]
    for metric in ("AP", "MRR"):
        with pytest.raises(ValueError, match=f"got 2 results for each query, too few for {metric} of 2 queries"):
            per_query(rank(vectors, labels, 2), metric)
    whole = scores(rank(vectors, labels, 3), ["AP", "MRR"])
    assert whole == evaluate(vectors, labels, ["AP", "MRR"])
    assert whole["AP"] == whole["MRR"] == pytest.approx((1 / 3 + 1 / 3 + 1 / 2 + 1 / 2) / 4)


def test_average_precision_at_k_is_that_of_a_peer_where_its_divisor_is_the_same() -> None:
    """pytorch-metric-learning divides by R: the same number where K is at least R."""
    calculators = pytest.importorskip("pytorch_metric_learning.utils.accuracy_calculator")
    generator = torch.Generator().manual_seed(0)
    vectors, labels = torch.randn(60, 5, generator=generator), torch.arange(60) % 9
    calculator = calculators.AccuracyCalculator(include=("mean_average_precision",), k=20, device=torch.device("cpu"))
    theirs = calculator.get_accuracy(torch.nn.functional.normalize(vectors), labels)["mean_average_precision"]
    ours = evaluate(vectors, labels, ["AP@20", "MAP@20", "MAP@R"])
    assert ours["AP@20"] == pytest.approx(theirs, abs=1e-9)
    assert ours["MAP@20"] < ours["AP@20"]


def test_a_perfect_ranking_has_an_average_precision_of_one_at_any_cutoff() -> None:
    vectors, labels = torch.eye(3)[[0, 0, 0, 1, 1]], [0, 0, 0, 1, 1]
    names = [f"{kind}@{k}" for kind in ("AP", "MAP") for k in (1, 2, 4)]
    ours = evaluate(vectors, labels, names)
    assert [ours[f"AP@{k}"] for k in (1, 2, 4)] == [1, 1, 1]
    assert [ours[f"MAP@{k}"] for k in (1, 2, 4)] == pytest.approx([1, (3 * 1 + 2 * 0.5) / 5, (3 * 0.5 + 2 * 0.25) / 5])


@pytest.mark.parametrize("metrics", [("R@1", "P@5"), ("MAP@R", "AP", "MRR"), ("NMI", "AMI", "EER")])
def test_the_default_type_of_torch_changes_no_score(metrics):
    generator = torch.Generator().manual_seed(0)
    vectors, labels = torch.randn(300, 8, generator=generator), torch.arange(300) % 9
    expected = evaluate(vectors, labels, metrics)
    torch.set_default_dtype(torch.float64)
    try:
        found = evaluate(vectors, labels, metrics)
    finally:
        torch.set_default_dtype(torch.float32)
    assert found == expected
