"""Which similarities are stored in 16 bits."""

from __future__ import annotations

import torch
from torch import Tensor

from proxymetric.ops.problem import Problem

MIN_HALF_PAIRS = 2**22
"""pairs from which similarities are stored in 16 bits: with fewer, launches take longer than memory"""
MAX_HALF_SCALE = 64.0
"""the largest factor of a similarity stored in 16 bits: its exponent is off by at most 1/64"""


def fits_half(queries: Tensor, vectors: Tensor, problem: Problem) -> bool:
    """Whether similarities may be computed and stored in float16.

    Rounding to float16 changes a similarity s by at most `|s| / 4096`, an eighth of what rounding to bfloat16 would do,
    and the exponent by the scale times that. Such errors average out in sums over many pairs, and in shares they are
    about as small as the rounding of the shares. So products must be of bfloat16 numbers, the rows normalised (other
    similarities may exceed the range), the pairs many, the scale not extreme, and a pair must not jump with a
    similarity, as with a weighting or the largest of several similarities.
    """
    types = {queries.dtype, vectors.dtype}
    scales = [problem.positive.slope, problem.negative.slope]
    if problem.of_class is not None:
        scales.append(1.0 / problem.of_class.gamma)
    return (
        types == {torch.bfloat16}
        and problem.refs.normalise is not None
        and len(queries) * len(vectors) >= MIN_HALF_PAIRS
        and all(abs(scale) <= MAX_HALF_SCALE for scale in scales)
        and problem.weight is None
        and (problem.of_class is None or problem.of_class.kind != "max")
    )
