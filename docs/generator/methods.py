"""A page for each method of the catalogue, generated from its row, its pieces and the stored results."""

from __future__ import annotations

import html
import inspect
from pathlib import Path
from typing import Any

from generator.photographs import ADVICE, is_degraded, remark
from generator.scores import RESULTS, groups, interval, score, table

EXCLUDED = ("figures", "mlrc")
"""folders of results/ that hold no results of single runs"""
FIRST_VERSION = ("cub-160", "vit-s-128", "cub-proxy-anchor-160")
"""folders of results/ with results of 0.1.0"""


def method_pages() -> dict[str, str]:
    """The pages of all methods and their index: path in the site -> text."""
    from proxymetric.papers import CATALOGUE, CLOSED_FORMS

    results, methods = stored_runs(), CATALOGUE | CLOSED_FORMS
    pages = {f"methods/{slug(name)}.md": method_page(name, results.get(name, {})) for name in methods}
    rows = [
        [f"[`{name}`]({slug(name)}.md)", row.about.paper, row.about.choose, "yes" if name in results else ""]
        for name, row in methods.items()
    ]
    index = table(["method", "paper", "choose it", "measured here"], rows)
    text = (
        "A method assembles a loss, a source of references and, for some methods, a weighting or a scheme, with the "
        "numbers of its paper. The last three train nothing: they compute the head from the features of the backbone. "
        "`proxymetric methods NAME` prints the arguments of a method; "
        f"[Which backbone and method tonight](../choose.md) helps to choose. {remark(results)}"
    )
    return pages | {"methods/index.md": f"# Methods\n\n{text}\n\n{index}\n"}


def slug(name: str) -> str:
    """The file name of a method's page.

    >>> slug("proxy-nca++")
    'proxy-nca-pp'
    """
    return name.replace("++", "-pp")


def method_page(name: str, results: dict[str, list[dict]]) -> str:
    """The page of a method: catalogue row, function, pieces, measured results."""
    from proxymetric.criterion import NEEDS
    from proxymetric.papers import CLOSED_FORMS, lookup

    row = lookup(name)
    facts = [f"**Paper:** {row.about.paper}", f"**Choose it:** {row.about.choose}"]
    if row.about.samples_per_class:
        facts.append(f"**Batches:** {row.about.samples_per_class} images of a class in each batch")
    facts += [f"**Needs** in your own loop: {_code(NEEDS[need])}" for need in row.about.needs]
    command = f"```bash\nproxymetric train --data IMAGES --method {name}\n```"
    call = f'criterion = pm.method("{name}", classes=100, dim=512{_steps(row)})'
    usage = command if name in CLOSED_FORMS else f"```python\nimport proxymetric as pm\n\n{call}\n```\n\n{command}"
    options = "    options:\n      heading_level: 3\n      members: false\n      skip_local_inventory: true\n"
    directive = f"::: {row.__module__}.{row.__name__}\n{options}"
    parts = [f"# `{name}`", "\n".join(f"- {fact}" for fact in facts), "## Use it", usage, "## Arguments", directive]
    for kind, piece in pieces(name):
        parts.append(f"## {kind}")
        parts.append(f"::: {piece.__module__}.{piece.__qualname__}\n{options}")
    parts += ["## Measured here", results_text(results)]
    return "\n\n".join(parts) + "\n"


def _steps(row: Any) -> str:
    return ", steps_per_epoch=46" if "epochs" in row.about.needs else ""


def _code(text: str) -> str:
    """A need with its call marked as code: everything up to the first space or colon outside of brackets."""
    depth = 0
    for position, character in enumerate(text):
        depth += {"(": 1, ")": -1}.get(character, 0)
        if depth == 0 and character in " :":
            return f"`{text[:position]}`{html.escape(text[position:])}"
    return f"`{text}`"


