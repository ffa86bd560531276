"""Arguments of methods that cannot be meant: what is said about each."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import proxymetric as pm

REFUSED: dict[str, list[tuple[dict[str, Any], str]]] = {
    "adaface": [
        ({"h": 0.0}, "h: got 0.0"),
        ({"rate": 0.0}, "rate: got 0.0"),
        ({"rate": 1.5}, "rate: got 1.5"),
        ({"margin": -0.1}, "margin: got -0.1"),
    ],
    "ccp": [
        (
            {"base": {"method": "margin-contrastive", "normalise": "l2"}},
            "normalise='l2' in its table and 'ball' as an argument of ccp",
        ),
        ({"in_batch": -1.0}, "in_batch: got -1.0"),
        ({"pool": 12.5}, "pool: got 12.5, expected a whole number"),
        ({"base": 5}, "base: got 5"),
        ({"base": {"method": "triplet", "classes": 3}}, "base: got"),
        ({"lam": -1.0}, "lam: got -1.0"),
        ({"patience": 0}, "patience: got 0, expected a whole number of at least 1"),
        ({"anchor": "first"}, "anchor: got 'first', expected one of last, best"),
        ({"start": "ones"}, "start: got 'ones', expected one of random, zero"),
        ({"roll_back": True}, "roll_back: got True with anchor='last'"),
        ({"pool": 7}, "pool: got 7, expected at least 8, the number of proxies of a class, or 1"),
        ({"normalise": "l1"}, "normalise: got 'l1'"),
    ],
    "cosface": [
        ({"weights": [1.0]}, "weights: got 1 numbers, expected 4, one for each class"),
        ({"weights": [1.0, 1.0, 0.0, 1.0]}, "weights: got 0.0, expected a number above 0"),
        ({"margins": [0.1, 0.1, -0.1, 0.1]}, "margins: got -0.1, expected a number of at least 0"),
        ({"weights": "frequency"}, "counts: got none, expected the number of training images of each class"),
        ({"margins": "rare"}, "margins: got 'rare', expected 'frequency' or a number for each class$"),
        ({"weights": 2.0}, "weights: got 2.0, expected 'frequency' or a number for each class"),
        ({"weights": np.ones((4, 4))}, "weights: got shape .4, 4., expected 'frequency' or a number for each class"),
        ({"weights": "frequency", "counts": 9}, "counts: got 9, expected a number for each class"),
        ({"weights": "freqency"}, "expected 'frequency' or a number for each class; did you mean 'frequency'"),
    ],
    "proxy-anchor": [
        ({"touched": 0.0}, r"touched: got .*, expected 'all', 'batch' or a share"),
        ({"touched": 1.0}, r"touched: got .*, expected 'all', 'batch' or a share"),
        ({"touched": -0.1}, r"touched: got .*, expected 'all', 'batch' or a share"),
        ({"touched": 2}, r"touched: got .*, expected 'all', 'batch' or a share"),
        ({"touched": True}, r"touched: got .*, expected 'all', 'batch' or a share"),
        ({"touched": "some"}, r"touched: got .*, expected 'all', 'batch' or a share"),
    ],
    "proxy-isa": [
        ({"memory": 10.5}, "memory: got 10.5, expected a whole number"),
        ({"volume": 1.0}, "volume: got 1.0, expected a number above 1"),
        ({"h": 0}, "h: got 0, expected a number above 0"),
        ({"memory": 0}, "memory: got 0"),
        ({"tau": -1.0}, "tau: got -1.0"),
        ({"filter_epoch": -1}, "filter_epoch: got -1"),
        ({"positive": "E"}, "positive: got 'E', expected one of none, 1/E, nu, sigma"),
        ({"negative": 1}, "negative: got 1, expected one of"),
        ({"base": "triplet"}, "base: got 'triplet', which has no proxies"),
    ],
    "vcpa": [
        ({"base": "proxy-anchor", "scale": 64.0}, "scale, margin"),
        ({"newton_steps": 0, "halving": True}, "halving, damping"),
        ({"newton_steps": 1.5}, "newton_steps: got 1.5, expected a whole number"),
        ({"base": "mpa"}, "newton_steps: got 10, but MPA offers no closed-form curvature; expected 0"),
        ({"base": "triplet", "newton_steps": 0}, "base: got 'triplet', which has no proxies"),
        ({"gradient_steps": 2}, "gradient_steps: got 2 with newton_steps=10, expected one of them to be 0"),
        ({"tau": 0.0}, "tau: got 0.0 with Newton steps, expected"),
        ({"tau": -1.0}, "tau: got -1.0"),
        ({"prior_lag": 0}, "prior_lag: got 0, expected a whole number of at least 1"),
        ({"sample": False, "init": "zero"}, "init: got 'zero' with sample=False"),
        ({"init": "kaimin"}, "init: got 'kaimin'"),
        ({"floor": 0.0}, "floor: got 0.0"),
    ],
    "xbm": [
        ({"memory": 0}, "memory: got 0"),
        ({"base": "xbm"}, "base: got 'xbm', which is built around another"),
        ({"base": {"margin": 1.0}}, "with the key method"),
        ({"base": {"method": "triplet", "margn": 1.0}}, "did you mean 'margin'"),
        ({"base": "mpa"}, "expected K rows for each class"),
    ],
}


@pytest.mark.parametrize(
    ("name", "arguments", "words"), [(name, *row) for name, rows in REFUSED.items() for row in rows]
)
def test_arguments_that_cannot_be_meant_are_refused(name: str, arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        pm.method(name, classes=4, dim=5, **arguments)
