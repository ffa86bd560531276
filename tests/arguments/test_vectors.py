"""Inputs of the metrics: types, mistakes, precision, memory."""

import subprocess
import sys

import numpy as np
import pytest
import torch

from proxymetric.metrics import Ranking, evaluate, left_out, names, per_query, rank, scores
from proxymetric.metrics.ranking import search
from proxymetric.system.precision import full_precision

VECTORS = torch.tensor([[1.0, 0.0], [0.9, 0.2], [0.1, 1.0], [0.0, 1.0]])
LABELS = [0, 0, 1, 1]


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("map@r", "MAP@R"),
        ("MAP", "MAP@R"),
        ("recall@4", "R@4"),
        ("precision@1", "P@1"),
        ("ndcg@8", "nDCG@8"),
        ("NDGC@10", "nDCG@10"),
        ("ap@5", "AP@5"),
        ("average precision@7", "AP@7"),
        ("R@0", "R@1"),
        ("R@R", "R@1"),
        ("nDCG@R", "nDCG@1"),
        ("R@-3", "R@3"),
        ("R@1 ", "R@1"),
        (8, "R@8"),
    ],
)
def test_a_wrong_name_is_told_the_nearest(wrong: object, right: str) -> None:
    with pytest.raises(ValueError, match=f"metrics: got {wrong!r}, expected .*; did you mean {right!r}"):
        names([wrong])  # type: ignore[list-item]
    assert names(right) == (right,)


