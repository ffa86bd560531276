"""Tunings: which parameters of a pre-trained backbone are trained, and which small modules are added to it.

A recipe names a tuning by `[encoder] tuning = "vpt+bitfit"`, or with arguments by
`tuning = { name = "vpt+bitfit", prompts = 10, depth = 12, step = 0 }`; on the command line `--tuning vpt+bitfit`.
"""

from proxymetric.arguments.registry import load_registry
from proxymetric.encoders.tuning.base import Tuning
from proxymetric.encoders.tuning.compose import ComposedTuning, complete_tuning, compose_tuning

TUNINGS: dict[str, type[Tuning]] = load_registry(
    "proxymetric.encoders.tuning",
    {
        "full": "full:Full",
        "linear": "linear:Linear",
        "vpt": "vpt:VPT",
        "adapter": "adapter:Adapter",
        "lora": "lora:LoRA",
        "bitfit": "bitfit:BitFit",
    },
)
"""every tuning by its name; joined names follow this order"""

__all__ = [
    "TUNINGS",
    "ComposedTuning",
    "Tuning",
    "complete_tuning",
    "compose_tuning",
]
