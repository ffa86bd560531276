"""The command line, from the first --help to a query: what people type and what they see."""

from __future__ import annotations

import csv
import inspect
import io
import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors import safe_open

import proxymetric as pm
import terminal
from proxymetric.cli import training
from proxymetric.papers import CATALOGUE, CLOSED_FORMS, lookup, options
from proxymetric.runs import recipe
from proxymetric.search import VectorFile
from proxymetric.system.clock import clock
from proxymetric.system.files import read_json
from proxymetric.system.terminal import Terminal
from proxymetric.system.watcher import Tick
from terminal import Answer, bytes_of, proxymetric, refused, train

VERBS = (
    "demo", "train", "evaluate", "inspect", "index", "search", "serve", "embed", "study", "methods", "export", "cache",
)  # fmt: skip
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f\x9b]")


@pytest.fixture(scope="module")
def told() -> list[Answer]:
    """What the training of `run` printed."""
    return []


@pytest.fixture(scope="module")
def run(photos: Path, told: list[Answer], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A run of two epochs at 32 pixels, with its report. Only read it."""
    folder = tmp_path_factory.mktemp("runs") / "photos"
    told.append(train(photos, folder, "--size", 32, "--set", "view.resize=32", "--epochs", 2))
    assert told[0].code == 0, told[0]
    before = bytes_of(folder)
    yield folder
    assert bytes_of(folder) == before, "a verb that only uses a run has changed it"


def in_a_process(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=60)


HEAVY = {"torch", "timm", "numpy", "matplotlib", "rich", "pydantic"}
"""packages that take a large part of 0.3 s to import; typer imports pydantic to convert the values of options"""


@pytest.mark.parametrize("words", ["--help", "-h", "--version", ""])
def test_help_needs_no_torch(words):
    script = (
        "import sys; from proxymetric.cli import main\n"
        f"sys.argv = ['proxymetric', *{words.split()!r}]\n"
        "try: main()\n"
        f"finally: print('HEAVY', sorted({HEAVY!r} & set(sys.modules)))"
    )
    answer = in_a_process("-c", script)
    assert answer.stdout.splitlines()[-1] == "HEAVY []", answer
    assert "proxymetric" in answer.stdout + answer.stderr or pm.__version__ in answer.stdout


@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_the_help_of_no_verb_imports_slow_packages(flag):
    script = (
        "import sys; from proxymetric.cli import VERBS, main\n"
        "for verb in VERBS:\n"
        "    name = verb.__name__.replace('_', '-')\n"
        f"    sys.argv = ['proxymetric', name, {flag!r}]\n"
        "    try: main()\n"
        f"    except SystemExit: print('HEAVY', name, sorted({HEAVY!r} & set(sys.modules)))"
    )
    lines = [line for line in in_a_process("-c", script).stdout.splitlines() if line.startswith("HEAVY")]
    assert sorted(lines) == [f"HEAVY {verb} []" for verb in sorted(VERBS)]


def test_help_names_every_verb():
    answer = proxymetric("--help")
    assert answer.code == 0
    for verb in VERBS:
        assert re.search(rf"^  {verb}\s+[A-Z].*[^.]\.$", answer.out, re.MULTILINE), f"{verb}: a whole short sentence"


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help_with_an_example(verb):
    answer = proxymetric(verb, "--help")
    assert answer.code == 0
    examples = answer.out.split("Example")[1].splitlines()[1:]
    assert examples
    assert all(line.strip().startswith(f"proxymetric {verb}") for line in examples if line.strip())


def test_the_module_runs_too():
    answer = in_a_process("-m", "proxymetric", "--version")
    assert (answer.returncode, answer.stdout.strip()) == (0, pm.__version__)


def test_a_misspelt_verb_or_flag_names_the_right_one():
    answer = proxymetric("trian")
    assert answer.code == 2
    assert "Did you mean 'train'?" in answer.err
    answer = proxymetric("train", "--epoch", "3")
    assert answer.code == 2
    assert "--epochs" in answer.err


def test_methods_lists_the_whole_catalogue(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    answer = proxymetric("methods")
    assert answer.code == 0
    lines = answer.out.splitlines()
    for name, row in (CATALOGUE | CLOSED_FORMS).items():
        (line,) = [line for line in lines if line.startswith(f"{name} ")]
        assert row.about.paper.split(",")[0] in line
        assert row.about.choose in line


@pytest.mark.parametrize("name", CATALOGUE | CLOSED_FORMS)
def test_one_method_shows_paper_and_arguments(name):
    answer = proxymetric("methods", name)
    assert answer.code == 0
    assert lookup(name).about.paper in answer.out
    for key, parameter in options(name).items():
        assert f"--set loss.{key}={parameter.default}" in answer.out
        assert parameter.default is not inspect.Parameter.empty


def test_an_unknown_method_is_refused():
    refused(proxymetric("methods", "mpa-a"), "method: got 'mpa-a'", "did you mean 'mpa-ap'?")


def test_the_recipes_are_listed_with_their_first_sentence():
    lines = proxymetric("methods", "--recipes").out.splitlines()
    named = {line.split()[0]: line for line in lines if "/" in line.split(" ")[0]}
    assert named.keys() == set(recipe.names())
    assert all(len(line.split("  ")) > 2 and "et al" not in line for line in named.values())
    of_ccp = proxymetric("methods", "ccp", "--recipes").out.splitlines()
    assert {line.split()[0] for line in of_ccp if "/" in line.split(" ")[0]} == {
        name for name in recipe.names() if recipe.load(name)["method"] == "ccp"
    }
    refused(proxymetric("methods", "cpp", "--recipes"), "method: got 'cpp'", "did you mean 'ccp'?")


def test_training_says_what_it_does(run, told, photos):
    answer = told[0]
    assert f"{photos.name}: 64 images of 8 classes to train on, 16 images of 2 classes held out" in answer.err
    for line in ("epoch   0  2 held-out classes (16 images): R@1", "epoch   1  2 held-out", "epoch   2  2 held-out"):
        assert line in answer.err
    for row in ("raw pixels", "untrained encoder", "trained encoder"):
        assert re.search(rf"{row}\W+[\d.]+\W+[\d.]+", answer.out)
    assert f"report: {run / 'report.html'}" in answer.out
    files = {"run.json", "result.json", "report.html", "log.jsonl"}
    files |= {"best.safetensors", "last.safetensors", "held_out.safetensors"}
    assert {file.name for file in run.iterdir()} == files


def test_what_is_no_terminal_gets_no_control_characters(run, told, photos):
    assert not CONTROL.search(told[0].out + told[0].err)
    image = next(photos.rglob("*.png"))
    for words in (("methods",), ("evaluate", run, "--no-report"), ("search", run, image, "--in", photos), ("--help",)):
        answer = proxymetric(*words)
        assert answer.code == 0
        assert not CONTROL.search(answer.out + answer.err)


def scores(answer: Answer) -> dict[str, float]:
    """The scores of the trained encoder in the table that `evaluate --no-untrained` prints."""
    rows = re.findall(r"^(\w+@\w+) +(\d+\.\d)", answer.out, re.MULTILINE)
    return {name: float(value) for name, value in rows}


@pytest.mark.parametrize("with_data", [True, False])
def test_evaluate_repeats_the_scores_of_the_run(run, photos, with_data):
    answer = proxymetric(
        "evaluate",
        run,
        *(["--data", photos] if with_data else []),
        "--metrics",
        "R@1,MAP@R",
        "--no-untrained",
        "--no-report",
    )
    assert answer.code == 0, answer
    assert "16 images of 2 classes (none of them trained on, but they chose the epoch)" in answer.out
    result = read_json(run / "result.json")["rows"]["trained encoder"]
    assert scores(answer) == {name: round(100 * value, 1) for name, value in result.items()}


def test_evaluate_on_other_classes_says_so(run, photos, tmp_path):
    everything = proxymetric("evaluate", run, "--split", "all", "--no-report")
    assert "80 images of 10 classes (some of them trained on)" in everything.out
    seen = proxymetric("evaluate", run, "--split", "train", "--no-report")
    assert "64 images of 8 classes (all of them trained on)" in seen.out
    other = tmp_path / "other"
    for name in ("class1", "class2"):
        (other / name).mkdir(parents=True)
        for k in range(3):
            (other / name / f"{k}.png").write_bytes((photos / name / f"{k}.png").read_bytes())
    (other / "alone").mkdir()
    (other / "alone" / "0.png").write_bytes((photos / "class3" / "0.png").read_bytes())
    answer = proxymetric("evaluate", run, "--data", other, "--metrics", "R@1", "--no-report")
    assert "7 images of 3 classes, %" in answer.out
    assert "no other image has their class: 1" in answer.out


def test_evaluate_refuses(run, photos):
    refused(proxymetric("evaluate", run, "--metrics", "R@1,map"), "metrics: got 'map'", "did you mean 'MAP@R'?")
    refused(proxymetric("evaluate", run, "--split", "test"), "has no test classes", "expected --split all")
    refused(proxymetric("evaluate", run, "--split", "tests"), "split: got 'tests'", "all, test")
    refused(proxymetric("evaluate", run, "--which", "first"), "which: got 'first'", "one of best")
    refused(proxymetric("evaluate", run, "--distance", "l1"), "distance", "l1", "cosine")
    refused(proxymetric("evaluate", run.parent / "nothing"), "holds no run", f"there are runs at {run}")


@pytest.fixture(scope="module")
def embedded(run: Path, photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("vectors") / "photos.safetensors"
    answer = proxymetric("embed", run, photos, "--out", file)
    assert answer.code == 0, answer
    assert f"80 vectors of 8 dimensions in {file}" in answer.out
    return file


def test_embedded_vectors_are_the_models(run, photos, embedded):
    files = sorted(photos.rglob("*.png"))
    with safe_open(str(embedded), "pt") as opened:
        vectors = opened.get_tensor("vectors")
    assert torch.equal(vectors, pm.load(run).embed(files))
    assert torch.allclose(vectors.norm(dim=1), torch.ones(80), atol=1e-5)


def test_embed_writes_beside_where_one_stands(run, photos, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert proxymetric("embed", run, photos / "class1").code == 0
    assert [path.name for path in tmp_path.iterdir()] == ["class1.safetensors"]


def hits(answer: Answer) -> list[list[tuple[float, str]]]:
    """The results that `search` prints for each image: similarity and file."""
    queries: dict[str, list[tuple[float, str]]] = {}
    for line in answer.out.splitlines():
        query, _, similarity, _, file = line.split("\t")
        queries.setdefault(query, []).append((float(similarity), file))
    return list(queries.values())


def test_query_finds_the_nearest_and_never_the_image_itself(run, photos, embedded, monkeypatch):
    monkeypatch.setenv("COLUMNS", "250")
    images = sorted(photos.rglob("*.png"))
    asked = [images[5], images[40]]
    by_folder = proxymetric("search", run, *asked, "--in", photos, "-k", 6)
    by_file = proxymetric("search", run, *asked, "--in", embedded, "-k", 6)
    assert by_folder.code == 0, by_folder
    assert by_folder.out == by_file.out
    vectors = pm.load(run).embed(images)
    for image, found in zip(asked, hits(by_folder), strict=True):
        near = (vectors @ vectors[images.index(image)]).argsort(descending=True).tolist()
        wanted = [str(images[i]) for i in near if images[i] != image][:6]
        assert [file for _, file in found] == wanted


def test_query_of_a_copy_elsewhere_finds_the_original_first(run, photos, embedded, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "250")
    copy = tmp_path / "copy.png"
    original = next(photos.rglob("*.png"))
    copy.write_bytes(original.read_bytes())
    ((similarity, file), *_), *_ = hits(proxymetric("search", run, copy, "--in", embedded))
    assert (similarity, file) == (1.0, str(original))


def test_query_with_more_results_than_images(run, photos, monkeypatch):
    monkeypatch.setenv("COLUMNS", "250")
    image = photos / "class0" / "0.png"
    (found,) = hits(proxymetric("search", run, image, "--in", photos / "class0", "-k", 100))
    assert len(found) == 7


def test_query_and_embed_refuse(run, photos, embedded, tmp_path):
    image = next(photos.rglob("*.png"))
    refused(
        proxymetric("search", run, tmp_path / "gone.png", "--in", photos),
        "IMAGE: got",
        "gone.png, which does not exist",
    )
    refused(
        proxymetric("search", run, photos / "class0" / "0.png", "--in", f"{photos}s"),
        "--in: got",
        f"did you mean '{photos}'?",
    )
    refused(proxymetric("search", run, image, "--in", tmp_path / "gone"), "--in: got", "gone, which does not exist")
    refused(
        proxymetric("search", run, image, "--in", run / "best.safetensors"), "best.safetensors, expected a file that"
    )
    refused(proxymetric("search", run, image, "--in", photos, "-k", 0), "k: got 0, expected at least 1")
    (tmp_path / "text.jpg").write_text("not an image")
    refused(
        proxymetric("search", run, tmp_path / "text.jpg", "--in", photos),
        "text.jpg",
        "the image format is not recognised",
    )
    out = tmp_path / "x.safetensors"
    refused(proxymetric("embed", run, tmp_path, "--out", out), "images: got 1 images, none of which can be read")
    refused(proxymetric("embed", run, tmp_path / "gone", "--out", out), "which is not a folder")
    assert not out.exists()


def test_query_refuses_vectors_of_another_model(run, photos, embedded, tmp_path):
    model = pm.load(run)
    index = VectorFile.load(embedded)
    assert model.fingerprint() == index.model
    with torch.no_grad():
        next(model.encoder.parameters()).view(-1)[0] += 1e-3
    assert model.fingerprint() != index.model
    other = tmp_path / "other.safetensors"
    VectorFile(index.vectors, index.names, model.fingerprint()).save(other)
    answer = proxymetric("search", run, next(photos.rglob("*.png")), "--in", other)
    refused(answer, str(other), f"which holds vectors of a model other than {run}")


def test_embed_names_what_it_leaves_out(run, photos, tmp_path):
    folder = tmp_path / "mixed"
    folder.mkdir()
    (folder / "a.png").write_bytes(next(photos.rglob("*.png")).read_bytes())
    (folder / "b.jpg").write_text("not an image")
    answer = proxymetric("embed", run, folder, "--out", tmp_path / "x.safetensors")
    assert answer.code == 0
    assert f"left out, cannot be read: {folder / 'b.jpg'}" in answer.err
    assert "1 vectors of 8 dimensions" in answer.out


@pytest.mark.usefixtures("no_page")
def test_a_csv_trains_and_names_the_run_after_itself(photos, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with open(photos.parent / "shop.list.csv", "w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["file", "class"])
        rows.writerows((image.relative_to(photos.parent), image.parent.name) for image in sorted(photos.rglob("*.png")))
    answer = proxymetric("train", "--data", photos.parent / "shop.list.csv", *terminal.TINY)
    assert answer.code == 0, answer
    result = read_json(tmp_path / "runs" / "shop.list-proxy-anchor" / "result.json")
    assert result["data"]["train"].items() >= {"images": 64, "classes": 8, "shorter_side": 16}.items()


@pytest.mark.usefixtures("no_page")
def test_without_held_out_classes_there_is_no_table(photos, tmp_path):
    answer = train(photos, tmp_path / "run", "--set", "data.validation=0")
    assert answer.code == 0, answer
    assert "trained encoder" not in answer.out
    assert "no classes were held out, so there are no scores" in answer.out
    assert f"result: {tmp_path / 'run' / 'result.json'}" in answer.out


@pytest.mark.usefixtures("no_page")
def test_resume_of_nothing_starts_and_says_so(photos, tmp_path):
    answer = train(photos, tmp_path / "run", "--resume")
    assert answer.code == 0, answer
    assert f"{tmp_path / 'run'} holds no run to continue: starting a new one" in answer.err
    more = proxymetric("train", "--out", tmp_path / "run", "--resume", "--epochs", 2)
    assert more.code == 0, more
    assert "continuing from epoch 1" in more.err
    assert read_json(tmp_path / "run" / "result.json")["epochs"] == 2


@pytest.mark.usefixtures("no_page")
def test_resume_finds_images_that_have_moved(photos, tmp_path):
    (tmp_path / "here").symlink_to(photos)
    assert train(tmp_path / "here", tmp_path / "run").code == 0
    answer = train(photos, tmp_path / "run", "--epochs", 2, "--resume")
    assert answer.code == 0, answer
    assert read_json(tmp_path / "run" / "result.json")["epochs"] == 2


@pytest.mark.usefixtures("no_page")
def test_ctrl_c_saves_and_says_how_to_go_on(photos, tmp_path, monkeypatch):
    asked = []

    def ctrl_c(self: Terminal, tick: Tick) -> None:
        if not asked:
            asked.append(tick.step)
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Terminal, "tick", ctrl_c)
    answer = train(photos, tmp_path / "run")
    assert answer.code == 130
    assert answer.err.splitlines()[-1] == "saved; the same command with --resume continues the run"
    assert (tmp_path / "run" / "last.safetensors").is_file()
    assert not (tmp_path / "run" / "result.json").exists()
    again = train(photos, tmp_path / "run", "--resume")
    assert again.code == 0, again
    assert "continuing from epoch 0, step 1" in again.err


TICK = Tick(step=72, steps=30_000, epoch=3, epochs=1000, loss=5.2163, images_per_second=1508.2, seconds_left=1885.0)


def test_the_bar_fits_a_narrow_terminal():
    screen = io.StringIO()
    bar = Terminal(Console(file=screen, force_terminal=True, width=80))
    bar.tick(TICK)
    bar.close()
    drawn = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen.getvalue())
    for fact in ("epoch 3/1000", "72/30000", "loss 5.216", "1,508 images/s", "31m25s left"):
        assert fact in drawn, drawn
    assert max(map(len, drawn.splitlines())) <= 80


def test_a_log_file_gets_a_line_now_and_then(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    page = io.StringIO()
    log = Terminal(Console(file=page, width=80))
    for now[0] in (1001.0, 1020.0, 1031.0, 1032.0, 1062.0):
        log.tick(TICK)
    line = "epoch 3/1000: 72 of 30000, loss 5.216, 1,508 images/s, 31m25s left"
    assert page.getvalue().splitlines() == [line, line]


def test_times_as_people_say_them():
    assert [clock(s) for s in (0.4, 59.6, 60, 3599.7, 3600, 90061)] == [
        "0s",
        "1m00s",
        "1m00s",
        "1h00m",
        "1h00m",
        "25h01m",
    ]


def test_the_demo_trains_a_shipped_recipe_and_says_what_to_do_next(photos, tmp_path, monkeypatch):
    """A small recipe replaces that of the demo."""
    assert training.DEMO_RECIPE in recipe.names()
    file = tmp_path / "tiny.toml"
    file.write_text(
        f"[data]\npath = {json.dumps(str(photos))}\nworkers = 0\n[view]\nsize = 16\nresize = 16\n"
        '[encoder]\nbackbone = "small"\ndim = 8\n[train]\nepochs = 1\nbatch = 16\n'
    )
    monkeypatch.setattr(training, "DEMO_RECIPE", str(file))
    for _ in range(2):
        answer = proxymetric("demo", "--out", tmp_path / "demo", "--device", "cpu")
        assert answer.code == 0, answer
    assert "it takes one to three minutes" in answer.err.splitlines()[0]
    assert "next: open" in answer.err
    assert "proxymetric train --data IMAGES" in answer.err
    assert (tmp_path / "demo" / "report.html").is_file()


def test_work_has_a_rate_and_a_time_left(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    page = io.StringIO()
    log = Terminal(Console(file=page, width=80))
    for now[0], done in ((1000.0, 64), (1040.0, 464), (1080.0, 864)):
        log.work("embedding", done, 1064)
    assert page.getvalue().splitlines() == [
        "embedding: 464 of 1064, 10 images/s, 1m00s left",
        "embedding: 864 of 1064, 10 images/s, 20s left",
    ]
    for now[0], done in ((2000.0, 0), (2040.0, 10)):
        log.work("features: unseen", done, 20)
    assert page.getvalue().splitlines()[-1] == "features: unseen: 10 of 20, 4.0 s/image, 40s left"


def test_training_ends_with_what_to_do_next(run, told):
    for verb in ("evaluate", "index"):
        assert f"  proxymetric {verb} {run}" in told[0].err
    assert "  proxymetric search all.index unknown.jpg" in told[0].err
    assert "on 2 held-out classes (16 images), not trained on, but they chose the epoch, %" in told[0].out


def test_the_help_explains_both_average_precisions():
    words = " ".join(re.sub(r"[^\w@(),]", " ", proxymetric("evaluate", "--help").out).split())
    assert "MAP@K (divided by K, as in the papers)" in words
    assert "AP@K (the same sum divided by min(K, R)" in words