def test_no_names() -> None:
    with pytest.raises(ValueError, match="metrics: got no name"):
        evaluate(VECTORS, LABELS, [])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"embeddings": VECTORS[0]}, r"embeddings: got shape \(2,\), expected two axes"),
        ({"embeddings": VECTORS[:0], "labels": []}, r"embeddings: got shape \(0, 2\), expected at least one item"),
        ({"embeddings": VECTORS[:, :0]}, r"embeddings: got shape \(4, 0\), expected at least one item"),
        ({"embeddings": VECTORS > 0}, "embeddings: got torch.bool"),
        ({"embeddings": "photos"}, "embeddings: got str"),
        ({"labels": [0, 0, 1]}, "labels: got 3 labels, expected 4, one for each row of embeddings"),
        ({"labels": [[0, 0, 1, 1]]}, r"labels: got shape \(1, 4\), expected one axis"),
        ({"labels": []}, "labels: got no labels"),
        ({"labels": [0.0, 0.0, 1.0, 1.0]}, "labels: got torch.float64, expected whole numbers"),
        ({"labels": ["a", "a", "b", 1]}, "labels: got list, expected an array of whole numbers"),
        ({"labels": ["a", "a", None, None]}, "labels: got list, expected an array of whole numbers"),
        ({"labels": ["a", "a", "b"]}, "labels: got 3 labels, expected 4, one for each row of embeddings"),
        ({"labels": list("aabb"), "gallery": VECTORS, "gallery_labels": LABELS}, "labels: got text and numbers"),
        ({"embeddings": VECTORS.to_sparse()}, r"embeddings: got a sparse tensor, expected .*: embeddings.to_dense\(\)"),
        ({"labels": torch.tensor(LABELS).to_sparse()}, "labels: got a sparse tensor"),
        ({"embeddings": VECTORS.to("meta")}, 'embeddings: got a tensor on the device "meta", which holds no numbers'),
        ({"labels": torch.tensor(LABELS, device="meta")}, 'labels: got a tensor on the device "meta"'),
        (
            {"metrics": "nDCG@100000000000000000000"},
            "metrics: got 'nDCG@1.*', expected a cutoff K of at most 2,147,483",
        ),
        ({"metrics": "R@" + "9" * 5000}, r"metrics: got 'R@9{38}\.\.\.', expected a cutoff K of at most 2,147,483,647"),
        ({"metrics": "AP@R"}, "metrics: got 'AP@R', expected .*did you mean 'AP@1'"),
        ({"labels": [0, 1, 2, 3]}, "labels: got 4 queries without a relevant item"),
        ({"gallery": VECTORS}, "gallery_labels: got None"),
        ({"gallery_labels": LABELS}, "gallery: got None"),
        (
            {"gallery": VECTORS, "gallery_labels": [0]},
            "gallery_labels: got 1 labels, expected 4, one for each row of gallery",
        ),
        ({"gallery": torch.ones(1, 3), "gallery_labels": [0]}, "gallery: got 3 dimensions, expected the 2"),
        ({"gallery": VECTORS, "gallery_labels": [7] * 4}, "labels: got 4 queries without"),
        ({"distance": "cosin"}, "distance: got 'cosin', expected one of cosine, euclidean; did you mean 'cosine'"),
        ({"block": 0}, "block: got 0"),
    ],
)
def test_mistakes_are_named(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        evaluate(**{"embeddings": VECTORS, "labels": LABELS, **change})


def test_rows_that_are_not_finite_are_counted() -> None:
    broken = VECTORS.clone()
    broken[1, 0] = torch.nan
    broken[3] = torch.inf
    with pytest.raises(ValueError, match="embeddings: got NaN or infinity in 2 of 4 rows"):
        evaluate(broken, LABELS)
    with pytest.raises(ValueError, match="gallery: got NaN or infinity in 2 of 4 rows"):
        evaluate(VECTORS, LABELS, gallery=broken, gallery_labels=LABELS)


def test_a_ranking_that_is_too_short_is_refused() -> None:
    short = rank(VECTORS, LABELS, k=1)
    with pytest.raises(ValueError, match="ranking: got 1 results for each query, expected at least 2 for R@2"):
        scores(short, ["R@1", "R@2"])
    with pytest.raises(ValueError, match="expected at least 3 for MAP@R"):
        per_query(rank(VECTORS, [0] * 4, k=2), "MAP@R")
    with pytest.raises(ValueError, match="k: got 0"):
        rank(VECTORS, LABELS, k=0)


def test_nothing_to_find_gives_an_empty_ranking_and_no_score() -> None:
    empty = rank(VECTORS, [0, 1, 2, 3], k=2)
    assert empty.hits.shape == (0, 2)
    assert empty.left_out == 4
    with pytest.raises(ValueError, match="labels: got 4 queries without"):
        scores(empty, "R@1")
    assert per_query(empty, "nDCG@2")["nDCG@2"].shape == (0,)


def test_a_single_item() -> None:
    assert rank(VECTORS[:1], [0]).left_out == 1
    assert evaluate(VECTORS[:1], [0], "MAP@R", gallery=VECTORS[:1], gallery_labels=[0]) == {"MAP@R": 1.0}


def test_the_query_is_left_out_by_its_index_not_by_its_score() -> None:
    """A copy of the query elsewhere counts; a copy of another class is the first wrong result."""
    twins = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
    assert rank(twins, [0, 1, 0], k=1).neighbours.tolist() == [[1], [0]]
    # A zero vector is no nearer to itself than to anything: it must still not find itself.
    zero = torch.tensor([[-1.0, 0.0], [0.0, 0.0], [1.0, 0.0]])
    assert rank(zero, [0, 0, 0], k=2).neighbours.tolist() == [[1, 2], [0, 2], [1, 0]]


def test_queries_left_out_do_not_count() -> None:
    vectors = torch.cat([VECTORS, torch.tensor([[0.5, 0.5]])])
    labels = [*LABELS, 9]
    assert left_out(labels) == rank(vectors, labels).left_out == 1
    assert rank(vectors, labels).queries.tolist() == [0, 1, 2, 3]
    assert evaluate(vectors, labels, "R@1") == {"R@1": 1.0}


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16, torch.float64, torch.int32, torch.uint8])
def test_any_number_type(kind: torch.dtype) -> None:
    assert evaluate((VECTORS * 100).to(kind), torch.tensor(LABELS, dtype=torch.int32), "P@1") == {"P@1": 1.0}


@pytest.mark.filterwarnings("error")
def test_numpy_arrays_that_are_read_only_or_reversed() -> None:
    vectors = VECTORS.numpy().copy()
    labels = np.array(LABELS)
    vectors.flags.writeable = labels.flags.writeable = False
    assert evaluate(vectors, labels, "P@1") == evaluate(vectors[::-1], labels[::-1], "P@1") == {"P@1": 1.0}


def test_embeddings_with_a_gradient_and_under_autocast() -> None:
    vectors = VECTORS.clone().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert evaluate(vectors, LABELS, "P@1") == {"P@1": 1.0}


def test_autocast_does_not_reach_the_scores() -> None:
    """The two items are equal in bfloat16."""
    gallery = torch.tensor([[1.0, 0.0100], [1.0, 0.0]])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = rank(torch.tensor([[1.0, 0.0]]), [0], 1, gallery=gallery, gallery_labels=[0, 0])
    assert found.neighbours.tolist() == [[1]]


