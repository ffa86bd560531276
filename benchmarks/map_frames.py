"""Measures the script time of a frame while the map of the web page is moved and zoomed, in Chromium.

    python benchmarks/map_frames.py                 50,000 points and 200 Gaussian proxies; a minute

The page is the one that `proxymetric serve` delivers, with its own handlers: the pointer moves and drags, the wheel
zooms, hovering searches for the point under the pointer and shows its thumbnail. Two clocks: the map adds up, for each
frame, the time of its event handlers and of the drawing (`MapView.frames`); and Chromium says how long scripts of any
kind ran for each movement of the mouse (`ScriptDuration`), which includes what follows an answer of the service.
Painting by the graphics processor is not script time; there is none here, and Chromium paints in software.
Results are written to results/map-frames-cpu.json.
"""

import argparse
import io
import json
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

import proxymetric as pm

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "support"))

from browser import browser, missing
from proxymetric.encoders import build
from proxymetric.models.load import load
from proxymetric.search import Index
from proxymetric.serve.settings import Settings
from proxymetric.system.checkpoint import Checkpoint, module_tensors
from service import serving

RESULTS = Path(__file__).parent / "results" / "map-frames-cpu.json"
CLASSES, DIM = 200, 16
MAX_MILLISECONDS = 8.0
"""what the 95th percentile of the script time of a frame may be"""


def make_run(folder: Path) -> Path:
    """A run of VCPA that was not trained: an encoder and Gaussian proxies."""
    torch.manual_seed(0)
    encoder = build("small", dim=DIM)
    criterion = pm.method("vcpa", classes=CLASSES, dim=DIM)
    recipe = {"method": "vcpa", "seed": 0, "data": {}, "view": {}, "encoder": {}, "loss": {}, "train": {}}
    description = {
        "recipe": recipe, "said": {}, "encoder": {"backbone": "small", "dim": DIM}, "normalise": "l2",
        "view": {"size": 32, "resize": 32}, "classes": [f"class {c}" for c in range(CLASSES)],
        "data": {"name": "none", "identity": "none"}, "versions": {},
    }  # fmt: skip
    folder.mkdir()
    (folder / "run.json").write_text(json.dumps(description))
    for module in criterion.modules():
        if hasattr(module, "mu"):
            module.mu.copy_(torch.randn(CLASSES, DIM))
            module.sigma.fill_(0.3)
    tensors = module_tensors(encoder, "encoder.") | module_tensors(criterion, "criterion.")
    Checkpoint(tensors, {"position": 0}).write(folder / "best.safetensors")
    return folder


def make_index(folder: Path, run: Path, count: int) -> Path:
    """An index of vectors around class centres, with a map and a thumbnail for each item."""
    random = np.random.default_rng(0)
    codes = random.integers(0, CLASSES, count)
    vectors = random.standard_normal((CLASSES, DIM))[codes] + 0.5 * random.standard_normal((count, DIM))
    buffer = io.BytesIO()
    Image.fromarray(random.integers(0, 255, (120, 160, 3), dtype=np.uint8)).save(buffer, "jpeg")
    index = Index.create(folder, DIM, load(run, device="cpu"), map="pca", run={"run": str(run), "which": "best"})
    index.add(
        [f"{number:06d}.jpg" for number in range(count)],
        torch.from_numpy(vectors).float(),
        labels=[f"class {code}" for code in codes],
        thumbnails=[buffer.getvalue()] * count,
    )
    return folder


def use_the_map(page: Any, steps: int) -> dict[str, dict[str, list[float]]]:
    """Zoom, drag and hover; return the script times of the frames and of the movements of each, in milliseconds."""
    session = page.context.new_cdp_session(page)
    session.send("Performance.enable")

    def script_seconds() -> float:
        metrics = session.send("Performance.getMetrics")["metrics"]
        return next(metric["value"] for metric in metrics if metric["name"] == "ScriptDuration")

    box = page.locator("#map").bounding_box()
    middle = (box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)

    def around(step: int) -> tuple[float, float]:
        angle, radius = 0.37 * step, 0.04 * (step % 11)
        return middle[0] + radius * box["width"] * np.cos(angle), middle[1] + radius * box["height"] * np.sin(angle)

    def hover(step: int) -> None:
        page.mouse.move(*around(step))

    def zoom(step: int) -> None:
        page.mouse.move(*around(step))
        page.mouse.wheel(0, -120 if step % 24 < 12 else 120)

    def drag(step: int) -> None:
        if step % 12 == 0:
            page.mouse.move(*middle)
            page.mouse.down()
        page.mouse.move(*around(step))
        if step % 12 == 11:
            page.mouse.up()

    times = {}
    for name, action in (("zoom", zoom), ("drag", drag), ("hover", hover)):
        page.evaluate("searchMap.frames = []; searchMap.spent = 0; searchMap.fit()")
        page.wait_for_timeout(500)
        clock = [script_seconds()]
        for step in range(steps):
            action(step)
            clock.append(script_seconds())
        movements = [1000 * float(value) for value in np.diff(clock)]
        times[name] = {"frames": page.evaluate("searchMap.frames"), "movements": movements}
        print(f"{name}: {len(times[name]['frames'])} frames", flush=True)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--points", type=int, default=50_000)
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()
    if reason := missing():
        raise SystemExit(reason)
    with tempfile.TemporaryDirectory() as place:
        run = make_run(Path(place) / "run")
        index = make_index(Path(place) / "a.index", run, options.points)
        with serving(Settings(str(index), device="cpu", port=0)) as client, browser() as chromium:
            page = chromium.new_page(viewport={"width": 1280, "height": 900})
            page.set_default_timeout(120_000)
            page.goto(f"http://127.0.0.1:{client.port}/")
            page.locator("body[data-ready=yes]").wait_for()
            page.locator("#proxies").wait_for()
            time.sleep(1)
            times = use_the_map(page, options.steps)
            chromium_version = chromium.version
    rows: dict[str, dict[str, Any]] = {}
    for clock in ("frames", "movements"):
        parts = {name: part[clock] for name, part in times.items() if part[clock]}
        for name, values in (parts | {"all": [value for part in parts.values() for value in part]}).items():
            p95 = float(np.percentile(values, 95))
            median, largest = statistics.median(values), max(values)
            rows.setdefault(clock, {})[name] = {
                "count": len(values), "p50_ms": median, "p95_ms": p95, "max_ms": largest,
            }  # fmt: skip
            print(f"{clock:9} {name:6} {len(values):4}, p95 {p95:.2f} ms of script, max {largest:.1f} ms")
    content = {
        "benchmark": "map frames",
        "points": options.points,
        "proxies": CLASSES,
        "limit_ms": MAX_MILLISECONDS,
        "machine": {"architecture": platform.machine(), "chromium": chromium_version, "graphics": "software"},
        "script_time": rows,
    }
    RESULTS.write_text(json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    main()
