"""The benchmarks run at tiny sizes on a CPU, and their JSON says what was measured."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent.parent
FOLDER = ROOT / "benchmarks"


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch):
    """A function that imports a file of benchmarks/, as `python benchmarks/<name>.py` would."""
    monkeypatch.syspath_prepend(str(FOLDER))

    def imported(name: str) -> ModuleType:
        return importlib.import_module(name)

    yield imported
    for file in FOLDER.glob("*.py"):
        sys.modules.pop(file.stem, None)


def run(script: str, *arguments: str) -> None:
    done = subprocess.run([sys.executable, FOLDER / script, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def check_head(record: dict[str, Any], name: str) -> None:
    assert record["benchmark"] == name
    assert {"device", "commit", "dirty", "source_digest", "machine", "matmul_precision"} <= record.keys()
    assert record["machine"]["versions"]["torch"] == torch.__version__
    assert record["machine"]["threads"] >= 1


class TestCommon:
    def test_every_candidate_has_its_steps_in_alternating_order(self, benchmark):
        common = benchmark("common")
        calls: list[str] = []
        candidates = {
            name: common.Candidate(lambda name=name: calls.append(name), lambda: calls.append("clear"))
            for name in ("a", "b")
        }
        timings = common.interleaved(candidates, "cpu", rounds=4, min_steps=6, seconds=0.0)
        assert {timing.steps for timing in timings.values()} == {2}  # 6 steps in 4 rounds are 2 in each
        steps = [name for name in calls if name != "clear"]
        timed = steps[2 * (common.WARM_UP_STEPS + 1) :]  # one step of each measures its memory
        assert timed == list("aabbbbaaaabbbbaa")
        assert [len(timing.rounds) for timing in timings.values()] == [4, 4]
        assert timings["a"].record()["steps"] == 8

    def test_short_steps_are_repeated_up_to_a_bound(self, benchmark):
        common = benchmark("common")
        timing = common.interleaved(
            {"a": common.Candidate(lambda: None, lambda: None)}, "cpu", rounds=2, min_steps=4, seconds=10.0
        )["a"]
        assert timing.steps == 20 * 4 // 2

    def test_ratios_are_those_of_the_rounds(self, benchmark):
        common = benchmark("common")
        one = common.Timing([1.0, 2.0, 9.0], [5.0, 5.0, 5.0], 1, 10.0)
        other = common.Timing([2.0, 2.0, 10.0], [5.0, 10.0, 1.0], 1, 40.0)
        assert common.ratios(one, other)["time"]["median"] == 0.9
        assert common.ratios(one, other)["memory"] == 0.25
        assert common.ratios(one, other, cpu=True)["time"]["median"] == 1.0
        assert common.ratios(one._replace(extra_mb=None), other)["memory"] is None

    def test_a_record_is_replaced_as_a_whole(self, benchmark, tmp_path):
        common = benchmark("common")
        file = tmp_path / "new" / "a.json"
        common.write(file, {"a": 1})
        with pytest.raises(TypeError):
            common.write(file, {"a": object()})
        assert json.loads(file.read_text()) == {"a": 1}

    @pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the system does not tell the peak")
    def test_the_peak_of_a_step_is_that_of_its_tensors(self):
        # A fresh process whose allocator returns memory at once; that of torch for ARM processors does not by default
        code = """
