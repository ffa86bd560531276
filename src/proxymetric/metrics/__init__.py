"""How well embeddings find things of the same class: R@K, P@K, P@R, MAP@R, MAP@K, nDCG@K."""

from proxymetric.metrics.naming import names
from proxymetric.metrics.ranking import Ranking, left_out, rank
from proxymetric.metrics.scoring import evaluate, per_query, scores

__all__ = ["Ranking", "evaluate", "left_out", "names", "per_query", "rank", "scores"]
