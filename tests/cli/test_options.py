"""What all verbs share: defaults in the help, --quiet, --verbose, --json, completion, and names of earlier versions."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
from typer.core import TyperOption
from typer.main import get_command

from proxymetric.arguments.written import source
from proxymetric.cli import VERBS, app
from proxymetric.cli.catalogue import complete_method, method_rows
from proxymetric.papers import CATALOGUE, CLOSED_FORMS
from proxymetric.runs import flags, recipe
from proxymetric.runs.planning import plan
from proxymetric.training.options import TrainOptions
from terminal import proxymetric, refused, train

NAMES = [verb.__name__.replace("_", "-") for verb in VERBS]


def options(verb: str) -> dict[str, str]:
    """The options of a verb in its help: the first word of each, and its text."""
    text = proxymetric(verb, "--help").out.split("Options:\n")[1].split("Example")[0]
    parts = re.findall(r"^  (?:-\w, )?(-[\w-]+.*?)(?=^  -|\Z)", text, re.MULTILINE | re.DOTALL)
    return {part.split()[0].rstrip(","): " ".join(part.split()) for part in parts}


@pytest.mark.parametrize("verb", NAMES)
def test_every_option_with_a_value_says_its_default(verb):
    shown = options(verb)
    assert {"--quiet", "--verbose", "--help"} <= shown.keys()
    params = get_command(app).commands[verb].params
    with_value = [each for each in params if isinstance(each, TyperOption) and not each.is_flag and not each.multiple]
    silent = [each.name for each in with_value if not re.search("default: |Default:|required", shown[each.opts[0]])]
    assert not silent


def test_the_defaults_are_those_of_an_empty_recipe():
    shown = options("train")
    checked = recipe.check({})
    tables = {name: getattr(checked, name) for name in ("view", "encoder", "loss")}
    tables |= {"data": asdict(checked.data), "train": asdict(checked.train)}
    top = {"method": checked.method, "protocol": checked.protocol, "seed": checked.seed}
    for name, key in flags.FLAGS.items():
        table, _, inner = key.partition(".")
        value = tables[table][inner] if inner else top[key]
        if name == "lr":
            value = TrainOptions().base_rates[0]
        if name in ("data", "transform"):
            continue
        expected = "none" if value in (None, "") else value
        if isinstance(value, bool):
            expected = name if value else f"no-{name}"
        assert f"[default: {expected}]" in shown[f"--{name}"].replace("no- ", "no-"), name
    for name in ("dim", "batch", "devices", "dtype", "touched"):
        default = plan.__kwdefaults__[name]
        assert f"[default: {default}]" in options("methods")[f"--{name}"]


def test_the_list_of_methods_is_read_from_their_files():
    rows = {name: (row.about.paper, row.about.choose) for name, row in (CATALOGUE | CLOSED_FORMS).items()}
    assert method_rows() == rows
    script = "import sys; from proxymetric.cli import main\nsys.argv = ['proxymetric', 'methods']\n" \
             "try: main()\nfinally: print(sorted({'torch', 'numpy', 'pydantic'} & set(sys.modules)))"  # fmt: skip
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_what_is_no_literal_in_a_source_is_left_out(tmp_path):
    file = tmp_path / "probe.py"
    file.write_text("A = 3\nB = A\ndef f(x, y=B, *, z=len('ab'), w=-1.5): ...\nclass C:\n    n: int = A\n    m: int\n")
    probe = type(source("runs/protocol.py"))(str(file))
    assert probe.defaults("f") == {"y": 3, "w": -1.5}
    assert probe.defaults("C") == {"n": 3}


@pytest.mark.parametrize(("words", "cursor", "completed"), [
    ("proxymetric methods vc", 2, ["vcpa"]),
    ("proxymetric train --method so", 3, ["soft-triple"]),
    ("proxymetric ev", 1, ["evaluate"]),
    ("proxymetric evaluate --redr", 2, ["--redraw"]),
])  # fmt: skip
def test_the_shell_completes(words, cursor, completed):
    script = "import sys; sys.argv = ['proxymetric']\nfrom proxymetric.cli import main\nmain()"
    shell = {"_PROXYMETRIC_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(cursor)}
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=os.environ | shell, timeout=60
    )
    assert done.stdout.split() == completed, done


def test_methods_are_completed_with_their_papers():
    assert ("vcpa", CATALOGUE["vcpa"].about.paper) in complete_method("vc")
    assert {name for name, _ in complete_method("")} == (CATALOGUE | CLOSED_FORMS).keys()


@pytest.mark.parametrize(
    ("verb", "now"),
    [("mlrc", "train --protocol mlrc"), ("report", "evaluate --redraw"), ("plan", "methods --plan")],
)
def test_a_verb_of_an_earlier_version_is_told_its_new_name(verb, now):
    answer = proxymetric(verb, "--data", "photos")
    assert answer.code == 2
    assert f"got the verb '{verb}', expected `proxymetric {now}`" in answer.err
    proxymetric(*now.split(), "--help")


def test_results_are_apart_from_messages(photos, tmp_path):
    """A pipe gets the result alone, --quiet leaves only that, and --verbose says where an error arose."""
    run = tmp_path / "run"
    loud = train(photos, run, "--no-report")
    quiet = train(photos, tmp_path / "quiet", "--no-report", "--quiet")
    assert (loud.code, quiet.code) == (0, 0)
    assert "next:" in loud.err
    assert "epoch 1" in loud.err
    for answer, folder in ((loud, run), (quiet, tmp_path / "quiet")):
        assert answer.out.splitlines()[-1] == f"result: {folder / 'result.json'}"
        assert "trained encoder" in answer.out
        assert "next:" not in answer.out
    assert not quiet.err
    refused(proxymetric("evaluate", tmp_path / "none", "-q"), "which holds no run")
    refused(proxymetric("methods", "-q", "-v"), "quiet, verbose: got both, expected one")
    answer = proxymetric("evaluate", tmp_path / "none", "--verbose")
    assert answer.err.startswith("Traceback")
    assert "proxymetric: " in answer.err.splitlines()[-1]
    scores = json.loads(proxymetric("evaluate", run, "--metrics", "R@1", "--no-report", "--json").out)
    table = proxymetric("evaluate", run, "--metrics", "R@1", "--no-report").out
    assert f"{100 * scores['rows']['trained encoder']['R@1']:.1f}" in table
    assert scores["remarks"]
    assert scores["page"] is None


def test_json_of_methods(tmp_path: Path):
    rows = json.loads(proxymetric("methods", "--json").out)
    assert [row["name"] for row in rows] == [*CATALOGUE, *CLOSED_FORMS]
    one = json.loads(proxymetric("methods", "mpa-ap", "--json").out)
    assert one["arguments"]["per_class"] == 10
    assert one["paper"] == CATALOGUE["mpa-ap"].about.paper
    of_one = json.loads(proxymetric("methods", "proxy-anchor", "--recipes", "--json").out)
    assert {row["method"] for row in of_one} == {"proxy-anchor"}
    refused(proxymetric("methods", "--recipes", "--plan", "5M"), "plan, recipes: got both")
    refused(proxymetric("methods", "mpa", "--dim", "64"), "dim: got '64' without --plan")


def test_a_page_is_redrawn_alone(tmp_path):
    refused(proxymetric("evaluate", tmp_path, "--redraw", "--metrics", "R@1"), "redraw: got it with metrics")
