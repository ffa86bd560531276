"""Which photographs results were made from: degraded copies have an archive of their own."""

from __future__ import annotations

from typing import Any, NamedTuple


class Copies(NamedTuple):
    """Degraded copies of the photographs of a data set.

    Attributes:
        data: the name of the data set in results.
        quality: what is known of the copies.
    """

    data: str
    quality: str


DEGRADED = {
    "1e14fb3c6a164db54219fa3b1bc99d1241938fcdf0c86241bf51dc7850ded55c": Copies(
        "cub", "shorter side 256 pixels, compressed to about 8 kB an image"
    ),
    "fa85655d68f8d0eed31ba70596481ae51780fcfe4ec97c495886b9d3cf2d02c8": Copies(
        "cars", "shorter side 160 pixels, compressed"
    ),
    "362b12c7e4485933a94f8b8423738a4fb8183f177222bf869792be605fe1eef6": Copies("cub", "those of 0.1.0, compressed"),
    "58e374feb298e5167363900741425738d1777fbecced5eebe3ea71f1053be7f6": Copies("cars", "those of 0.1.0, compressed"),
}
"""identity of the images -> the copies; results of that time do not say it themselves"""
TITLES = {"cub": "CUB", "cars": "Cars"}
"""data sets of photographs whose first results came from degraded copies"""
ADVICE = "compare rows with each other, not with new results"


def is_degraded(identity: str | None) -> bool:
    """Whether images of this identity are degraded copies."""
    return identity in DEGRADED


def is_archived(results: Any) -> bool:
    """Whether all results of a study (`Results`) are from degraded copies."""
    return all(map(is_degraded, results.identities.values()))


def mark(results: Any) -> str:
    """The sentence at the top of a study's page that says which of its results are from degraded copies; or nothing."""
    titles = [results.study.data[name].title or name for name, of in results.identities.items() if is_degraded(of)]
    if not titles:
        return ""
    which = "[Archive](archive.md)" if is_archived(results) else f"{', '.join(titles)}, as in the [archive](archive.md)"
    return f"**{which}:** from degraded copies of the photographs; {ADVICE}."


def copies_list(all_results: list) -> str:
    """An item for each set of degraded copies from which results were made: its images, quality and identity."""
    from proxymetric.studies.scores import image_count
    from proxymetric.studies.search import short

    counts: dict[str, tuple[int, str]] = {}
    for results in all_results:
        for cell, by_seed in results.runs.items():
            identity = results.identities[cell.data]
            if is_degraded(identity):
                known = (image_count(run.data) for run in by_seed.values())
                title = results.study.data[cell.data].title or cell.data
                counts[identity] = max(counts.get(identity, (0, title)), (max(known), title))
    return "\n".join(
        f"- {title}: {count:,} images, {DEGRADED[identity].quality}, identity {short(identity)}."
        for identity, (count, title) in counts.items()
    )


def short_remark(runs: dict[str, dict[str, list[dict]]]) -> str:
    """What the remarks of the catalogue rest on, in a few words."""
    share = "Most" if "except" in remark(runs) else "All"
    return f'{share} results "here" are from degraded copies of {" and ".join(TITLES.values())}.'


def remark(runs: dict[str, dict[str, list[dict]]]) -> str:
    """What the remarks of the catalogue rest on: the methods with results from the photographs themselves.

    Args:
        runs: method -> group of seeds -> results.
    """
    measured = {
        title: [
            f"`{method}`"
            for method, groups in sorted(runs.items())
            if any(
                run["data"].get("name") == name and not is_degraded(run["data"].get("identity"))
                for group in groups.values()
                for run in group
            )
        ]
        for name, title in TITLES.items()
    }
    originals = " and of ".join(f"{', '.join(methods)} on {title}" for title, methods in measured.items() if methods)
    only = f", except those of {originals}" if originals else ""
    return f'Results "here" are from degraded copies of the photographs of {" and ".join(TITLES.values())}{only}.'
