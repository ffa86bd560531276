"""What a source file says, read without importing it.

A help page and a list of names need a few words and numbers of modules whose import takes seconds, because they import
torch. `ast` reads them in milliseconds. Only literals are read, and names that the same file sets to literals.
"""

from __future__ import annotations

import ast
import functools
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).resolve().parent.parent
"""the folder of proxymetric"""


class Source:
    """A source file of this package.

    Args:
        place: its path below the package, such as "papers/mpa.py".

    Example:
        >>> Source("arguments/written.py").defaults("example")
        {'scale': 32.0, 'margin': None}
    """

    def __init__(self, place: str) -> None:
        tree = ast.parse((PACKAGE / place).read_text(encoding="utf-8"))
        self.definitions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
        self.values: dict[str, ast.expr] = {}
        for node in tree.body:
            if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                self.values |= {target.id: node.value for target in targets if isinstance(target, ast.Name)}

    def value(self, node: ast.expr | str) -> Any:
        """The value of an expression, or of a name that the file sets.

        Raises:
            ValueError: it is not written as a literal.
        """
        if isinstance(node, str):
            node = self.values[node]
        if isinstance(node, ast.Name) and node.id in self.values:
            return self.value(node.id)
        return ast.literal_eval(node)

    def is_literal(self, node: ast.expr) -> bool:
        """Whether `value` can read an expression."""
        try:
            self.value(node)
        except ValueError:
            return False
        return True

    def arguments(self, node: ast.expr | str) -> dict[int | str, ast.expr]:
        """The arguments of a call, by position or by name."""
        call = self.values[node] if isinstance(node, str) else node
        assert isinstance(call, ast.Call), ast.dump(call)
        return dict(enumerate(call.args)) | {each.arg: each.value for each in call.keywords if each.arg is not None}

    def decoration(self, name: str, decorator: str) -> dict[int | str, ast.expr]:
        """The arguments that a decorator of a function is called with."""
        calls = (node for node in self.definitions[name].decorator_list if isinstance(node, ast.Call))
        return next(self.arguments(call) for call in calls if getattr(call.func, "id", None) == decorator)

    def defaults(self, name: str) -> dict[str, Any]:
        """The arguments of a function or the fields of a class whose default is written as a literal, with it."""
        node = self.definitions[name]
        if isinstance(node, ast.ClassDef):
            fields = [each for each in node.body if isinstance(each, ast.AnnAssign) and each.value is not None]
            pairs = [(each.target.id, each.value) for each in fields if isinstance(each.target, ast.Name)]
        else:
            arguments, keywords = node.args.args, node.args.kwonlyargs
            with_default = arguments[len(arguments) - len(node.args.defaults) :]
            values = [*node.args.defaults, *node.args.kw_defaults]
            pairs = [(each.arg, value) for each, value in zip([*with_default, *keywords], values)]
        return {key: self.value(value) for key, value in pairs if value is not None and self.is_literal(value)}


@functools.cache
def source(place: str) -> Source:
    """A source file, read once."""
    return Source(place)


def example(classes: int, *, scale: float = 32.0, margin: float | None = None) -> None:
    """The function of the example of `Source`."""
