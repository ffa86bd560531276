"""Draw the equations of docstrings: plain text to TeX, and TeX to SVG by matplotlib, without scripts and web fonts."""

from __future__ import annotations

import html
import re

GREEK = ("alpha", "beta", "gamma", "delta", "epsilon", "eta", "theta", "mu", "nu", "pi", "rho", "sigma", "tau")
COMMANDS = {name: rf"\{name}" for name in (*GREEK, "log", "exp", "cos", "sin", "ln", "max", "min", "sum")} | {
    "lam": r"\lambda", "in": r"\in", "not in": r"\notin", "!=": r"\neq", "<-": r"\leftarrow", "->": r"\to",
    "<=": r"\leq", ">=": r"\geq", " . ": r" \cdot ", "(": r"\left(", ")": r"\right)", "[": r"\left[", "]": r"\right]",
}  # fmt: skip
TOKEN = re.compile(
    r"(?P<sum>\bsum_(?P<index>\w+))"
    r"|(?P<signed>\bC(?P<sign>[+-])(?=[|})\s,]|$))"
    r"|(?P<fraction>(?<![\w}])(?P<top>\d+)/(?P<below>\|[^|]+\||\w+))"
    r"|(?P<subscripted>\b(?P<letter>[A-Za-z])_(?P<subscript>[a-z]{1,3})\b)"
    r"|(?P<sign_of>not in\b|!=|<-|->|<=|>=| \. |[()\[\]])"
    r"|(?P<word>[A-Za-z]{2,}(?:_[A-Za-z]{2,})*)"
    r"|(?P<positive_part>_\+)"
)
EQUATION = re.compile(r"^``([^`]+)``([^\n`]*)$", re.MULTILINE)
"""an equation of a docstring: one or more lines between double backticks"""
EM_PER_UNIT = 0.055
FONT_SIZE = 20
"""size of the drawn letters in units of the SVG"""


def tex(text: str) -> str:
    r"""Convert an equation of a docstring to the TeX of matplotlib.

    >>> print(tex("1/B sum_i log(1 + exp(-scale s_iy))"))
    \dfrac{1}{B}\, \sum_{i}\, \log\left(1 + \exp\left(-\mathrm{scale}\ s_{iy}\right)\right)
    >>> print(tex("sum_{c in C+} sqrt(2 - 2 w_cs . w_ct)"))
    \sum_{c \in C^{+}} \sqrt{2 - 2 w_{cs} \cdot w_{ct}}
    """
    text = _roots(" ".join(text.split()))
    text = TOKEN.sub(_token, text)
    text = re.sub(r"(\\mathrm\{[^}]*\}) (?=[\w\\])", r"\1\\ ", text)
    text = re.sub(r" (?=\\(?:mathrm\{(?:with|of)\}))", r"\\ ", text)
    text = re.sub(r"(?<=[\w}]) (?=\\(?:sum|log|exp))", r"\\, ", text)
    return re.sub(r"(?<=\\right[)\]]) ([+-]) ", r"\\; \1 \\; ", text)


def _token(match: re.Match[str]) -> str:
    """One token as TeX."""
    part, text = match.groupdict(), match[0]
    if part["sum"]:
        return rf"\sum_{{{part['index']}}}"
    if part["signed"]:
        return f"C^{{{part['sign']}}}"
    if part["fraction"]:
        return rf"\dfrac{{{part['top']}}}{{{TOKEN.sub(_token, part['below'])}}}"
    if part["subscripted"]:
        return f"{part['letter']}_{{{part['subscript']}}}"
    if part["positive_part"]:
        return "_{+}"
    if text == "ROOT":
        return r"\sqrt"
    if text in COMMANDS:
        return COMMANDS[text]
    names = text.replace("_", r"\ ")
    return rf"\mathrm{{{names}}}" if part["word"] else text


def _roots(text: str) -> str:
    """Replace `sqrt(...)` by `ROOT{...}`; brackets inside are matched."""
    start = text.find("sqrt(")
    if start < 0:
        return text
    depth, end = 1, start + 5
    while depth and end < len(text):
        depth += {"(": 1, ")": -1}.get(text[end], 0)
        end += 1
    return f"{text[:start]}ROOT{{{text[start + 5 : end - 1]}}}{_roots(text[end:])}"


def svg(text: str) -> str:
    """Draw an equation as SVG, in the colour of the surrounding text, with the plain text for screen readers.

    Raises:
        ValueError: matplotlib cannot parse the equation.
    """
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import TextPath

    shape = TextPath((0, 0), f"${tex(text)}$", size=FONT_SIZE, prop=FontProperties(math_fontfamily="stix"))
    (left, bottom), (right, top) = shape.get_extents().get_points()
    commands = []
    for vertices, code in shape.iter_segments(curves=True, simplify=False):
        points = [f"{x:.2f}" if place % 2 == 0 else f"{-x:.2f}" for place, x in enumerate(vertices)]
        letter = {1: "M", 2: "L", 3: "Q", 4: "C", 79: "Z"}[int(code)]
        commands.append(letter if letter == "Z" else letter + " ".join(points))
    width, height = right - left, top - bottom
    box = f"{left - 1:.1f} {-top - 1:.1f} {width + 2:.1f} {height + 2:.1f}"
    drawing = "".join(commands)
    label = html.escape(" ".join(text.split()), quote=True)
    return (
        f'<svg class="equation" role="img" aria-label="{label}" viewBox="{box}" '
        f'style="width: {EM_PER_UNIT * (width + 2):.2f}em" xmlns="http://www.w3.org/2000/svg">'
        f'<path fill="currentColor" d="{drawing}"/></svg>'
    )


def picture(text: str) -> str:
    """An equation as HTML with one picture for each line, or as code if it cannot be drawn."""
    lines = re.split(r"\s*\n\s*(?=[+-])", text.strip())
    try:
        pictures = [svg(line) for line in lines]
    except (ValueError, RuntimeError):
        return f"<pre><code>{html.escape(text)}</code></pre>"
    return '<div class="equations">' + "".join(pictures) + "</div>"


def drawn(docstring: str) -> str:
    """A docstring with its equations as pictures, each in a separate paragraph."""

    def replace(match: re.Match[str]) -> str:
        rest = match[2].strip().lstrip(",.").strip()
        return f"\n{picture(match[1])}\n\n{rest}" if rest else f"\n{picture(match[1])}\n"

    return EQUATION.sub(replace, docstring)
