"""The training classes about which the method is most and least certain, with some of their images."""

from collections.abc import Sequence
from typing import NamedTuple

from PIL import Image

from proxymetric.plots.escaping import escaped
from proxymetric.plots.gallery import data_uri, title_of


class ClassSamples(NamedTuple):
    """A class, its uncertainty, and some of its images."""

    class_name: str
    uncertainty: float
    images: list[Image.Image]
    files: Sequence[str] = ()
    """names of the images' files; empty: no names are shown"""


class Certainty(NamedTuple):
    """The most certain and the most uncertain classes, the most extreme first, and a note about all classes."""

    certain: list[ClassSamples]
    uncertain: list[ClassSamples]
    note: str = ""


def certainty_html(certainty: Certainty) -> str:
    """The most and the least certain classes, each as a row of figures."""
    rows = (("most certain", certainty.certain), ("least certain", certainty.uncertain))
    return "".join(f'<p class="key">{name}</p>{_row(classes)}' for name, classes in rows if classes)


def _row(classes: Sequence[ClassSamples]) -> str:
    return f'<div class="pairs five">{"".join(_class(samples) for samples in classes)}</div>'


def _class(samples: ClassSamples) -> str:
    name = escaped(samples.class_name)
    frames = "".join(
        f'<div class="frame"><img src="{data_uri(image)}" alt="class {name}"{title_of(file)}></div>'
        for image, file in zip(samples.images, samples.files or [""] * len(samples.images))
    )
    return (
        f'<figure class="pair">{frames}<figcaption><span class="name" title="{name}">{name}</span>'
        f'<span class="score">uncertainty {samples.uncertainty:.3g}</span></figcaption></figure>'
    )