@pytest.mark.parametrize("mode", ["highest", "high", "medium"])
def test_the_precision_of_products_is_full_and_put_back(mode: str) -> None:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(mode)
    try:
        with full_precision():
            if hasattr(torch.backends.cuda.matmul, "fp32_precision"):
                assert (
                    torch.backends.cuda.matmul.fp32_precision == torch.backends.mkldnn.matmul.fp32_precision == "ieee"
                )
            else:
                assert torch.get_float32_matmul_precision() == "highest"
        assert torch.get_float32_matmul_precision() == mode
        with pytest.raises(KeyError), full_precision():
            raise KeyError
        assert torch.get_float32_matmul_precision() == mode
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("kind", [torch.float32, torch.float64])
def test_extreme_lengths_have_a_direction(kind: torch.dtype) -> None:
    """Squares of these are beyond the range of their type."""
    large, small = (3e38, 1e-42) if kind == torch.float32 else (1e308, 1e-310)
    vectors = torch.tensor([[large, 0.9 * large], [small, small], [0.0, 0.0], [1.0, 0.5]], dtype=kind)
    assert rank(vectors, [0] * 4).neighbours.tolist() == [[1, 3, 2], [0, 3, 2], [0, 1, 3], [0, 1, 2]]


def test_euclidean_far_from_the_origin() -> None:
    """|q - g|^2 from float32 products would be noise here."""
    torch.manual_seed(0)
    near = torch.randn(40, 8)
    labels = torch.arange(40) % 5
    shifted = rank(near.double() + 1e5, labels, distance="euclidean")
    assert torch.equal(shifted.neighbours, rank(near, labels, distance="euclidean").neighbours)


def test_one_large_class_does_not_deepen_the_ranking_of_the_small_ones() -> None:
    labels = torch.cat([torch.zeros(500, dtype=torch.long), 1 + torch.arange(100) // 2])
    task = search(torch.randn(600, 4), labels, None, None, "cosine", None, None)
    depths = {len(found.queries): found.hits.shape[1] for found in task.run(task.relevant)}
    assert depths == {100: 1, 500: 499}


@pytest.mark.slow
def test_memory_stays_bounded() -> None:
    """2,000 queries x 200,000 items are 1.6 GB of scores; a block of them is a sixth of that."""
    program = """
import resource, torch
from proxymetric.metrics import evaluate
torch.manual_seed(0)
torch.set_num_threads(1)
queries, items = torch.randn(2000, 4), torch.randn(200_000, 4)
args = dict(gallery=items, gallery_labels=torch.arange(200_000) % 5000)
evaluate(queries[:2], torch.arange(2), "R@1", **args)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
evaluate(queries, torch.arange(2000), "R@1", **args)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 700


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("distance", ["cosine", "euclidean"])
def test_the_gpu_agrees_with_the_cpu(distance: str) -> None:
    torch.manual_seed(5)
    embeddings = torch.randn(900, 24, dtype=torch.float64)[torch.randint(0, 300, (900,))]
    labels = torch.randint(0, 40, (900,))
    there = rank(embeddings, labels, 50, distance=distance, device="cuda")
    here = rank(embeddings, labels, 50, distance=distance)
    assert torch.equal(there.neighbours, here.neighbours)
    assert isinstance(there, Ranking)
    ours = evaluate(embeddings.cuda(), labels.cuda(), distance=distance)
    assert ours == pytest.approx(evaluate(embeddings, labels, distance=distance), abs=1e-12)


def test_labels_may_be_text() -> None:
    expected = evaluate(VECTORS, LABELS, ["R@1", "MAP@R", "NMI"])
    for labels in (list("aabb"), tuple("aabb"), np.array(list("aabb")), np.array(list("aabb"), dtype=object)):
        assert evaluate(VECTORS, labels, ["R@1", "MAP@R", "NMI"]) == expected


def test_text_means_the_same_in_queries_and_gallery() -> None:
    """The second set has other classes, so numbers by position in each would not agree."""
    queries, gallery = ["cat", "dog", "eel", "dog"], ["dog", "ant", "cat", "dog"]
    numbers = {"ant": 0, "cat": 1, "dog": 2, "eel": 3}
    ours = rank(VECTORS, queries, gallery=VECTORS, gallery_labels=gallery)
    theirs = rank(VECTORS, [numbers[x] for x in queries], gallery=VECTORS, gallery_labels=[numbers[x] for x in gallery])
    assert all(torch.equal(one, other) for one, other in zip(ours[:4], theirs[:4], strict=True))
    assert ours.left_out == theirs.left_out == left_out(queries, gallery) == 1


def test_the_largest_cutoff_is_computed() -> None:
    assert evaluate(VECTORS, LABELS, "nDCG@2147483647") == {"nDCG@2147483647": 1.0}
