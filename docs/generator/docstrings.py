"""Prepares docstrings for the site: doctests and literal blocks become code blocks, equations become pictures."""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from pathlib import Path
from typing import Any

import griffe

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from generator.equations import drawn


class Docstrings(griffe.Extension):
    """Rewrites the text of each docstring before it is parsed."""

    def on_instance(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Rewrite one docstring."""
        if obj.is_function and any(str(each.value).startswith("assembled(") for each in obj.decorators):
            derive(obj)
        if obj.docstring is None or obj.is_alias:
            return
        obj.docstring.value = prepared(obj.docstring.value)
        if obj.is_class and any(str(base).endswith("NamedTuple") for base in obj.bases):
            # griffe does not know the constructor of a named tuple; its arguments are its attributes.
            obj.docstring.value = re.sub(r"^Args:", "Attributes:", obj.docstring.value, flags=re.MULTILINE)


def derive(method: griffe.Function) -> None:
    """Give a method its arguments and their explanations, which its pieces state (`papers.assembled`)."""
    function = getattr(importlib.import_module(method.module.path), method.name)
    method.docstring = griffe.Docstring(inspect.getdoc(function), parent=method)
    method.parameters = griffe.Parameters(
        *(
            griffe.Parameter(
                name,
                kind=griffe.ParameterKind[each.kind.name.lower()],
                annotation=str(each.annotation),
                default=None if each.default is each.empty else repr(each.default),
            )
            for name, each in inspect.signature(function).parameters.items()
        )
    )


def prepared(docstring: str) -> str:
    """Convert a docstring to Markdown.

    >>> print(prepared("Add.\\n\\n>>> 1 + 1\\n2"))
    Add.
    <BLANKLINE>
    Examples:
        >>> 1 + 1
        2
    """
    text = inspect.cleandoc(docstring)
    text = re.sub(r"^Example:", "Examples:", text, flags=re.MULTILINE)
    text = re.sub(
        r"^( {4}[\w, *]+: )>(?!>)", r"\1&gt;", text, flags=re.MULTILINE
    )  # "> 0" in "scale: > 0" must not become a quotation
    return drawn(_doctests(_literal_blocks(_single_names(text))))


def _single_names(text: str) -> str:
    """Split `Args:` entries of several names, such as `low, high: limits.`, into one entry for each name.

    >>> print(_single_names("Args:\\n    low, high: limits of\\n        the values."))
    Args:
        low: limits of
            the values.
        high: limits of
            the values.
    """
    entry = re.compile(r"^( {4})(\*{0,2}\w+(?:, \*{0,2}\w+)+)(: .*(?:\n {5,}.*)*)$", re.MULTILINE)
    return entry.sub(lambda match: "\n".join(f"{match[1]}{name}{match[3]}" for name in match[2].split(", ")), text)


def _literal_blocks(text: str) -> str:
    """Replace `::` and the indented lines below it by a fenced block."""
    block = re.compile(r"::\n\n((?:[ ]{4,}[^\n]*\n|\n)+?)(?=\S|\Z)")
    return block.sub(lambda match: f":\n\n```text\n{inspect.cleandoc(match[1])}\n```\n\n", text + "\n").rstrip()


def _doctests(text: str) -> str:
    """Put doctests outside of a section `Examples:` into such a section."""
    lines = text.split("\n")
    start = next((number for number, line in enumerate(lines) if line.startswith(">>>")), None)
    if start is None:
        return text
    end = start
    while end < len(lines) and lines[end].strip():
        end += 1
    examples = ["Examples:", *(f"    {line}" for line in lines[start:end])]
    return "\n".join([*lines[:start], *examples, *lines[end:]])
