"""Images at minor centres: the definition by loops, a peer, and what is refused."""

import math

import numpy as np
import pytest
import torch

import proxymetric as pm
from proxymetric.inspection import sub_centres

N, C, K, D = 60, 4, 3, 8


def problem(seed: int = 0):
    torch.manual_seed(seed)
    criterion = pm.method("subcentre-arcface", classes=C, dim=D, per_class=K)
    vectors = criterion.objective.source.vectors.data
    labels = torch.randint(0, C - 1, (N,))  # the last class has no images
    centre = torch.where(torch.rand(N) < 0.7, 0, torch.randint(0, K, (N,)))
    vectors.div_(vectors.norm(dim=1, keepdim=True))
    return vectors[labels * K + centre] * 2 + 0.6 * torch.randn(N, D), labels, criterion


def test_nearest_and_dominant_centres_are_those_of_the_definition() -> None:
    x, y, criterion = problem()
    found = sub_centres(x, y, criterion)
    p = criterion.objective.source.vectors.detach().double().numpy().reshape(C, K, D)
    p, u = (each / np.linalg.norm(each, axis=-1, keepdims=True) for each in (p, x.double().numpy()))
    nearest = [int(np.argmax(p[label] @ vector)) for vector, label in zip(u, y)]
    assert found.nearest.tolist() == nearest
    of_class = [[n for n, label in zip(nearest, y) if label == c] for c in range(C)]
    dominant = [max(range(K), key=own.count) if own else -1 for own in of_class]
    assert found.dominant.tolist() == dominant
    degrees = [math.degrees(math.acos(p[label, dominant[label]] @ vector)) for vector, label in zip(u, y)]
    np.testing.assert_allclose(found.degrees.numpy(), degrees, rtol=1e-4)
    minor = [i for i in range(N) if nearest[i] != dominant[y[i]]]
    assert 0 < len(minor) < N / 2
    assert found.minor.tolist() == sorted(minor, key=lambda i: -degrees[i])
    assert found.beyond(80).tolist() == sorted((i for i in range(N) if degrees[i] > 80), key=lambda i: -degrees[i])


def test_outliers_are_those_of_a_peer() -> None:
    losses = pytest.importorskip("pytorch_metric_learning.losses")
    x, y, criterion = problem(1)
    peer = losses.SubCenterArcFaceLoss(num_classes=C, embedding_size=D, sub_centers=K)
    peer.W.data.copy_(criterion.objective.source.vectors.data.T)
    outliers, _ = peer.get_outliers(x, y, threshold=75)
    found = sub_centres(x, y, criterion).beyond(75)
    assert 0 < len(found) < N
    assert sorted(found.tolist()) == sorted(outliers.tolist())


def test_a_wrong_label_ends_at_a_minor_centre() -> None:
    """Two modes of one class, and a few images of another look: training gives the few a centre of their own."""
    torch.manual_seed(0)
    modes = torch.eye(6)
    labels = torch.arange(80) % 2
    is_wrong = torch.arange(80) >= 72
    vectors = modes[torch.where(is_wrong, labels + 2, labels)] + 0.05 * torch.randn(80, 6)
    criterion = pm.method("subcentre-arcface", classes=2, dim=6, per_class=2, scale=16.0)
    optimizer = torch.optim.Adam(criterion.param_groups(lr=0.05))
    for _ in range(60):
        optimizer.zero_grad()
        criterion(vectors, labels).backward()
        optimizer.step()
        criterion.commit()
    assert sorted(sub_centres(vectors, labels, criterion).minor.tolist()) == list(range(72, 80))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"labels": torch.full((N,), C)}, f"labels: got {C} to {C}, expected 0 to {C - 1}"),
        ({"labels": torch.zeros(3)}, "labels: got shape"),
        ({"embeddings": np.zeros((N, D))}, "embeddings: got ndarray, expected a torch tensor"),
        ({"embeddings": torch.zeros(N, D + 1)}, f"embeddings: got {D + 1} dimensions, expected dim={D}"),
        ({"criterion": pm.method("arcface", classes=C, dim=D)}, "criterion: got one proxy for each class"),
        ({"criterion": pm.method("triplet", classes=C, dim=D)}, "criterion: got 0 sets of proxies"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict, message: str) -> None:
    x, y, criterion = problem()
    with pytest.raises(ValueError, match=message):
        sub_centres(**{"embeddings": x, "labels": y, "criterion": criterion} | change)


def test_labels_may_be_an_array_or_a_list() -> None:
    x, y, criterion = problem()
    for labels in (y.numpy(), y.tolist()):
        assert sub_centres(x, labels, criterion).minor.tolist() == sub_centres(x, y, criterion).minor.tolist()


def test_no_images_have_no_dominant_centre() -> None:
    _, _, criterion = problem()
    found = sub_centres(torch.empty(0, D), torch.empty(0, dtype=torch.int64), criterion)
    assert found.dominant.tolist() == [-1] * C
    assert len(found.minor) == 0
