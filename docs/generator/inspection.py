"""Tables of benchmarks/inspection.py: how much of known faults `inspect` finds."""

from __future__ import annotations

from generator.scores import BENCHMARKS, interval, paragraph, read, table


def inspection_table() -> str:
    """The recorded runs on CUB with known faults, and on Cars196."""
    study = read(BENCHMARKS / "inspection-cpu.json")
    parts = []
    if "cub" in study:
        parts += _cub(study["cub"])
    if "cars" in study:
        parts.append(_cars(study["cars"]))
    return "\n\n".join(parts)


def _cub(study: dict) -> list[str]:
    rows = []
    for vectors in ("untrained", "trained on the wrong labels"):
        seeds = list(study[vectors].values())
        if not seeds:
            continue
        for name in ("wrong labels", "duplicates"):
            found = [seed[name] for seed in seeds]
            put_in = sum(each["put in"] for each in found) / len(found)
            listed = sum(each["listed" if name == "wrong labels" else "pairs listed"] for each in found) / len(found)
            scores = [interval([each[score] for each in found]) for score in ("precision", "recall")]
            rows.append([f"{name}, {vectors}", f"{put_in:.0f}", f"{listed:.0f}", *scores, str(len(found))])
    untouched = study["untouched"]
    text = paragraph(
        f"The training half of CUB ({study['images']:,} images of {study['classes']} classes), with "
        f"{100 * study['labels changed']:.0f} % of the labels changed at random and copies of "
        f"{100 * study['copies put in']:.0f} % of the images put in (compressed; a third scaled, a third cut; half of "
        f"them with another label). Vectors: the features of `{study['backbone']}` at {study['size']} pixels "
        "(untrained), and those of a head that was trained on these images with the wrong labels. Per cent, with 95 % "
        f"intervals over seeds. In CUB as it is, {untouched['wrong labels listed']} labels, "
        f"{len(untouched['groups of duplicates'])} groups of duplicates and {untouched['lonely listed']} lonely images "
        "are listed. Wrong labels of CUB itself count as mistakes here, its own duplicates do not."
    )
    columns = ["list", "put in", "listed", "precision", "recall", "seeds"]
    parts = [text, table(columns, rows)]
    if foreign := study.get("foreign"):
        parts.append(
            paragraph(
                f"Of {foreign['put in, one at a time']} photographs of Cars196, put into the birds one at a time, "
                f"{foreign['lonely']} are listed as lonely."
            )
        )
    return parts


def _cars(study: dict) -> str:
    return paragraph(
        f"Cars196 ({study['images']:,} images, both halves) has {study['pairs of equal files with two labels']} pairs "
        f"of equal files with two labels. {study['of these found']} of them are found, and "
        f"{study['of these found by pixels alone']} if the bytes are not looked at. "
        f"{len(study['groups with two labels without equal files'])} more pictures with two labels are found that "
        "differ in size, compression or margins."
    )
