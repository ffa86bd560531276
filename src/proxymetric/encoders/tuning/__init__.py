"""Tunings: which parameters of a pre-trained backbone are trained, and which small modules are added to it.

A recipe names a tuning by `[encoder] tuning = "vpt+bitfit"`, or with arguments by
`tuning = { name = "vpt+bitfit", prompts = 10, depth = 12, step = 0 }`; on the command line `--tuning vpt+bitfit`.
"""

from proxymetric.encoders.tuning.adapter import Adapter
from proxymetric.encoders.tuning.base import Tuning
from proxymetric.encoders.tuning.bitfit import BitFit
from proxymetric.encoders.tuning.compose import ComposedTuning, complete_tuning, compose_tuning
from proxymetric.encoders.tuning.full import Full
from proxymetric.encoders.tuning.linear import Linear
from proxymetric.encoders.tuning.lora import LoRA
from proxymetric.encoders.tuning.vpt import VPT

TUNINGS: dict[str, type[Tuning]] = {
    "full": Full,
    "linear": Linear,
    "vpt": VPT,
    "adapter": Adapter,
    "lora": LoRA,
    "bitfit": BitFit,
}
"""every tuning by its name; joined names follow this order"""

__all__ = [
    "TUNINGS",
    "VPT",
    "Adapter",
    "BitFit",
    "ComposedTuning",
    "Full",
    "Linear",
    "LoRA",
    "Tuning",
    "complete_tuning",
    "compose_tuning",
]
