"""A simple candidate is kept unless another one is clearly better: by a standard error and by a least gain."""

from __future__ import annotations

import numpy as np
import pytest

from proxymetric.runs.clear_gain import LEAST_GAIN, ClassScores, Kept, keep_simple

SIMPLE = ("untrained", "whitening", "lda")


def one_standard_error(queries: list[np.ndarray], others: list[np.ndarray]) -> tuple[float, float]:
    """The mean difference over all queries, and its standard error over classes, by the definition."""
    pairs = [b - a for a, b in zip(queries, others, strict=True)]
    mean = np.concatenate(pairs).mean()
    residuals = np.array([(pair - mean).sum() for pair in pairs])
    classes, total = len(pairs), sum(map(len, pairs))
    return mean, np.sqrt(classes / (classes - 1) * (residuals**2).sum()) / total


@pytest.mark.parametrize("seed", range(4))
def test_gain_and_standard_error_are_those_of_the_definition(seed: int) -> None:
    random = np.random.default_rng(seed)
    sizes = random.integers(1, 9, 7)
    low = [random.random(size) * 0.8 for size in sizes]
    high = [random.random(size) for size in sizes]
    scores = ClassScores(
        "MAP@R",
        [0, *sizes.tolist()],  # a class without queries does not count
        {"untrained": [0.0, *(v.sum() for v in low)], "trained": [0.0, *(v.sum() for v in high)]},
    )
    kept = keep_simple(scores, SIMPLE)
    assert kept.classes == 7
    mean, error = one_standard_error(low, high)
    assert kept.gain == pytest.approx(mean, rel=1e-12)
    assert kept.error == pytest.approx(error, rel=1e-12)
    assert kept.name == ("trained" if mean > error and mean >= LEAST_GAIN else "untrained")


@pytest.mark.parametrize(
    ("untrained", "whitening", "lda", "trained", "kept", "why"),
    [
        ([1, 2, 3, 4], [5, 6, 7, 8], [5, 6, 7, 8], [5, 6, 7, 8], "whitening", "0.0 above trained"),
        ([1, 2, 3, 4], [5, 6, 7, 8], [5, 6, 7, 8.5], [5, 6, 7, 8.4], "lda", "0.2 above trained"),
        ([1, 2, 3, 4], [5, 6, 7, 8], [4, 5, 6, 7], [5.1, 6.1, 7, 8], "whitening", "higher by 0.5, less than 1 point"),
        ([1, 2, 3, 4], [5, 6, 7, 8], [4, 5, 6, 7], [5, 6, 7, 9], "whitening", "more than one standard error (2.5)"),
        ([9, 9, 9, 9], [2, 3, 4, 5], [5, 6, 7, 8], [5, 6, 7, 9], "untrained", "22.5 above trained"),
        ([1, 2, 3, 4], [2, 3, 4, 5], [3, 4, 5, 6], [8, 9, 9, 9], "trained", "42.5 above lda, with a standard error of"),
        ([1, 2, 3, 4], [5, 6, 7, 8], [4, 5, 6, 7], [5.1, 6.2, 7.1, 8.2], "trained", "1.5 above whitening, with a"),
    ],
)
def test_what_is_kept_and_why(
    untrained: list[float], whitening: list[float], lda: list[float], trained: list[float], kept: str, why: str
) -> None:
    sums = {"untrained": untrained, "whitening": whitening, "lda": lda, "trained": trained}
    choice = keep_simple(ClassScores("R@1", [10, 10, 10, 10], sums), SIMPLE)
    assert choice.name == kept
    assert f"; {kept} is kept: " in str(choice)
    assert why in choice.reason


def test_a_trained_model_does_not_win_by_luck() -> None:
    """The best of ten epochs that are as good as the closed form, on four held-out classes, is rarely taken."""
    random = np.random.default_rng(0)
    taken = {"luck": 0, "better": 0, "highest": 0}
    for _ in range(200):
        simple = 0.5 + 0.1 * random.normal(size=4)
        epochs = simple + 0.01 * random.normal(size=(10, 4))  # heads that are almost the closed form
        luck = epochs[epochs.mean(1).argmax()]
        better = simple + 0.15 + 0.05 * random.normal(size=4)  # a whole network
        for name, values in (("luck", luck), ("better", better)):
            sums = {"whitening": (10 * simple).tolist(), "trained": (10 * values).tolist()}
            taken[name] += keep_simple(ClassScores("MAP@R", [10] * 4, sums), SIMPLE).name == "trained"
        taken["highest"] += luck.mean() > simple.mean()
    assert taken["highest"] > 190
    assert taken["luck"] < 50
    assert taken["better"] == 200


def test_without_a_simple_candidate_or_another_one() -> None:
    only = ClassScores("MAP@R", [2, 2], {"lda": [1, 1]})
    assert keep_simple(only, SIMPLE).reason == "the only candidate"
    two = ClassScores("MAP@R", [2, 2], {"vcpa": [1, 1], "mpa": [1, 1.2]})
    assert (keep_simple(two, SIMPLE).name, keep_simple(two, SIMPLE).reason) == ("mpa", "5.0 above vcpa")
    stored = keep_simple(two, SIMPLE)._asdict()
    assert Kept(**stored).reason == "5.0 above vcpa"