import common, torch
steps = [lambda size=size: torch.ones(size, 2**18) + 1 for size in (64, 16)] + [lambda: None]
print([common.peak_mb(common.Candidate(step, lambda: None), "cpu") for step in steps])
"""
        environment = {**os.environ, "PYTHONPATH": str(FOLDER), "MIMALLOC_PURGE_DELAY": "0"}
        done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
        *peaks, nothing = json.loads(done.stdout.replace("None", "null"))
        assert peaks == pytest.approx([128, 32], abs=8)  # two arrays of MB each
        assert nothing is None

    @pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the system does not tell the peak")
    def test_memory_that_stays_in_the_process_is_not_reported(self, benchmark, monkeypatch):
        common = benchmark("common")
        monkeypatch.setattr(common, "returns_memory", lambda: False)
        step = common.Candidate(lambda: torch.ones(64, 2**18) + 1, lambda: None)
        assert common.peak_mb(step, "cpu") is None

    def test_the_head_names_commit_machine_and_versions(self, benchmark):
        check_head(benchmark("common").about("x", "cpu"), "x")

    def test_the_digest_of_the_source_follows_its_files(self, benchmark, tmp_path, monkeypatch):
        common = benchmark("common")
        monkeypatch.setattr(common, "ROOT", tmp_path)
        (tmp_path / "src").mkdir()
        (tmp_path / "src" / "a.py").write_text("1")
        before = common.commit()["source_digest"]
        (tmp_path / "src" / "a.py").write_text("2")
        assert common.commit()["source_digest"] != before


needs_peer = pytest.mark.skipif(
    importlib.util.find_spec("pytorch_metric_learning") is None, reason="pytorch-metric-learning is not installed"
)


@needs_peer
class TestPairs:
    def test_the_libraries_and_the_formula_agree_on_every_loss(self, benchmark):
        pairs = benchmark("pairs")
        for name, pair in pairs.PAIRS.items():
            sides = pairs.build(pair, 8, 5, 6, "cpu", torch.float32, ("ours", "peer", "formula"))
            found = pairs.differences(sides, 8, pair)
            for side in ("peer", "formula"):
                assert found[side]["loss"] < 1e-4, (name, side, found)
                assert max(found[side]["gradients"]) < 1e-3, (name, side, found)
            assert len(found["peer"]["gradients"]) == 1 + pair.has_proxies

    def test_a_difference_is_found(self, benchmark):
        pairs = benchmark("pairs")
        pair = pairs.PAIRS["cosface"]._replace(arguments={"margin": 0.1})
        found = pairs.differences(pairs.build(pair, 8, 5, 6, "cpu", torch.float32, ("ours", "peer")), 8, pair)
        assert found["peer"]["loss"] > 1e-2


@needs_peer
class TestPeer:
    @pytest.mark.release
    def test_cells_are_added_to_the_file(self, tmp_path):
        out = tmp_path / "peer.json"
        arguments = ("--device", "cpu", "--tiny", "--rounds", "2", "--seconds", "0", "--out", str(out))
        run("peer_cuda.py", *arguments, "--losses", "proxy-anchor", "triplet")
        run("peer_cuda.py", *arguments, "--losses", "norm-softmax", "--dtypes", "bfloat16", "--sizes", "8x6")
        record = json.loads(out.read_text())
        check_head(record, "peer")
        assert record["matmul_precision"] == "highest"
        assert record["cells"]["float32"].keys() == {"proxy-anchor", "triplet"}
        assert record["cells"]["float32"]["proxy-anchor"].keys() == {"B 8, C 6", "B 16, C 40"}
        found = record["cells"]["bfloat16"]["norm-softmax"]["B 8, C 6"]
        assert found["ours"]["steps"] >= 50
        assert len(found["peer"]["rounds"]) == 2
        assert found["of the peer's"]["time"]["median"] > 0

    def test_a_cell_with_other_values_fails(self, benchmark, tmp_path, monkeypatch):
        peer = benchmark("peer_cuda")
        monkeypatch.setitem(peer.PAIRS, "cosface", peer.PAIRS["cosface"]._replace(arguments={"margin": 0.1}))
        arguments = ["peer_cuda.py", "--device", "cpu", "--tiny", "--rounds", "2", "--losses", "cosface", "--out"]
        monkeypatch.setattr(sys, "argv", [*arguments, str(tmp_path / "peer.json")])
        with pytest.raises(SystemExit, match="values differ"):
            peer.main()
        assert len(json.loads((tmp_path / "peer.json").read_text())["targets"]["failed"]) == 2


@needs_peer
class TestLosses:
    @pytest.mark.release
    def test_each_number_of_threads_has_its_cells_and_other_parts_stay(self, tmp_path):
        out = tmp_path / "losses.json"
        out.write_text(json.dumps({"losses": {"kept": 1}}))
        arguments = (
            "--parts",
            "pairs",
            "--tiny",
            "--rounds",
            "2",
            "--threads",
            "1",
            "2",
            "--losses",
            "triplet",
            "cosface",
        )
        run("losses.py", *arguments, "--out", str(out))
        record = json.loads(out.read_text())
        assert record["losses"] == {"kept": 1}
        part = record["pairs"]
        check_head(part, "losses")
        for threads in ("1 threads", "2 threads"):
            assert part[threads]["cosface"]["B 8, C 6"]["ours"]["steps"] >= 50
            assert part[threads]["triplet"]["B 8"]["of the peer's"]["time"]["median"] > 0
        cells = [(threads, loss) for threads in ("1 threads", "2 threads") for loss in ("triplet", "cosface")]
        over = [
            part[t][loss][size]["of the peer's"]["time"]["median"] > 0.8 for t, loss in cells for size in part[t][loss]
        ]
        assert len(part["targets"]["missed"]) == sum(over)


class TestStartUp:
    @pytest.mark.release
    def test_fresh_processes_are_timed(self, tmp_path):
        out = tmp_path / "start-up.json"
        run(
            "start_up.py",
            "--rounds",
            "1",
            "--only",
            "python",
            "import proxymetric",
            "methods --help",
            "--out",
            str(out),
        )
        record = json.loads(out.read_text())
        check_head(record, "start-up")
        assert record["seconds"].keys() == {"python", "import proxymetric", "methods --help"}
        assert all(found["cpu"]["median"] > 0 for found in record["seconds"].values())
        assert record["targets"]["imported by pm.method"] == []

    def test_every_verb_is_measured(self, benchmark):
        from typer.main import get_command

        from proxymetric.cli import app

        verbs = get_command(app).commands  # as they are typed
        assert {f"{verb} --help" for verb in verbs} <= benchmark("start_up").commands().keys()

    def test_imports_are_summed_by_package(self, benchmark, tmp_path):
        (tmp_path / "slow_part.py").write_text("import time; time.sleep(0.2)")
        code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import slow_part"
        found = benchmark("start_up").imports(["-c", code])
        assert next(iter(found)) == "slow_part"
        assert found["slow_part"] >= 0.2


class TestGrowth:
    def test_the_exponent_is_that_of_the_upper_half(self, benchmark):
        exponent = benchmark("growth").exponent
        assert exponent([(n, 7.0 + 3 * n**2 * (n > 4)) for n in (1, 2, 4, 8000, 16000, 32000)]) == 2.0
        assert exponent([(n, 5.0 * n**1.5) for n in (1, 10, 100)]) == 1.5
        assert exponent([(1, 1.0), (2, 2.0)]) is None

    @pytest.mark.release
    def test_curves_are_added_to_the_file(self, tmp_path):
        out = tmp_path / "growth.json"
        arguments = ("--tiny", "--rounds", "2", "--point-seconds", "60", "--out", str(out), "--curves")
        run("growth.py", *arguments, "dimensions")
        run("growth.py", *arguments, "images")
        record = json.loads(out.read_text())
        check_head(record, "growth")
        assert {curve["over"] for curve in record["curves"].values()} == {"dimensions", "images"}
        for curve in record["curves"].values():
            assert curve["points"][0]["ms"]["median"] > 0
            assert isinstance(curve["exponent"]["time"], float)


class TestAll:
    def test_a_benchmark_that_is_stopped_does_not_stop_the_others(self, benchmark, tmp_path, monkeypatch, capsys):
        everything = benchmark("all")
        monkeypatch.setattr(everything, "FOLDER", tmp_path)
        monkeypatch.setattr(everything, "MIN_SECONDS", 0)
        (tmp_path / "slow.py").write_text("import time; print('begun', flush=True); time.sleep(60)")
        (tmp_path / "good.py").write_text(
            'import sys; open(sys.argv[-1], \'w\').write(\'{"targets": {"missed": {"a cell": 1.5}}}\')'
        )
        jobs = {"slow": everything.Job("slow", (), "slow.json", 3), "good": everything.Job("good", (), "good.json", 60)}
        monkeypatch.setitem(everything.JOBS, "cpu", jobs)
        out = tmp_path / "out"
        monkeypatch.setattr(sys, "argv", ["all.py", "--out", str(out)])
        with pytest.raises(SystemExit, match="did not finish"):
            everything.main()
        summary = json.loads((out / "summary.json").read_text())
        check_head(summary, "all")
        assert summary["benchmarks"]["slow"]["status"] == "stopped after 3 s"
        assert summary["benchmarks"]["good"]["status"] == 0
        assert "targets missed: a cell" in capsys.readouterr().out
        assert "begun" in (out / "log.txt").read_text()

    def test_every_benchmark_takes_its_arguments(self, benchmark, tmp_path, monkeypatch):
        class Parsed(Exception):
            pass

        parse_args = argparse.ArgumentParser.parse_args

        def parsed(parser: argparse.ArgumentParser) -> None:
            parse_args(parser)  # exits if an argument is wrong
            raise Parsed

        monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parsed)
        for jobs in benchmark("all").JOBS.values():
            for job in jobs.values():
                monkeypatch.setattr(sys, "argv", [job.script, *job.arguments, "--out", str(tmp_path / job.result)])
                with pytest.raises(Parsed):
                    benchmark(job.script).main()
        monkeypatch.setattr(sys, "argv", ["growth.py", "--curve-of", "classes"])
        with pytest.raises(SystemExit):
            benchmark("growth").main()


def test_small_vectors(benchmark):
    measured = benchmark("small_vectors")
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(120) % 6
    vectors = torch.nn.functional.normalize(
        torch.randn(6, 16, generator=generator)[labels] + torch.randn(120, 16, generator=generator)
    )
    records = measured.measure(vectors, labels.numpy(), [4, 16])
    assert [(each["dim"], each["vectors"], each["bytes"]) for each in records[5:]] == [
        (16, "float32", 64),
        (16, "int8", 16),
        (16, "int8, scale of a dimension", 16),
        (16, "binary, bits alone", 8),
        (16, "binary", 24),
    ]
    recalls = [each["recall@10"] for each in records[5:]]
    assert recalls[0] == 1
    assert min(recalls[1], recalls[2], recalls[4]) > 0.95 > recalls[3], "bits alone lose most"
    assert records[9]["scores"] == pytest.approx(records[6]["scores"], abs=0.02), "100 of 120 are ranked again"
