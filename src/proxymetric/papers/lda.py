"""Linear discriminant analysis (Fisher, 1936; for several classes Rao, 1948)."""

from __future__ import annotations

from proxymetric.closed_forms import LDA
from proxymetric.core.pieces import Objective
from proxymetric.papers.about import about
from proxymetric.papers.closed_form import AUTO, ClosedForm


@about(
    paper="Fisher 1936, The Use of Multiple Measurements in Taxonomic Problems",
    choose="over whitening for short vectors, if there are many known classes",
    no_plan="is computed in closed form, in one pass over the features",
)
def lda(classes: int, dim: int, *, shrinkage: float | str = AUTO) -> Objective:
    """Keep the directions in which classes differ most, compared with images of one class. Form: `closed_forms.LDA`.

    ``z = V S^{-1/2} P (x - m),
    S = (1 - a) P S_w P^T + a tr(P S_w P^T) I / K``

    `train` fits the head as that of `whitening`. The vectors have at most C - 1 dimensions.

    Args:
        classes: number of training classes, C.
        dim: width of the embeddings, D. `train` chooses at most this many, or takes what is named, as far as there are.
        shrinkage: a in (0, 1], or "auto".
    """
    return ClosedForm(LDA, shrinkage, classes, dim)
