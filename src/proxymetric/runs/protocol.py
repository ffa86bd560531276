"""The three protocols: which classes are trained on, and which classes choose the epoch."""

from __future__ import annotations

PROTOCOLS = {
    "held-out": "some of the training classes are held out and choose the epoch",
    "last": "all training classes are trained on for a fixed number of epochs, and the last epoch counts",
    "papers": "all training classes are trained on, and the test classes choose the epoch",
}
"""name -> description. "papers" is how most papers report: the scores are those of the epoch that is best on the test
classes. They are higher than the scores that a user will get on new classes, and carry a label wherever they are
shown"""

CHOSE_EPOCH = "not trained on, but they chose the epoch"
"""label of held-out classes wherever their scores are shown"""

MLRC = "mlrc"
"""the protocol of "A Metric Learning Reality Check", which trains several models (`runs.mlrc`)"""
FOLDS = 4
"""folds and models of that protocol"""
FOLD_DIM = 128
"""dimensions of each of these models"""

CHOSEN_ON_TEST = "epoch chosen on the test half"
"""label of the scores of protocol `papers`"""
