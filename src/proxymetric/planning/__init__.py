"""The memory and time of a proxy loss over very many classes, computed before a run. Needs no torch."""

from proxymetric.planning.advice import Advice, advice_for, most_classes
from proxymetric.planning.duration import Duration, Span, duration_of, exchanged, flops, traffic
from proxymetric.planning.memory import chunk, memory_of, similarities
from proxymetric.planning.numbers import count, figure, gigabytes, share
from proxymetric.planning.plans import Plan, plan
from proxymetric.planning.rates import Machine, Rate, machine, machines, similar
from proxymetric.planning.workload import METHODS, Kind, Workload

__all__ = [
    "METHODS",
    "Advice",
    "Duration",
    "Kind",
    "Machine",
    "Plan",
    "Rate",
    "Span",
    "Workload",
    "advice_for",
    "chunk",
    "count",
    "duration_of",
    "exchanged",
    "figure",
    "flops",
    "gigabytes",
    "machine",
    "machines",
    "memory_of",
    "most_classes",
    "plan",
    "share",
    "similar",
    "similarities",
    "traffic",
]
