"""Training classes that the method is most and least sure of, with some of their images."""

import html
from collections.abc import Sequence
from typing import NamedTuple

from PIL import Image

from proxymetric.plots.gallery import data_uri


class ClassSamples(NamedTuple):
    """A class, how unsure the method is of it, and images of it."""

    class_name: str
    uncertainty: float
    images: list[Image.Image]


class Certainty(NamedTuple):
    """Both ends of the classes, from the end inwards, and a sentence on all of them."""

    certain: list[ClassSamples]
    uncertain: list[ClassSamples]
    note: str = ""


def certainty_html(found: Certainty) -> str:
    """Both ends as rows of figures, one a class."""
    rows = (("most certain", found.certain), ("least certain", found.uncertain))
    return "".join(f'<p class="key">{name}</p>{_row(classes)}' for name, classes in rows if classes)


def _row(classes: Sequence[ClassSamples]) -> str:
    return f'<div class="pairs five">{"".join(_class(shown) for shown in classes)}</div>'


def _class(shown: ClassSamples) -> str:
    name = html.escape(shown.class_name)
    frames = "".join(
        f'<div class="frame"><img src="{data_uri(image)}" alt="class {name}"></div>' for image in shown.images
    )
    return (
        f'<figure class="pair">{frames}<figcaption><span class="name" title="{name}">{name}</span>'
        f'<span class="score">uncertainty {shown.uncertainty:.3g}</span></figcaption></figure>'
    )
