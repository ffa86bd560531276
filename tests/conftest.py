"""One thread, a separate feature cache, and small pictures for the whole session."""

from __future__ import annotations

import faulthandler
import functools
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from left_processes import end_left_processes, mark_session
from made_once import made_once
from no_forms import no_forms
from sampled import SHARE, drawn, seed

# Processes that tests start use one thread too: sums depend on the number of threads, and tests compare bits.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # in the process itself: its workers might outlive the session
torch.set_num_threads(1)
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # must be set before triton is imported


SECONDS_TO_EXIT = 120
"""after the last test; a process that needs longer prints its stacks and ends"""


def pytest_configure(config: pytest.Config) -> None:
    mark_session()
    seed()  # for the workers too
    os.environ["PROXYMETRIC_CACHE"] = tempfile.mkdtemp(prefix="proxymetric-features-")
    if not all(find_spec(name) for name in ("fastapi", "uvicorn", "multipart")):
        # Examples of modules that need an extra are left out where the extra is not installed.
        serve = Path(__file__).parent.parent / "src" / "proxymetric" / "serve"
        modules = [str(serve / f"{name}.py") for name in ("app", "schemas", "server")]
        modules.append(str(Path(__file__).parent / "support" / "service.py"))
        config.option.ignore = [*(config.option.ignore or []), *modules]


@pytest.hookimpl(trylast=True)  # after `-k` and `-m`: a case that is asked for by its name is run
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep one case of each slow test, or as many as its mark says, `slow(cases=3)`; `make test-all` keeps all."""
    families: dict[tuple[pytest.Item | pytest.Collector | None, str], list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("slow"):
            families.setdefault((item.parent, getattr(item, "originalname", item.name)), []).append(item)
    left_out = set[pytest.Item]()
    for (_, name), cases in families.items():
        mark = cases[0].get_closest_marker("slow")
        assert mark is not None
        left_out.update(set(cases).difference(drawn(cases, mark.kwargs.get("cases", 1), name)))
    if left_out:
        config.hook.pytest_deselected(items=[item for item in items if item in left_out])
        items[:] = [item for item in items if item not in left_out]


def pytest_collection_finish(session: pytest.Session) -> None:
    if "training_runs" in sys.modules:
        sys.modules["training_runs"].warm_up()  # on the other core, while the first tests run


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    terminalreporter.write_line(f"sampled cases: PROXYMETRIC_TEST_SHARE={SHARE:g} PROXYMETRIC_TEST_SEED={seed()}")


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Leave no process behind once the workers of pytest-xdist have ended."""
    if session.config.pluginmanager.has_plugin("dsession"):
        end_left_processes()


def pytest_unconfigure(config: pytest.Config) -> None:
    faulthandler.dump_traceback_later(SECONDS_TO_EXIT, exit=True, file=sys.__stderr__)
    shutil.rmtree(os.environ["PROXYMETRIC_CACHE"], ignore_errors=True)


@pytest.fixture(autouse=True)
def same_kernels() -> Iterator[None]:
    """Restore torch's kernels after each test.

    On a CPU without bfloat16, a product in bfloat16 makes torch change its kernels for the rest of the process, also in
    float32. The next test may compare bits with another process, so it must start with the original kernels.
    """
    before = torch.backends.mkldnn.enabled
    yield
    torch.backends.mkldnn.enabled = before


def write_photos(root: Path, classes: int = 10, images: int = 8, size: int = 16, noise: int = 110) -> Path:
    """A folder of class folders: each class a coarse coloured pattern, each image that pattern with strong noise."""
    random = np.random.default_rng(7)
    for c in range(classes):
        folder = root / f"class{c}"
        folder.mkdir(parents=True)
        pattern = random.integers(0, 256, (4, 4, 3))
        for k in range(images):
            pixels = np.clip(pattern + random.integers(-noise, noise + 1, (4, 4, 3)), 0, 255).astype(np.uint8)
            Image.fromarray(pixels).resize((size, size), Image.Resampling.BICUBIC).save(folder / f"{k}.png")
    return root


def write_letters(root: Path) -> None:
    """A folder of class folders: drawings of characters."""
    from proxymetric.data import glyphs

    images = glyphs(characters=60, size=16, drawings=10)
    for i in range(len(images)):
        folder = root / f"{images.label_of(i):02d}"
        folder.mkdir(parents=True, exist_ok=True)
        images.read(i).save(folder / f"{i}.png")


@pytest.fixture(scope="session")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten classes of eight 16 x 16 pictures; two are held out by default, which leaves 64 to train on. Only read it."""
    return made_once(tmp_path_factory, "photos", write_photos)


@pytest.fixture(scope="session")
def finished(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A tiny finished run on the `photos`, without a report. Only read it, or copy it."""
    from terminal import bytes_of, finished_run

    folder = made_once(tmp_path_factory, "finished", lambda folder: finished_run(photos, folder))
    before = {name: content for name, content in bytes_of(folder).items() if not name.startswith(".")}
    yield folder
    after = bytes_of(folder)
    assert {name: after.get(name) for name in before} == before, "a test has changed what others read"


@pytest.fixture(scope="session")
def letters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sixty characters in ten drawings of 16 x 16: something to learn. Only read it."""
    return made_once(tmp_path_factory, "letters", write_letters)


@pytest.fixture
def no_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip the report: it takes most of the time of a tiny run, and it has separate tests."""
    monkeypatch.setattr("proxymetric.runs.session.draw_report", lambda *args, **kwargs: None)


@pytest.fixture
def only_training(no_page: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip the rows of the closed forms too, which are half of what is left."""
    monkeypatch.setattr("proxymetric.runs.session.closed_form_rows", no_forms)


@pytest.fixture
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw no pictures of studies, for tests of the tables and pages beside them."""
    monkeypatch.setattr("proxymetric.studies.drawing.draw", lambda *args, **kwargs: [])


@pytest.fixture
def traced_only(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Trace what is compiled, and run the trace as it is: generated code takes a minute, and has separate tests."""
    torch.compiler.reset()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    yield
    torch.compiler.reset()
