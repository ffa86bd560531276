"""Make `import torchvision` work where its compiled part does not match the installed torch.

A torchvision wheel built for a CUDA torch cannot load its compiled operators beside a CPU torch, and then its import
stops at `operator torchvision::nms does not exist`. Neither transforms nor timm call that operator: its schema alone
is enough. Import this module before torchvision or timm:

    from proxymetric import _torchvision  # noqa: F401

Where torchvision imports, nothing is done and `mended` is False.
"""

import sys

import torch

_SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)

# The operators live as long as this object: dropping it would take their schemas away again.
_library: torch.library.Library | None = None
mended = False


def _import() -> None:
    """Import torchvision, with the schemas of its missing operators where that is all it lacks."""
    global _library, mended
    try:
        import torchvision

        return
    except RuntimeError as error:
        if "torchvision::nms does not exist" not in str(error):
            raise
    for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
        del sys.modules[name]  # half-imported submodules would be taken as they are the second time
    _library = torch.library.Library("torchvision", "DEF")
    for schema in _SCHEMAS:
        _library.define(schema)
    import torchvision  # noqa: F401

    mended = True


_import()
