"""Runs the benchmarks that fit into some minutes, the most important first.

    python benchmarks/all.py --device cuda --minutes 10 --out DIR     also: make bench-cuda
    python benchmarks/all.py --device cpu --minutes 60 --out DIR      also: make bench-cpu
    python benchmarks/all.py --device cuda --only peer growth --out DIR

Every benchmark is a process with a time limit; one that is stopped or fails leaves what it has measured, and the others
still run. DIR receives the JSON of each benchmark, what they print (log.txt) and a summary (summary.json). Copy a JSON
to benchmarks/results/ and run `python docs/generate.py` to update the performance pages.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

from common import about, write

FOLDER = Path(__file__).resolve().parent
MIN_SECONDS = 15
"""a benchmark for which less time is left is not begun"""


class Job(NamedTuple):
    """A benchmark with its arguments."""

    script: str
    arguments: tuple[str, ...]
    result: str
    """name of its JSON"""
    seconds: int
    """time limit"""


JOBS = {
    "cuda": {
        "peer": Job("peer_cuda", (), "peer-cuda.json", 200),
        "many classes": Job(
            "losses_cuda", ("--parts", "rates", "others", "groups", "profile"), "losses-cuda.json", 150
        ),
        "step": Job("step", ("--device", "cuda"), "step-cuda.json", 120),
        "growth": Job("growth", ("--device", "cuda"), "growth-cuda.json", 120),
        "peer, bfloat16": Job("peer_cuda", ("--dtypes", "bfloat16", "--limit", "100"), "peer-cuda.json", 130),
        "metrics": Job("metrics", ("--device", "cuda"), "metrics-cuda.json", 90),
        "peer, compiled": Job(
            "peer_cuda",
            (
                "--compiled", "--limit", "90", "--sizes", "512x11318", "512x1000000", "--batches", "512",
                "--losses", "proxy-anchor", "norm-softmax", "arcface", "soft-triple", "triplet", "multi-similarity",
            ),
            "peer-cuda.json", 150,
        ),
        "start-up": Job("start_up", (), "start-up.json", 120),
    },
    "cpu": {
        "start-up": Job("start_up", ("--demo", "1"), "start-up.json", 600),
        "losses": Job("losses", ("--parts", "pairs"), "losses-cpu.json", 1800),
        "metrics": Job("metrics", ("--size", "small"), "metrics-cpu.json", 600),
        "step": Job("step", (), "step-cpu.json", 900),
        "growth": Job("growth", (), "growth-cpu.json", 900),
        "many classes": Job("losses", ("--parts", "many", "--classes", "1000", "11000"), "losses-cpu.json", 900),
    },
}  # fmt: skip


def run(job: Job, out: Path, seconds: float, log: Path) -> dict[str, Any]:
    """Run a benchmark; return its exit status and time."""
    begun = time.perf_counter()
    command = [sys.executable, str(FOLDER / f"{job.script}.py"), *job.arguments, "--out", str(out / job.result)]
    with log.open("a") as file:
        file.write(f"\n$ {job.script}.py {' '.join(job.arguments)}\n")
        file.flush()
        # A group of its own, so that processes which the benchmark started end with it.
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            status: int | str = process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            status = f"stopped after {seconds:.0f} s"
    return {"status": status, "seconds": round(time.perf_counter() - begun, 1), "result": job.result}


def missed(file: Path) -> list[str]:
    """Return the targets that a record says it misses."""
    targets = json.loads(file.read_text()).get("targets", {}) if file.exists() else {}
    over, failed = targets.get("missed", []), targets.get("failed", [])
    return [*over, *failed, *(name for name, met in targets.items() if met is False)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=list(JOBS), default="cpu")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--only", nargs="+", default=None, help="names of some benchmarks")
    parser.add_argument("--out", type=Path, required=True, help="folder for the results")
    options = parser.parse_args()
    jobs = JOBS[options.device]
    unknown = sorted(set(options.only or ()) - jobs.keys())
    if unknown:
        parser.error(f"--only: got {unknown[0]!r}, expected some of {', '.join(map(repr, jobs))}")
    options.out.mkdir(parents=True, exist_ok=True)
    end, log = time.perf_counter() + 60 * options.minutes, options.out / "log.txt"
    summary: dict[str, Any] = about("all", options.device) | {"minutes": options.minutes, "benchmarks": {}}
    for name, job in jobs.items():
        if options.only is not None and name not in options.only:
            continue
        left = end - time.perf_counter()
        if left < MIN_SECONDS:
            found: dict[str, Any] = {"status": "not begun: no time is left", "seconds": 0.0, "result": None}
        else:
            found = run(job, options.out, min(job.seconds, left), log)
        summary["benchmarks"][name] = found
        write(options.out / "summary.json", summary)
        print(f"{name:<16} {found['seconds']:7.1f} s  {found['status'] or 'done'}", flush=True)
    for name, found in summary["benchmarks"].items():
        over = missed(options.out / found["result"]) if found["result"] else []
        summary["benchmarks"][name]["targets missed"] = over
        if over:
            print(f"{name}: targets missed: {'; '.join(over)}")
    write(options.out / "summary.json", summary)
    if any(found["status"] != 0 for found in summary["benchmarks"].values()):
        sys.exit(f"some benchmarks did not finish; see {log}")


if __name__ == "__main__":
    main()
