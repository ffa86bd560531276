"""Whitening by the covariance within classes (Hatch, Kajarekar & Stolcke, 2006)."""

from __future__ import annotations

from proxymetric.closed_forms import Whitening
from proxymetric.core.pieces import Objective
from proxymetric.papers.about import about
from proxymetric.papers.closed_form import AUTO, ClosedForm


@about(
    paper="Hatch et al. 2006, Within-Class Covariance Normalization for SVM-Based Speaker Recognition",
    choose="in seconds on a frozen backbone, with few images of each class; also as the start of another method",
    no_plan="is computed in closed form, in one pass over the features",
)
def whitening(classes: int, dim: int, *, shrinkage: float | str = AUTO) -> Objective:
    """Divide each direction by how much the images of one class differ along it. Form: `closed_forms.Whitening`.

    ``z = S^{-1/2} P (x - m),
    S = (1 - a) P S_w P^T + a tr(P S_w P^T) I / K``

    `train` fits the head on features of length 1 from the frozen backbone, in one pass, and takes no step. It chooses
    a and K by MAP@R on held-out classes, or on folds of the training classes if fewer than ten are held out, and then
    fits the head on all of these classes (`--no-refit`: without those held out).

    Args:
        classes: number of training classes, C.
        dim: width of the embeddings, D. `train` chooses at most this many, or takes what is named, as far as there are.
        shrinkage: a in (0, 1], or "auto".
    """
    return ClosedForm(Whitening, shrinkage, classes, dim)
