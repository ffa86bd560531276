"""Studies: methods x backbones x data x protocols x seeds, run in parallel, and tables of their results."""

from proxymetric.studies.reading import load_study, parse
from proxymetric.studies.spec import Cell, Study, Task, narrowed

__all__ = ["Cell", "Study", "Task", "load_study", "narrowed", "parse"]
