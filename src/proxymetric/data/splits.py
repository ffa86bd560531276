"""Splits by class: test classes are not trained on, unless the data comes with a split of its images, as MNIST does."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from proxymetric.data.folders import WITHOUT_TRAINING, first_names
from proxymetric.data.images import ImageSet

MIN_CLASSES = 4
"""classes of two images or more that training with held-out classes needs"""
MAX_NAMED_CLASSES = 8
"""most classes that a message names"""


class Split(NamedTuple):
    """Three image sets, which share no class unless the data comes with a split of its images (as MNIST does)."""

    train: ImageSet
    validation: ImageSet | None
    test: ImageSet | None


def split(images: ImageSet, validation: float | str = 0.2, test: str | float = "auto", seed: int = 0) -> Split:
    """Divide the classes of `images` into training, validation and test.

    Classes with a single image are never held out, because a query needs another image of its class.

    Args:
        images: the images to divide.
        validation: fraction of the training classes to hold out, in [0, 1), drawn with `seed`; 0 for none. At least
            two classes are held out, because with a single class every retrieved image would be correct. A fold such as
            "2/4" holds out the second of four contiguous blocks of classes instead, for any seed. Data that comes with
            validation images (a folder val/) uses them for every fraction above 0; with 0 or a fold they are trained
            on.
        test: "auto" takes the official test: the second half of the classes of CUB and Cars, a fixed half of glyphs and
            digits, the official test classes of SOP, In-Shop (with its gallery), iNaturalist and Omniglot, and for
            MNIST the official test images, which have the training classes; your own data has a test if it has a
            folder test/ or a column `split`. A fraction in (0, 1) takes that part of the classes, at least two, the
            same ones for any seed. "none" keeps all classes for training. With a fraction or "none", the validation
            images, test images, gallery and distractors that come with the data are ignored, and all images of a
            class stay together.
        seed: seed of the validation classes, at least 0.

    Raises:
        ValueError: an argument is out of range, there are too few classes, or each has a single image.

    Example:
        >>> grey = np.zeros((20, 8, 8), np.uint8)
        >>> images = ImageSet("dots", np.arange(20) // 2, list("abcdefghij"), arrays=grey)
        >>> [len(part.classes) if part else 0 for part in split(images, validation=0.25, test=0.2)]
        [6, 2, 2]
    """
    if test != "auto" or isinstance(validation, str) or not validation:
        images = replace(images, validation_images=None)
    if test != "auto":
        images = replace(images, test_images=None, gallery=None, distractors=None)
    has_given_split = images.test_images is not None or images.validation_images is not None
    classes = images.classes
    total = len(classes)
    given_test = given_validation = None
    if images.test_images is not None:
        given_test = _drop_empty_classes(images.subset(images.test_images))
        images = images.subset(~images.test_images)
    if images.validation_images is not None:
        given_validation = _drop_empty_classes(images.subset(images.validation_images))
        images = images.subset(~images.validation_images)
    counts = np.bincount(images.labels, minlength=total)
    if not isinstance(validation, str) and not 0 <= validation < 1:
        raise ValueError(f"validation: got {validation}, expected a fraction of the training classes in [0, 1)")
    if seed < 0:
        raise ValueError(f"seed: got {seed}, expected at least 0")
    test_ids = _test_classes(images, counts, test)
    train_ids = np.setdiff1d(np.flatnonzero(counts) if has_given_split else np.arange(total), test_ids)
    training_count = len(train_ids)
    validation_ids = np.empty(0, dtype=np.int64)
    if isinstance(validation, str):
        validation_ids = _fold(train_ids, counts, validation)
    elif validation > 0 and given_validation is None:
        candidates = train_ids[counts[train_ids] >= 2]
        count = max(2, round(validation * training_count))
        if len(candidates) < count:
            raise ValueError(
                f"validation: got {validation}, which holds out {count} classes of two images or more, expected at "
                f"most {len(candidates)} of the {training_count} training classes{_needs(images)}"
            )
        random = np.random.default_rng([seed, training_count])
        validation_ids = np.sort(random.choice(candidates, count, replace=False))
    train_ids = np.setdiff1d(train_ids, validation_ids)
    if len(train_ids) < 2:
        names = f" ({', '.join(classes)})" if total <= MAX_NAMED_CLASSES else ""
        raise ValueError(
            f"data: got {total} classes{names}, {len(test_ids)} for the test and {len(validation_ids)} for validation, "
            f"which leaves {len(train_ids)} for training, expected at least 2"
            + _needs(images)
            + ("; without a test: test='none' (--set data.test=none)" if len(test_ids) else "")
            + _unlisted_folders(images)
        )
    is_measured = len(test_ids) or len(validation_ids) or given_test is not None or given_validation is not None
    if counts[train_ids].max(initial=0) < 2 and not is_measured:
        raise ValueError(
            f"data: got one image of each of the {len(train_ids)} classes, expected classes of two images or more"
            + _needs(images)
        )
    return Split(
        images.of_classes(train_ids),
        images.of_classes(validation_ids) if len(validation_ids) else given_validation,
        images.of_classes(test_ids) if len(test_ids) else given_test,
    )


def _needs(images: ImageSet) -> str:
    """Return the end of a message that says what learning needs, and what works without it."""
    counts = np.bincount(images.labels, minlength=len(images.classes))
    several = int((counts >= 2).sum())
    hint = f". {images.hint}" if images.hint else ""
    return (
        f"{hint}; learning needs {MIN_CLASSES} classes of two images or more, 2 to train on and 2 held out to choose "
        f"the epoch (here are {several} such classes, {len(images)} images together); with --set data.validation=0 two "
        f"are enough, but nothing says how good the result is; meanwhile, {WITHOUT_TRAINING}"
    )


def _unlisted_folders(images: ImageSet) -> str:
    """Return the end of a message that names the folders that could not be listed."""
    if not images.unlisted:
        return ""
    folders = [f"{name} ({reason})" for name, reason in images.unlisted.items()]
    return f"; folders that cannot be listed and are left out: {len(folders)}, {first_names(folders)}"


def _drop_empty_classes(images: ImageSet) -> ImageSet:
    """Return the set without the classes that have no images in it."""
    return images.of_classes(np.unique(images.labels))


def altered(images: ImageSet, fraction: float = 1.0, wrong_labels: float = 0.0, seed: int = 0) -> ImageSet:
    """Make a training set harder: keep fewer images of each class, and give some images a wrong label.

    Args:
        images: the training images.
        fraction: fraction of the images of each class to keep, drawn with `seed`; at least two of each class are kept.
        wrong_labels: fraction of the remaining images that get the label of another class, drawn with `seed`.
        seed: seed of both draws.

    Returns:
        The harder set; `images` itself with the default arguments.

    Example:
        >>> images = ImageSet("dots", np.arange(20) // 10, ["a", "b"], arrays=np.zeros((20, 8, 8), np.uint8))
        >>> fewer = altered(images, fraction=0.3, wrong_labels=0.5)
        >>> len(fewer), fewer.classes
        (6, ['a', 'b'])
    """
    if fraction < 1:
        random = np.random.default_rng([seed, 1])
        samples = []
        for label in range(len(images.classes)):
            rows = np.flatnonzero(images.labels == label)
            count = min(len(rows), max(2, round(fraction * len(rows))))
            samples.append(random.choice(rows, count, replace=False))
        images = images.subset(np.sort(np.concatenate(samples)))
    if wrong_labels > 0:
        random = np.random.default_rng([seed, 2])
        labels = images.labels.copy()
        rows = random.choice(len(labels), round(wrong_labels * len(labels)), replace=False)
        labels[rows] = (labels[rows] + random.integers(1, len(images.classes), len(rows))) % len(images.classes)
        images = replace(images, labels=labels)
    return images


def _fold(train_ids: np.ndarray, counts: np.ndarray, fold: str) -> np.ndarray:
    """Return the classes of fold "k/n": the k-th of n blocks of training classes, without classes of a single image."""
    match = re.fullmatch(r"(\d+)/(\d+)", fold)
    if not match or not 1 <= int(match[1]) <= int(match[2]) or int(match[2]) < 2:
        raise ValueError(f"validation: got {fold!r}, expected a fraction in [0, 1) or a fold such as '1/4'")
    block = np.array_split(train_ids, int(match[2]))[int(match[1]) - 1]
    block = block[counts[block] >= 2]
    if len(block) < 2:
        raise ValueError(
            f"validation: got {fold!r}, which holds out {len(block)} classes of two images or more, expected at least 2"
        )
    return block


def _test_classes(images: ImageSet, counts: np.ndarray, test: str | float) -> np.ndarray:
    """Return the labels of the test classes that `test` selects, ascending."""
    if test == "none":
        return np.empty(0, dtype=np.int64)
    if test == "auto":
        return np.array(sorted(images.test_classes), dtype=np.int64)
    if isinstance(test, str) or not 0 < test < 1:
        raise ValueError(f"test: got {test!r}, expected 'auto', 'none' or a fraction in (0, 1)")
    candidates = np.flatnonzero(counts >= 2)
    count = max(2, round(test * len(counts)))
    if len(candidates) < count:
        raise ValueError(
            f"test: got {test}, which takes {count} classes of two images or more, expected at most "
            f"{len(candidates)} of the {len(counts)} classes"
        )
    return np.sort(np.random.default_rng(len(counts)).choice(candidates, count, replace=False))


def some_classes(labels: np.ndarray, limit: int, seed: int, fewest: int = 2) -> np.ndarray:
    """Draw whole classes, so that they have at most `limit` images together.

    Args:
        labels: (N,) the label of each image.
        limit: most images; all of them are taken if there are no more.
        seed: seed of the draw.
        fewest: classes that are taken even if they have more images.

    Returns:
        The rows of the images of these classes, in order.

    Example:
        >>> len(some_classes(np.arange(40) // 4, 15, seed=0)), len(some_classes(np.arange(40) // 4, 40, seed=0))
        (12, 40)
    """
    if len(labels) <= limit:
        return np.arange(len(labels))
    classes, counts = np.unique(labels, return_counts=True)
    order = np.random.default_rng(seed).permutation(len(classes))
    taken = max(fewest, int((counts[order].cumsum() <= limit).sum()))
    return np.flatnonzero(np.isin(labels, classes[order[:taken]]))