def pieces(name: str) -> list[tuple[str, type]]:
    """The classes that a method is assembled from, with the kind of each."""
    from proxymetric.core.pieces import Compare, Objective, Source, Sum, Weighting
    from proxymetric.papers import closed_form, lookup

    if (computed := closed_form(name)) is not None:
        return [("Form", type(computed.form(1.0, None)))]
    objective = lookup(name)(4, 8)
    kinds: dict[type, str] = {}
    for module in objective.modules():
        if isinstance(module, Compare):
            for kind, piece in (("Loss", module.loss), ("Regulariser", module.regulariser)):
                if piece is not None and inspect.isclass(type(piece)) and not inspect.isroutine(piece):
                    kinds.setdefault(type(piece), kind)
        elif isinstance(module, Source):
            kinds.setdefault(type(module), "Source")
        elif isinstance(module, Weighting):
            kinds.setdefault(type(module), "Weighting")
        elif isinstance(module, Objective) and not isinstance(module, Sum):
            kinds.setdefault(type(module), "Scheme")
    order = ("Scheme", "Loss", "Regulariser", "Weighting", "Source")
    return sorted(((kind, piece) for piece, kind in kinds.items()), key=lambda item: order.index(item[0]))


def stored_runs(folder: Path = RESULTS) -> dict[str, dict[str, list[dict]]]:
    """All stored results of runs: method -> group of seeds -> results."""
    runs: dict[str, dict[str, list[dict]]] = {}
    for study in sorted(each for each in folder.iterdir() if each.name not in EXCLUDED):
        for name, by_seed in groups(study).items():
            for result in by_seed.values():
                if "trained encoder" in result["rows"]:
                    of_method = runs.setdefault(result["recipe"]["method"], {})
                    of_method.setdefault(f"{study.name}/{name}", []).append(result)
    return runs


def results_text(groups: dict[str, list[dict]]) -> str:
    """Tables of the stored results of a method, one row for each group of seeds, by the photographs."""
    if not groups:
        return "No results of this method are stored in `results/` yet."
    of_photographs: dict[str, list[dict]] = {}
    of_copies: dict[str, list[dict]] = {}
    for group, results in groups.items():
        for run in results:
            kind = of_copies if is_degraded(run["data"].get("identity")) else of_photographs
            kind.setdefault(group, []).append(run)
    parts = [_groups_table(of_photographs)] if of_photographs else []
    if of_copies:
        parts += [
            f"From degraded copies of the photographs ([archive](../studies/archive.md)); {ADVICE}:",
            _groups_table(of_copies),
        ]
    parts.append(
        "Scores of test classes in per cent: mean over the seeds ± half the 95 % Student interval. Protocol `papers` "
        "chooses the epoch on the test classes; see [Protocols](../explanation/protocols.md)."
    )
    if any(group.split("/")[0] in FIRST_VERSION for group in groups):
        parts.append(
            f"Groups under {', '.join(f'`{name}`' for name in FIRST_VERSION)} are the [history](../studies/history.md) "
            "of 0.1.0, whose settings differ from the papers'."
        )
    return "\n\n".join(parts)


def _groups_table(groups: dict[str, list[dict]]) -> str:
    """One row for each group of seeds."""
    rows = []
    for group, results in groups.items():
        recipe = results[0]["recipe"]
        tuning = recipe["encoder"].get("tuning") or "full"
        tuning = tuning if isinstance(tuning, str) else tuning["name"]
        backbone = recipe["encoder"]["backbone"] + ("" if tuning == "full" else f" ({tuning})")
        scores = [interval([score(run, metric) for run in results]) for metric in ("R@1", "MAP@R")]
        untrained = interval([run["rows"]["untrained encoder"]["R@1"] for run in results])
        protocol = results[0].get("protocol", "held-out")
        size = str(recipe["view"]["size"])
        # The scores come first: the page scrolls a wide table.
        rows.append([f"`{group}`", *scores, untrained, str(len(results)), protocol, data_name(recipe), backbone, size])
    columns = ["results", "R@1", "MAP@R", "untrained R@1", "seeds", "protocol", "data", "backbone", "px"]
    return table(columns, rows)


def data_name(recipe: dict) -> str:
    """The name of a recipe's data set."""
    return Path(str(recipe["data"]["path"])).name
