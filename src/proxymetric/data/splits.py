"""Class-disjoint splits: what is measured is measured on classes that were not trained on (MNIST's own test aside)."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from proxymetric.data.images import ImageSet


class Split(NamedTuple):
    """Three image sets that share no class, except MNIST's own test, which has all the classes."""

    train: ImageSet
    validation: ImageSet | None
    test: ImageSet | None


def split(images: ImageSet, validation: float | str = 0.2, test: str | float = "auto", seed: int = 0) -> Split:
    """Divide the CLASSES of `images` into training, validation and test.

    Arguments:
        validation: fraction of the training classes that are held out, drawn by `seed`; 0 for none. At least two
            classes are held out, since among the images of one class everything is right. "2/4" holds out the second
            of four contiguous blocks instead: a fold, the same whatever the seed.
        test: "auto" takes the test of the set itself: the second half of CUB and Cars, the fixed half of glyphs and
            digits, the classes that SOP, In-Shop (with its gallery), iNaturalist and Omniglot keep apart; for MNIST
            the official test IMAGES, of all ten digits, so that this one test is not of unseen classes; none for
            people's own folders. A fraction in (0, 1) takes that part of the classes, at least two, the same ones
            whatever the seed; "none" keeps all classes for training. Both leave official test images and galleries
            out of account: all images of a class stay together.
        seed: of the validation classes.

    Classes with a single image are never held out: a query needs something to find.

    >>> grey = np.zeros((20, 8, 8), np.uint8)
    >>> images = ImageSet("dots", np.arange(20) // 2, list("abcdefghij"), arrays=grey)
    >>> [len(part.classes) if part else 0 for part in split(images, validation=0.25, test=0.2)]
    [6, 2, 2]
    """
    if test != "auto":
        images = replace(images, test_images=None, gallery=None)
    whole, total = images, len(images.classes)
    if images.test_images is not None:
        images = images.subset(~images.test_images)
    counts = np.bincount(images.labels, minlength=total)
    if not isinstance(validation, str) and not 0 <= validation < 1:
        raise ValueError(f"validation must be a fraction of the training classes, in [0, 1), got {validation}")
    if seed < 0:
        raise ValueError(f"seed must be 0 or more, got {seed}")
    test_ids = _test_classes(images, counts, test)
    train_ids = np.setdiff1d(np.arange(total), test_ids)
    left = len(train_ids)
    validation_ids = np.empty(0, dtype=np.int64)
    if isinstance(validation, str):
        validation_ids = _fold(train_ids, counts, validation)
    elif validation > 0:
        candidates = train_ids[counts[train_ids] >= 2]
        wanted = max(2, round(validation * left))
        if len(candidates) < wanted:
            raise ValueError(
                f"validation={validation} asks for {wanted} validation classes of two images or more, but only "
                f"{len(candidates)} of the {left} training classes have that many; "
                "give more images, or hold none out: validation=0 (--set data.validation=0)"
            )
        random = np.random.default_rng([seed, left])
        validation_ids = np.sort(random.choice(candidates, wanted, replace=False))
    train_ids = np.setdiff1d(train_ids, validation_ids)
    if len(train_ids) < 2:
        raise ValueError(
            f"of {total} classes, {len(test_ids)} are for the test and {len(validation_ids)} for validation, which "
            f"leaves {len(train_ids)} for training; at least 2 are needed: give more classes, or hold none out: "
            "validation=0 (--set data.validation=0)" + (", test='none' (--set data.test=none)" if len(test_ids) else "")
        )
    if whole.test_images is not None:
        tested: ImageSet | None = whole.subset(whole.test_images)
    else:
        tested = images.of_classes(test_ids) if len(test_ids) else None
    return Split(
        images.of_classes(train_ids),
        images.of_classes(validation_ids) if len(validation_ids) else None,
        tested,
    )


def altered(images: ImageSet, fraction: float = 1.0, wrong_labels: float = 0.0, seed: int = 0) -> ImageSet:
    """A training set made harder: fewer images of each class, some of them with the label of another class.

    Args:
        images: the training images.
        fraction: share of each class's images that are kept, at least two of each class, drawn by `seed`.
        wrong_labels: share of the kept images whose label becomes that of another class, drawn by `seed`.
        seed: of both draws.

    Returns:
        The set itself where nothing is asked.

    Example:
        >>> images = ImageSet("dots", np.arange(20) // 10, ["a", "b"], arrays=np.zeros((20, 8, 8), np.uint8))
        >>> fewer = altered(images, fraction=0.3, wrong_labels=0.5)
        >>> len(fewer), fewer.classes
        (6, ['a', 'b'])
    """
    if fraction < 1:
        random, kept = np.random.default_rng([seed, 1]), []
        for label in range(len(images.classes)):
            rows = np.flatnonzero(images.labels == label)
            count = min(len(rows), max(2, round(fraction * len(rows))))
            kept.append(random.choice(rows, count, replace=False))
        images = images.subset(np.sort(np.concatenate(kept)))
    if wrong_labels > 0:
        random, labels = np.random.default_rng([seed, 2]), images.labels.copy()
        rows = random.choice(len(labels), round(wrong_labels * len(labels)), replace=False)
        labels[rows] = (labels[rows] + random.integers(1, len(images.classes), len(rows))) % len(images.classes)
        images = replace(images, labels=labels)
    return images


def _fold(train_ids: np.ndarray, counts: np.ndarray, fold: str) -> np.ndarray:
    """Block k of n of the training classes, from "k/n"; classes with a single image in it are left out."""
    found = re.fullmatch(r"(\d+)/(\d+)", fold)
    if not found or not 1 <= int(found[1]) <= int(found[2]) or int(found[2]) < 2:
        raise ValueError(f"validation must be a fraction in [0, 1) or a fold such as '1/4', got {fold!r}")
    block = np.array_split(train_ids, int(found[2]))[int(found[1]) - 1]
    block = block[counts[block] >= 2]
    if len(block) < 2:
        raise ValueError(
            f"validation={fold} holds out {len(block)} classes of two images or more; at least 2 are needed"
        )
    return block


def _test_classes(images: ImageSet, counts: np.ndarray, test: str | float) -> np.ndarray:
    none = np.empty(0, dtype=np.int64)
    if test == "none":
        return none
    if test == "auto":
        return np.array(sorted(images.test_classes), dtype=np.int64)
    if isinstance(test, str) or not 0 < test < 1:
        raise ValueError(f'test must be "auto", "none" or a fraction in (0, 1), got {test!r}')
    candidates = np.flatnonzero(counts >= 2)
    wanted = max(2, round(test * len(counts)))
    if len(candidates) < wanted:
        raise ValueError(
            f"test={test} asks for {wanted} classes of two images or more, but only {len(candidates)} of "
            f"{len(counts)} have that many"
        )
    return np.sort(np.random.default_rng(len(counts)).choice(candidates, wanted, replace=False))
