"""Refuses processes that were not started alike: another recipe, other images, or a folder that they do not share."""

from __future__ import annotations

import secrets
from pathlib import Path

from proxymetric.arguments.recipe_keys import flat_keys
from proxymetric.data import ImageSet
from proxymetric.runs.recipe import Recipe
from proxymetric.training.process_group import ProcessGroup

OF_A_MACHINE = {"data.path", "data.workers", "encoder.weights", "train.device", "train.track"}
"""keys that may differ between machines"""


def check_recipe(world: ProcessGroup, recipe: Recipe) -> None:
    """Refuse recipes that differ between processes.

    Raises:
        ValueError: a key has other values in another process.
    """
    first, *others = (flat_keys(each, deep=True) for each in world.gather(recipe.as_dict()))
    for rank, other in enumerate(others, 1):
        for key in sorted(first.keys() | other.keys()):
            if key not in OF_A_MACHINE and first.get(key) != other.get(key):
                raise ValueError(
                    f"{key}: got {other.get(key)!r} in process {rank} and {first.get(key)!r} in process 0, expected "
                    "the same command for all processes"
                )


def check_images(world: ProcessGroup, images: ImageSet) -> None:
    """Refuse images that differ between processes: the content of every batch depends on all of them.

    Raises:
        ValueError: a process has other images.
    """
    facts = world.gather((images.identity(), len(images), list(images.classes)))
    identity, count, classes = facts[0]
    for rank, (other_identity, other_count, other_classes) in enumerate(facts[1:], 1):
        if other_identity != identity:
            only = sorted(set(classes) ^ set(other_classes))
            named = f"; only one of them has the class {only[0]}" if only else ""
            raise ValueError(
                f"data: got {other_count} images of {len(other_classes)} classes in process {rank} and {count} images "
                f"of {len(classes)} classes in process 0, whose files differ{named}; expected the same files for all "
                "processes"
            )


def check_folder(world: ProcessGroup, folder: Path) -> None:
    """Refuse a folder for the run that is not the same folder in all processes.

    Raises:
        ValueError: a process does not see what the first one writes.
    """
    if world.size == 1:
        return
    mark = folder / f".shared-{world.from_first(lambda: secrets.token_hex(8))}"
    world.from_first(mark.touch)
    try:
        answers = world.gather(mark.exists())
    finally:
        world.from_first(lambda: mark.unlink(missing_ok=True))
    if not all(answers):
        raise ValueError(
            f"out: got {folder}, which process {answers.index(False)} does not share with process 0; expected a folder "
            "on a disk that all machines share"
        )
