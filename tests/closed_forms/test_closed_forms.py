"""Closed forms against NumPy, and what the sums over the features must allow."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch

from oracles import closed_forms as oracle
from proxymetric.closed_forms import LDA, Scatter, Unchanged, Whitening


def labelled(images: int = 60, width: int = 7, classes: int = 6, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Features whose directions differ in variance, and whose classes differ in their means; uneven classes."""
    random = np.random.default_rng(seed)
    labels = np.concatenate([np.arange(classes), random.integers(0, classes, images - classes)])
    means = random.normal(size=(classes, width))
    features = means[labels] + random.normal(size=(images, width)) * np.linspace(0.2, 2, width)
    return features, labels


def scatter_of(features: np.ndarray, labels: np.ndarray, blocks: int = 1) -> Scatter:
    scatter = Scatter(int(labels.max()) + 1, features.shape[1])
    for rows in np.array_split(np.arange(len(labels)), blocks):
        scatter.add(torch.from_numpy(features[rows]), torch.from_numpy(labels[rows]))
    return scatter


def metric(head) -> np.ndarray:
    return (head.weight.T @ head.weight).numpy()


@pytest.mark.parametrize("shrinkage", [0.01, 0.3, 1.0])
@pytest.mark.parametrize("principal", [7, 4])
def test_whitening_is_its_equation(shrinkage, principal):
    features, labels = labelled()
    head = Whitening(shrinkage, principal)(scatter_of(features, labels))
    np.testing.assert_allclose(metric(head), oracle.whitening_metric(features, labels, shrinkage, principal), atol=1e-9)
    np.testing.assert_allclose(head(torch.from_numpy(features)).mean(0), np.zeros(principal), atol=1e-10)


@pytest.mark.parametrize("shrinkage", [0.01, 0.5])
@pytest.mark.parametrize(("classes", "principal", "dim"), [(6, 7, 5), (6, 7, 2), (4, 6, 3), (12, 7, 7), (12, 5, 4)])
def test_lda_is_its_equation(shrinkage, classes, principal, dim):
    features, labels = labelled(classes=classes)
    head = LDA(shrinkage, principal)(scatter_of(features, labels), dim)
    expected = oracle.lda_metric(features, labels, shrinkage, principal, dim)
    np.testing.assert_allclose(metric(head), expected, rtol=1e-6, atol=1e-8 * abs(expected).max())
    assert head.weight.shape == (dim, 7)
    np.testing.assert_allclose(head(torch.from_numpy(features)).mean(0), np.zeros(dim), atol=1e-10)


def test_the_leading_dimensions_come_first():
    features, labels = labelled()
    scatter = scatter_of(features, labels)
    for form in (Whitening(0.3), LDA(0.3)):
        whole, part = form(scatter), form(scatter, 3)
        torch.testing.assert_close(whole.weight[:3], part.weight)
        torch.testing.assert_close(whole.bias[:3], part.bias)


def test_the_sums_do_not_depend_on_blocks_or_order():
    features, labels = labelled()
    order = np.random.default_rng(1).permutation(len(labels))
    one, other = scatter_of(features, labels), scatter_of(features[order], labels[order], blocks=7)
    halves = [scatter_of(features[rows], np.append(labels[rows], 5)[:-1]) for rows in (slice(30), slice(30, None))]
    for scatter in (other, Scatter.total(halves)):
        torch.testing.assert_close(scatter.within, one.within)
        torch.testing.assert_close(scatter.total_covariance, one.total_covariance)
    np.testing.assert_allclose(one.within, oracle.covariances(features, labels)[0])


def test_a_block_that_comes_late_counts():
    features, labels = labelled()
    scatter = scatter_of(features[:40], np.append(labels[:39], 5))
    early = Whitening(0.3)(scatter)
    scatter.add(torch.from_numpy(features[40:]), torch.from_numpy(labels[40:]))
    late = Whitening(0.3)(scatter)
    whole = scatter_of(features, np.concatenate([labels[:39], [5], labels[40:]]))
    torch.testing.assert_close(late.weight, Whitening(0.3)(whole).weight)
    assert not torch.allclose(early.weight, late.weight)


