"""Which classes train, and which choose the epoch: the three protocols by name."""

from __future__ import annotations

PROTOCOLS = {
    "held-out": "a part of the training classes is held out and chooses the epoch",
    "last": "all training classes train for a fixed number of epochs, and the last one counts",
    "papers": "all training classes train, and the epoch is chosen on the test half",
}
"""name -> what it does. "papers" is how most papers report: its scores are those of the epoch that is best on the test
classes, so they are higher than what a user will see, and are labelled so wherever they are shown"""

CHOSEN_ON_TEST = "epoch chosen on the test half"
"""the label of scores in protocol `papers`"""
