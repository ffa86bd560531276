"""The features of the backbone as they are (Sharif Razavian, Azizpour, Sullivan & Carlsson, 2014)."""

from __future__ import annotations

from proxymetric.closed_forms import Unchanged
from proxymetric.core.pieces import Objective
from proxymetric.papers.about import about
from proxymetric.papers.closed_form import ClosedForm


@about(
    paper="Sharif Razavian et al. 2014, CNN Features off-the-shelf: an Astounding Baseline for Recognition",
    choose="as the baseline of a study; for a search without training, if nothing scores higher",
    no_plan="trains nothing",
)
def untrained(classes: int, dim: int) -> Objective:
    """Compare the features of the frozen backbone directly. Form: `closed_forms.Unchanged`.

    Args:
        classes: number of training classes; nothing is learnt from them.
        dim: width of the embeddings: the number of features.
    """
    return ClosedForm(lambda shrinkage, principal: Unchanged(), None, classes, dim)
