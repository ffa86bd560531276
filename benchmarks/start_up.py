"""Measures how long the package takes to start: its import, the help of every verb, the first criterion, and the demo.

    python benchmarks/start_up.py                    median of 7 fresh processes each; about a minute
    python benchmarks/start_up.py --demo 3           and three demos, each one to three minutes

Each measurement is a fresh process with warm file caches and compiled bytecode: one round before the others is not
counted. The commands take turns, round by round. Recorded are the wall-clock time and the CPU time; on a busy machine
only the CPU time can be compared. For commands above the target, the JSON lists the packages whose modules take most
of the time (`python -X importtime`). "python" and "import torch" are the parts that the package cannot influence. The
results are written to results/start-up.json.

The times of a demo are those that its run records: the steps of its training, and everything from opening the images to
the scores (drawing the characters, scoring raw pixels and the untrained encoder, evaluations), without the report.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from common import RESULTS, about, spread, write

TARGET = 0.3
"""seconds"""
DEMO_TARGET = 60
"""seconds of the training steps of the demo, on two idle cores"""
HEAVY = ("timm", "torchvision", "matplotlib", "sklearn", "pandas")
"""packages that the first criterion must not import"""
NEEDS_TORCH = "pm.method"
"""the measurement without a target: importing torch takes most of its time"""
CRITERION = "import proxymetric as pm; pm.method('proxy-anchor', classes=100, dim=512)"
BARE = {"python": ["-c", "pass"], "import torch": ["-c", "import torch"]}
MIN_SHARE = 0.02
"""smallest share of the time of imports that is listed"""


def commands() -> dict[str, list[str]]:
    """Return the arguments of Python for each measurement."""
    from typer.main import get_command

    from proxymetric.cli import app

    package = {"import proxymetric": ["-c", "import proxymetric"], "--help": ["-m", "proxymetric", "--help"]}
    verbs = get_command(app).commands  # type: ignore[attr-defined]
    package |= {f"{verb} --help": ["-m", "proxymetric", *verb.split(), "--help"] for verb in verbs}
    return BARE | package | {NEEDS_TORCH: ["-c", CRITERION]}


def spent(arguments: list[str]) -> tuple[float, float]:
    """Return the wall-clock seconds and the CPU seconds of a fresh Python."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run([sys.executable, *arguments], stdout=subprocess.DEVNULL, check=True)
    wall, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def imports(arguments: list[str]) -> dict[str, float]:
    """Return the seconds that the modules of each package take to import, the largest first."""
    done = subprocess.run([sys.executable, "-X", "importtime", *arguments], capture_output=True, text=True, check=True)
    by_package: Counter[str] = Counter()
    for micros, name in re.findall(r"import time:\s+(\d+) \|\s+\d+ \|\s+(\S+)", done.stderr):
        by_package[name.partition(".")[0]] += int(micros)
    least = MIN_SHARE * by_package.total()
    return {name: round(micros / 1e6, 4) for name, micros in by_package.most_common() if micros >= least}


def heavy_modules() -> list[str]:
    """Return the packages of `HEAVY` that the first criterion imports."""
    code = f"{CRITERION}; import sys; print([name for name in {HEAVY!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.replace("'", '"'))


def demos(rounds: int) -> dict[str, Any]:
    """Train the demo several times; return the spread of its seconds, and the scores of its encoder."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(rounds):
            command = [sys.executable, "-m", "proxymetric", "demo", "--out", folder + "/demo", "--device", "cpu"]
            subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True)
            found.append(json.loads(Path(folder, "demo", "result.json").read_text()))
            print(f"demo: {found[-1]['training_seconds']} s of training, {found[-1]['seconds']} s in all", flush=True)
    return {
        "rounds": rounds,
        "steps": spread([run["training_seconds"] for run in found]),
        "all without the report": spread([run["seconds"] for run in found]),
        "scores": {name: value for name, value in found[-1]["rows"]["trained encoder"].items() if name != "P@R"},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--demo", type=int, default=0, metavar="ROUNDS", help="also train the demo this many times")
    parser.add_argument("--only", nargs="+", default=None, help="names of some measurements, such as 'train --help'")
    parser.add_argument("--out", type=Path, default=RESULTS / "start-up.json", help="JSON file to write")
    options = parser.parse_args()
    known = commands()
    unknown = sorted(set(options.only or ()) - known.keys())
    if unknown:
        parser.error(f"--only: got {unknown[0]!r}, expected some of {', '.join(known)}")
    chosen = {name: arguments for name, arguments in known.items() if options.only is None or name in options.only}
    record: dict[str, Any] = about("start-up", "cpu") | {"rounds": options.rounds, "load": os.getloadavg()}
    runs: dict[str, list[tuple[float, float]]] = {name: [] for name in chosen}
    for turn in range(options.rounds + 1):
        for name in list(chosen)[:: 1 if turn % 2 == 0 else -1]:
            seconds = spent(chosen[name])
            runs[name] += [seconds] if turn else []
    record["seconds"] = {}
    for name, found in runs.items():
        wall, cpu = (spread(list(each)) for each in zip(*found, strict=True))
        record["seconds"][name] = {"wall": wall, "cpu": cpu}
        print(f"{name:<22} {wall['median']:6.3f} s, {cpu['median']:6.3f} s CPU", flush=True)
    ours = [name for name in chosen if name not in BARE]
    missed = [name for name in ours if name != NEEDS_TORCH and record["seconds"][name]["wall"]["median"] > TARGET]
    record["targets"] = {"at most": TARGET, "missed": missed, "imported by pm.method": heavy_modules()}
    record["imports"] = {name: imports(chosen[name]) for name in ours if name in missed or name == NEEDS_TORCH}
    if options.demo:
        record["demo"] = demos(options.demo)
        record["targets"]["seconds of the demo's steps"] = DEMO_TARGET
    write(options.out, record)
    print(json.dumps(record["targets"]), json.dumps(record["imports"], indent=1), sep="\n")


if __name__ == "__main__":
    main()
