"""The memory and time of a proxy loss over very many classes, computed before a run."""

from proxymetric.runs.planning.advice import Advice, advice_for, most_classes
from proxymetric.runs.planning.duration import Duration, Span, duration_of, exchanged, flops, traffic
from proxymetric.runs.planning.memory import chunk, memory_of, similarities
from proxymetric.runs.planning.numbers import count, figure, gigabytes, share
from proxymetric.runs.planning.plans import Plan, plan, plan_of
from proxymetric.runs.planning.rates import Machine, Rate, machine, machines, similar
from proxymetric.runs.planning.workload import Kind, Workload, kind_of, planned_methods

__all__ = [
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
    "kind_of",
    "machine",
    "machines",
    "memory_of",
    "most_classes",
    "plan",
    "plan_of",
    "planned_methods",
    "share",
    "similar",
    "similarities",
    "traffic",
]
