"""What an inspection finds in a set of labelled images, as lists and as tables."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from proxymetric.inspection.contents import Contents
from proxymetric.inspection.duplicates import DuplicateGroup
from proxymetric.inspection.lonely import LonelyImages
from proxymetric.inspection.wrong_labels import WrongLabels

MADE_BY = "proxymetric inspect"
COLUMNS: dict[str, tuple[str, ...]] = {
    "wrong-labels": (
        "file", "label", "suggested_label", "probability_wrong", "nearest_of_label", "nearest_of_suggested_label",
    ),
    "duplicates": ("group", "file", "label", "labels", "match", "copy_of", "similarity", "correlation"),
    "lonely": ("file", "label", "similarity", "nearest", "similarity_of_label", "nearest_of_label"),
    "unreadable": ("file", "label", "reason"),
}  # fmt: skip
"""name of a table -> its columns"""


@dataclass(frozen=True, repr=False)
class Findings:
    """What was found in a set of labelled images.

    Rows of the lists are rows of `contents`: `file(row)` is the file of one, `label(row)` its label.

    Args:
        contents: the readable images, and why the others cannot be read.
        wrong_labels: labels that are likely wrong, most likely first.
        duplicates: groups of images that show the same picture, those with two labels first.
        lonely: images that are far from every other, loneliest first.
    """

    contents: Contents
    wrong_labels: WrongLabels
    duplicates: list[DuplicateGroup]
    lonely: LonelyImages

    def __repr__(self) -> str:
        two = sum(group.two_labels for group in self.duplicates)
        return (
            f"{type(self).__name__}({self.contents.images.name!r}, {len(self.contents.kept)} images: "
            f"{len(self.wrong_labels.listed)} likely wrong labels, {len(self.duplicates)} groups of duplicates "
            f"({two} with two labels), {len(self.lonely.listed)} lonely, {len(self.contents.unreadable)} unreadable)"
        )

    def file(self, row: int) -> str:
        """The file of a row; empty for -1."""
        return self.contents.images.title(int(self.contents.kept[row])) if row >= 0 else ""

    def label(self, row: int) -> str:
        """The class name of a row."""
        images = self.contents.images
        return images.classes[images.label_of(int(self.contents.kept[row]))]

    def tables(self) -> dict[str, list[dict[str, Any]]]:
        """The lists as rows of plain values, by the names of `COLUMNS`."""
        images = self.contents.images
        wrong_labels = [
            (
                self.file(each.row), self.label(each.row), images.classes[each.suggestion], round(each.probability, 4),
                self.file(each.nearest_of_label), self.file(each.nearest_of_suggestion),
            )
            for each in self.wrong_labels.listed
        ]  # fmt: skip
        duplicates: list[tuple[Any, ...]] = []
        for number, group in enumerate(self.duplicates, 1):
            labels = "two labels" if group.two_labels else "same label"
            for row in group.rows:
                pairs = [pair for pair in group.copies if pair.second == row]
                head = (number, self.file(row), self.label(row), labels)
                if not pairs:
                    duplicates.append((*head, "", "", None, None))
                    continue
                pair = max(pairs, key=lambda each: each.correlation)
                numbers = (round(pair.similarity, 4), round(pair.correlation, 4))
                duplicates.append((*head, pair.kind, self.file(pair.first), *numbers))
        lonely = [
            (
                self.file(each.row), self.label(each.row), round(each.similarity, 4), self.file(each.nearest),
                None if math.isnan(each.similarity_of_label) else round(each.similarity_of_label, 4),
                self.file(each.nearest_of_label),
            )
            for each in self.lonely.listed
        ]  # fmt: skip
        unreadable = [
            (images.title(index), images.classes[images.label_of(index)], reason)
            for index, reason in self.contents.unreadable.items()
        ]
        rows = {"wrong-labels": wrong_labels, "duplicates": duplicates, "lonely": lonely, "unreadable": unreadable}
        return {name: [dict(zip(COLUMNS[name], row, strict=True)) for row in rows[name]] for name in COLUMNS}

    def summary(self) -> dict[str, Any]:
        """The counts, the numbers behind the lists, and the lists themselves, for JSON."""
        limit = self.lonely.limit
        return {
            "made_by": MADE_BY,
            "finished": True,
            "data": self.contents.images.name,
            "images": len(self.contents.images),
            "classes": len(self.contents.images.classes),
            "estimated_share_of_wrong_labels": round(self.wrong_labels.share, 5),
            "lonely_below_similarity": None if math.isnan(limit) else round(limit, 4),
            **self.tables(),
        }
