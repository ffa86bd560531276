"""Tables of the training loop: against a bare loop, the share of the criterion, and images from files."""

from __future__ import annotations

from typing import Any

from generator.scores import BENCHMARKS, paragraph, read, table


def loop_table() -> str:
    """The recorded runs of benchmarks/train_step.py: images per second of the trainer and of a bare loop."""
    rows, notes = [], []
    for kind in ("cuda", "cpu"):
        study = read(BENCHMARKS / f"train-step-{kind}.json")
        setting, loop = study["setting"], study["loop"]
        for side in ("bare", "trainer", "compiled trainer"):
            if side not in loop:
                continue
            ratio = loop.get(f"images/s, {side} to bare")
            rows.append(
                [
                    study["machine"].get("gpu") or "CPU, 1 thread",
                    f"`{setting['backbone']}`, {setting['size']} px, batches of {setting['batch']}",
                    side,
                    f"{loop[side]['images/s']['median']:,.0f}",
                    f"{loop[side]['ms']['median']:.1f} ms",
                    "" if ratio is None else _spread(ratio),
                ]
            )
        first = loop["seconds of the first epoch, with set-up"]
        if kind == "cuda":
            each = "; ".join(f"{name}: {seconds:.0f} s" for name, seconds in first.items())
            notes.append(f"Until the end of the first epoch on the GPU, with set-up and compilation: {each}.")
    columns = ["machine", "network", "loop", "images/s", "a step", "images/s, of the bare loop (quartiles)"]
    return table(columns, rows) + "\n\n" + "\n".join(paragraph(note) for note in notes)


def criterion_table() -> str:
    """What a criterion adds to a step of a ResNet-50, and what it takes alone, on a GPU."""
    study = read(BENCHMARKS / "train-step-cuda.json")
    rows = []
    for name, found in study["criterion"].items():
        share = found.get("share of a step")
        alone = f"{found['ms alone']['median']:.1f} ms"
        percent = "" if share is None else f"{100 * share['median']:.1f} %"
        spread = "" if share is None else " to ".join(f"{100 * each:.1f}" for each in share["quartiles"])
        rows.append([f"`{name}`", alone, percent, spread])
    return table(["method", "alone", "of a step", "quartiles"], rows)


def files_table() -> str:
    """The recorded run of benchmarks/files.py: images per second from JPEG files, against a DataLoader."""
    study = read(BENCHMARKS / "files-cpu.json")
    rows = []
    for cache in ("none", "memory"):
        for workers, found in study[cache].items():
            for side in ("feed", "reduced"):
                if side not in found:
                    continue
                rows.append(
                    [
                        f"`--cache {cache}`" + (", reduced decoding" if side == "reduced" else ""),
                        workers.removesuffix(" workers"),
                        f"{found[side]['CPU ms of an image']['median']:.1f} ms",
                        f"{found['DataLoader']['CPU ms of an image']['median']:.1f} ms",
                        _spread(found[f"images/s, {side} to DataLoader"]),
                        _spread(found[f"images per CPU second, {side} to DataLoader"]),
                    ]
                )
    columns = ["images", "workers", "CPU time of an image", "DataLoader's", "images/s, of DataLoader's (quartiles)"]
    return table([*columns, "images per CPU second, of DataLoader's"], rows)


def embedding_table() -> str:
    """The same record: three uses of a network without gradients, against a loop over the same files."""
    record = read(BENCHMARKS / "files-cpu.json")["networks"]
    networks = record.get("networks", record)  # with a head of its own, if it was measured by itself
    uses = {
        "frozen features": "features for `--frozen`, with their file",
        "embed": "`Model.embed`: `index`, `embed`, `search`",
        "evaluation": "an evaluation",
    }
    rows = [
        [
            text,
            f"{networks[name]['ours']['images/s']['median']:.0f}",
            f"{networks[name]['bare']['images/s']['median']:.0f}",
            _spread(networks[name]["images/s, ours to bare"]),
        ]
        for name, text in uses.items()
    ]
    return table(["images through a ResNet-18", "images/s", "bare loop", "of the bare loop's (quartiles)"], rows)


def _spread(ratio: dict[str, Any]) -> str:
    low, high = ratio["quartiles"]
    return f"{ratio['median']:.2f} ({low:.2f} to {high:.2f})"
