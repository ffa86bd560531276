"""What a run writes down of a training: the content of `run.json`, and `result.json` before any score."""

from __future__ import annotations

import time
from typing import Any

from proxymetric.data import ImageSet, Split
from proxymetric.data.photographs import describe_photographs
from proxymetric.encoders import Encoder
from proxymetric.runs import result as results
from proxymetric.runs.assemble import RunContext, class_counts, eval_view
from proxymetric.runs.evaluation_set import known_classes
from proxymetric.runs.result import Result
from proxymetric.runs.training_part import Training
from proxymetric.training.optim import first_rates


def describe_run(
    context: RunContext,
    choice: dict[str, Any] | None,
    encoder: Encoder,
    normalise: str,
    training: ImageSet,
    images: ImageSet,
) -> dict[str, Any]:
    """The content of `run.json`: all that is needed to continue the run or to use its model.

    Args:
        context: what the parts of the run share.
        choice: how the method was chosen; None if the user named it.
        encoder: the encoder that is trained.
        normalise: how its vectors are normalised.
        training: the images to train on.
        images: all images of the data.
    """
    optional = {"auto": choice, "class_counts": class_counts(context.recipe, training)}
    return {key: value for key, value in optional.items() if value is not None} | {
        "recipe": context.recipe.as_dict(),
        "said": context.recipe.changed,
        "encoder": encoder.config,
        "normalise": normalise,
        "view": eval_view(context.recipe),
        "classes": training.classes,
        "data": {
            "name": images.name,
            "identity": images.identity(),
            "images": len(images),
            "classes": len(images.classes),
        },
        "versions": results.versions(),
    }


def result_of_training(
    context: RunContext, training: Training, images: ImageSet, parts: Split, choice: dict[str, Any] | None
) -> Result:
    """The result of a training, without scores on the unseen classes.

    Args:
        context: what the parts of the run share.
        training: the finished training.
        images: all images of the data.
        parts: their split.
        choice: how the method was chosen; None if the user named it.
    """
    recipe, trainer = context.recipe, training.trainer
    chosen = trainer.chosen
    data: dict[str, Any] = {"name": images.name, "identity": images.identity()} | describe_photographs(images)
    for name, part in zip(("train", "validation", "test"), parts):
        if part is not None:
            data[name] = describe_photographs(part) | {"classes": len(part.classes)}
            if part is not parts.train and (known := known_classes(part, parts.train)):
                data[name]["training_classes"] = known
    return Result(
        commit=results.commit(),
        protocol=recipe.protocol,
        recipe=recipe.as_dict(),
        weights=training.facts.weights,
        data=data,
        versions=results.versions(),
        machine=results.machine(context.device, trainer.world.size),
        finished=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        rates=first_rates(trainer.optimizer, trainer.learner.criterion, trainer.options),
        **cost(context, training),
        auto=choice,
        closed_form=training.facts.closed_form,
        epochs=trainer.passed,
        chosen_epoch=chosen["epoch"],
        chosen_step=chosen["step"],
        chosen_by=recipe.train.monitor if trainer.best is not None and trainer.steps else "last",
        validation=chosen,
        curve=trainer.curve,
    )


def result_of_refit(context: RunContext, training: Training, images: ImageSet, epochs: float) -> dict[str, Any]:
    """The entry `refit` of a result.

    Args:
        context: what the parts of the run share.
        training: the finished refit.
        images: that it was trained on.
        epochs: of it.
    """
    refit = {"epochs": epochs, "images": readable(context, images), "classes": len(images.classes)}
    computed = training.facts.closed_form
    return refit | cost(context, training) | ({} if computed is None else {"closed_form": computed})


def cost(context: RunContext, training: Training) -> dict[str, Any]:
    """The cost of a training: time, throughput, memory, parameters and steps."""
    trainer = training.trainer
    rows = sum(table.values.numel() for table in trainer.learner.criterion.row_tables())
    rate = round(trainer.images * trainer.world.size / trainer.seconds, 1) if trainer.seconds else None
    return {
        "training_seconds": round(trainer.seconds, 1),
        "waiting_seconds": round(trainer.waited, 1),
        "images_per_second": rate,
        "memory": training.earlier_result().get("memory") or results.peak_memory(context.device),
        "parameters": results.count_parameters(trainer.learner, trainer.trained, rows, trainer.sharded.remote),
        "steps": trainer.step,
        "skipped_steps": trainer.skipped,
    }


def readable(context: RunContext, images: ImageSet) -> int:
    """The number of images without those that this run could not read."""
    bad = context.bad
    return len(images) - (sum(images.title(row) in bad for row in range(len(images))) if bad else 0)
