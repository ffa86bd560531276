"""Images that come divided into training, validation and test: by folders such as train/ and test/, or by a column."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from proxymetric.data.images import ImageSet

PART_NAMES = {
    "train": "train",
    "training": "train",
    "val": "validation",
    "valid": "validation",
    "validation": "validation",
    "dev": "validation",
    "test": "test",
    "testing": "test",
    "query": "query",
    "queries": "query",
    "gallery": "gallery",
    "distractor": "distractor",
    "distractors": "distractor",
}
"""names of folders, or values of the column `split`, in lower case -> the part that they stand for"""
_PURPOSES = {
    "train": "to train on",
    "validation": "to choose the epoch",
    "test": "for the test",
}


def part_of(name: str) -> str | None:
    """Return the part that a folder name or a value of the column `split` stands for; None if it stands for none.

    Example:
        >>> part_of("Valid"), part_of("cat")
        ('validation', None)
    """
    return PART_NAMES.get(name.strip().lower())


def divide(images: ImageSet, parts: np.ndarray, source: str, way_out: str) -> ImageSet:
    """Record which part each image belongs to.

    A class may be in several parts. A set without training images is not divided: all its images are for the test.
    Distractors are test images that are found but are never queries; beside queries and a gallery they belong to the
    gallery.

    Args:
        images: the images.
        parts: (N,) values of `PART_NAMES`.
        source: where the parts come from, for messages, such as "shop/train, shop/test".
        way_out: how to open the images without the division, for messages.

    Returns:
        The images with `test_images`, `validation_images`, `gallery` and `distractors`, and a note that says what was
        done.

    Raises:
        ValueError: there are queries without a gallery, or a part has fewer than two classes.

    Example:
        >>> grey = np.zeros((4, 8, 8), np.uint8)
        >>> images = ImageSet("dots", np.array([0, 1, 0, 1]), ["a", "b"], arrays=grey)
        >>> divided = divide(images, np.array(["train", "train", "test", "test"]), "train, test", "layout='folder'")
        >>> divided.test_images
        array([False, False,  True,  True])
        >>> print(divided.notes[0])
        train, test: a split, 2 images of 2 classes to train on, 2 images of 2 classes for the test (to ignore ...)
    """
    distractors, queries = parts == "distractor", parts == "query"
    if queries.any():
        parts, distractors = np.where(distractors, "gallery", parts), np.zeros(len(parts), dtype=bool)
    gallery = parts == "gallery"
    if distractors.any() and not (parts == "test").any():
        raise ValueError(
            f"{source}: got distractors without test images, expected images of the part test, or queries and a "
            f"gallery; to ignore the split: {way_out}"
        )
    test_mask = np.isin(parts, ("test", "query", "gallery", "distractor"))
    masks = {"train": parts == "train", "validation": parts == "validation", "test": test_mask}
    if gallery.any() != queries.any() or (gallery.any() and (parts == "test").any()):
        present_parts = ", ".join(part for part in ("test", "query", "gallery") if (parts == part).any())
        raise ValueError(
            f"{source}: got the parts {present_parts}, expected either test, or both query and gallery; "
            f"to ignore the split: {way_out}"
        )
    classes = {part: np.unique(images.labels[mask]) for part, mask in masks.items() if mask.any()}
    for part, labels in classes.items():
        if len(labels) < 2:
            raise ValueError(
                f"{source}: got one class only ({images.classes[labels[0]]!r}) {_PURPOSES[part]}, expected at least "
                f"two classes in each part of a split; to ignore the split: {way_out}"
            )
    counts = ", ".join(
        f"{int(masks[part].sum())} images of {len(labels)} classes {_PURPOSES[part]}"
        for part, labels in classes.items()
    )
    notes = [f"{source}: a split, {counts} (to ignore the split: {way_out})"]
    for part in ("validation", "test"):
        shared = np.intersect1d(classes.get("train", ()), classes.get(part, ()))
        if len(shared):
            notes.append(
                f"{len(shared)} of the {len(classes[part])} {part} classes are training classes too, such as "
                f"{images.classes[int(shared[0])]!r}: the scores of the {part} images measure retrieval of known "
                "classes, not of new ones"
            )
    if "train" not in classes:
        masks["validation"] = masks["test"] = np.zeros(len(images), dtype=bool)
        notes.append(f"{source}: no training images; all images are taken as one set")
    return replace(
        images,
        validation_images=masks["validation"] if masks["validation"].any() else None,
        test_images=masks["test"] if masks["test"].any() else None,
        gallery=gallery if gallery.any() else None,
        distractors=distractors if distractors.any() else None,
        notes=(*images.notes, *notes),
    )
