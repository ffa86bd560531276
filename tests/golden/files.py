"""The JSON files of short runs, without what depends on the machine; as a program, it rewrites `files.json`.

Other programs read these files. Only a change that is meant to alter them may rewrite `files.json`, and its message
must say so.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from golden.runs import SETTINGS, VARIANTS
from proxymetric.runs.train import train
from proxymetric.system.watcher import Silent

FILE = Path(__file__).with_name("files.json")
METHODS = ("proxy-anchor", "proxy-isa", "vcpa", "mpa", "ccp", "vptsp-g")
MEASURED = {"versions", "machine", "commit", "finished"}
"""keys whose values are left out"""


def files(variant: str) -> dict[str, Any]:
    """`run.json` and `result.json` of a run: all keys, all settings, the kinds of measured values."""
    with tempfile.TemporaryDirectory() as folder:
        settings = SETTINGS | VARIANTS[variant]
        run = train("glyphs:6", out=Path(folder) / "run", settings=settings, watcher=Silent(), report=False)
        written = {name: json.loads((run.folder / name).read_text()) for name in ("run.json", "result.json")}
    return {
        "run.json": {key: "..." if key in MEASURED else value for key, value in written["run.json"].items()},
        "result.json": {
            key: value if key in ("recipe", "data", "schema") else _kind({key: value})[key]
            for key, value in written["result.json"].items()
        },
    }


def _kind(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: "..." if key in MEASURED else _kind(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_kind(inner) for inner in value]
    return "number" if isinstance(value, int | float) and not isinstance(value, bool) else value


if __name__ == "__main__":
    FILE.write_text(json.dumps({method: files(method) for method in METHODS}, indent=1, ensure_ascii=False) + "\n")
