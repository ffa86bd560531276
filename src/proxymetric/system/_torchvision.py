"""Make `import torchvision` work where its compiled part does not match the installed torch.

A torchvision wheel that was built for a CUDA torch cannot load its compiled operators with a CPU torch. Its import then
fails with `operator torchvision::nms does not exist`. Neither the transforms nor timm call that operator, so defining
its schema is enough. Import this module before torchvision or timm:

    from proxymetric.system import _torchvision  # noqa: F401

Where torchvision can be imported, this module does nothing else and `defined_operators` is False.
"""

import sys

import torch

_SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)

# The operators exist as long as this object does.
_library: torch.library.Library | None = None
defined_operators = False


def _import() -> None:
    """Import torchvision; where only its compiled operators are missing, define their schemas first."""
    global _library, defined_operators
    try:
        import torchvision

        return
    except RuntimeError as error:
        if "torchvision::nms does not exist" not in str(error):
            raise
    for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
        del sys.modules[name]  # a second import would reuse half-imported submodules
    _library = torch.library.Library("torchvision", "DEF")
    for schema in _SCHEMAS:
        _library.define(schema)
    import torchvision  # noqa: F401

    defined_operators = True


_import()
