"""A training loop of your own needs torch only: no method imports backbones, plots or scikit-learn."""

from __future__ import annotations

import json
import subprocess
import sys

SCRIPT = """
import json, sys
import torch
import proxymetric as pm

used = []
for name in pm.methods():
    criterion = pm.method(name, classes=3, dim=4)
    if not criterion.needs:
        criterion(torch.randn(6, 4, requires_grad=True), torch.arange(6) % 3).backward()
        criterion.commit()
        used.append(name)
heavy = ("timm", "torchvision", "matplotlib", "sklearn", "PIL")
print(json.dumps({"used": used, "heavy": [name for name in heavy if name in sys.modules]}))
"""


def test_no_method_imports_timm_or_matplotlib():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert {"proxy-anchor", "soft-triple", "triplet", "vcpa", "xbm"} <= set(found["used"])
    assert found["heavy"] == []