def test_classes_of_one_image_add_nothing_to_the_covariance_within_classes():
    features, labels = labelled()
    alone = np.concatenate([features, [[50.0] * 7]]), np.append(labels, 6)
    one, other = scatter_of(features, labels), scatter_of(*alone)
    torch.testing.assert_close(one.within, other.within)
    assert (one.single, other.single, other.classes, other.images) == (0, 1, 7, 61)


def test_more_features_than_images_are_regular():
    features, labels = labelled(images=20, width=50)
    for form in (Whitening(0.02), LDA(0.02), Whitening(0.02, 19)):
        head = form(scatter_of(features, labels))
        assert head.weight.isfinite().all()
        vectors = head(torch.from_numpy(features))
        assert vectors.isfinite().all()
        assert vectors.abs().max() < 1e3


def test_one_class_can_be_whitened_but_not_compared():
    features = np.random.default_rng(0).normal(size=(20, 3))
    scatter = scatter_of(features, np.zeros(20, dtype=np.int64))
    assert Whitening(0.3)(scatter).weight.shape == (3, 3)
    with pytest.raises(ValueError, match=r"classes: got 1, expected at least 2"):
        LDA(0.3)(scatter)


def test_two_classes_have_one_direction():
    features, labels = labelled(classes=2)
    assert LDA(0.3)(scatter_of(features, labels)).weight.shape == (1, 7)


@pytest.mark.parametrize(
    ("features", "labels", "words"),
    [
        (np.random.default_rng(0).normal(size=(4, 3)), np.arange(4), "images: got 4 classes of one image each"),
        (np.repeat(np.eye(3), 2, 0), np.repeat(np.arange(3), 2), "features: got the same features for all images"),
    ],
)
def test_what_says_nothing_about_differences_within_a_class_is_refused(features, labels, words):
    with pytest.raises(ValueError, match=words):
        Whitening(0.3)(scatter_of(features, labels))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_features_that_are_not_finite_are_refused(value):
    features, labels = labelled()
    features[41, 2] = value
    with pytest.raises(ValueError, match=r"features: got NaN or infinity, first in row 41, expected finite numbers"):
        scatter_of(features, labels)


@pytest.mark.parametrize("form", [Whitening, LDA])
@pytest.mark.parametrize("shrinkage", [0, -0.1, 1.1, float("nan")])
def test_a_shrinkage_out_of_range_is_refused(form, shrinkage):
    with pytest.raises(ValueError, match=re.escape(f"shrinkage: got {shrinkage!r}, expected a number")):
        form(shrinkage)


def test_dimensions_that_are_not_there_are_refused():
    features, labels = labelled()
    scatter = scatter_of(features, labels)
    for form, words in ((Whitening(), "dim: got 8, expected at most 7"), (LDA(), "dim: got 8, expected at most 5")):
        with pytest.raises(ValueError, match=words):
            form(scatter, 8)
    with pytest.raises(ValueError, match="dim: got 3, expected 7"):
        Unchanged()(scatter, 3)
    with pytest.raises(ValueError, match="principal: got 9, expected at least 1 and at most 7"):
        Whitening(principal=9)(scatter)


def test_scaling_and_widening_change_no_cosine():
    features, labels = labelled()
    head, x = Whitening(0.3)(scatter_of(features, labels)), torch.from_numpy(features)
    vectors = torch.nn.functional.normalize(head(x))
    for other in (head.scaled(), head.widened(9)):
        changed = torch.nn.functional.normalize(other(x))
        torch.testing.assert_close(changed @ changed.T, vectors @ vectors.T)
    assert head.scaled().weight.square().sum().item() == pytest.approx(2 * 7)
    assert head.widened(9).weight.shape == (9, 7)


def test_a_head_after_a_head_is_one_head():
    features, labels = labelled()
    x, weight, bias = torch.from_numpy(features), torch.randn(4, 7, dtype=torch.float64), torch.randn(4).double()
    inner = x @ weight.T + bias
    head = Whitening(0.3)(scatter_of(inner.numpy(), labels))
    torch.testing.assert_close(head.after(weight, bias)(x), head(inner))
