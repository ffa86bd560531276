"""Plausible mutants of command lines, recipes, CSV files and the files of runs and indexes, drawn by a generator."""

from __future__ import annotations

import contextlib
import functools
import json
import sqlite3
import tempfile
import tomllib
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

from typer.core import TyperOption
from typer.main import get_command

from conftest import write_photos
from proxymetric.arguments.recipe_keys import flat_keys
from proxymetric.cli import app
from proxymetric.papers import CATALOGUE
from proxymetric.runs.recipe import check
from proxymetric.system.tensor_files import write_tensors
from terminal import TINY, finished_run, proxymetric

Words = list[str]
NEAR: dict[str, tuple[str, ...]] = {
    "protocol": ("held-out", "last", "papers"),
    "method": tuple(CATALOGUE),
    "data.layout": ("auto", "folder", "nested", "csv", "cub"),
    "data.test": ("auto", "none"),
    "data.cache": ("auto", "none", "memory", "device"),
    "data.decode": ("full", "reduced"),
    "view.name": ("proxy-anchor", "vptsp", "ccp", "mlrc"),
    "view.crop": ("random-resized", "random", "none"),
    "view.interpolation": ("bilinear", "bicubic"),
    "encoder.backbone": ("small", "bn_inception", "test_vit", "resnet10t"),
    "encoder.pooling": ("auto", "avg", "max", "avg+max", "gem"),
    "encoder.head": ("linear", "none"),
    "encoder.freeze_bn": ("none", "statistics", "all"),
    "encoder.head_init": ("kaiming", "xavier"),
    "encoder.tuning": ("full", "linear", "bitfit", "vpt", "lora", "adapter", "bitfit+linear"),
    "loss.init": ("kaiming", "kaiming-uniform", "xavier", "normal"),
    "loss.touched": ("all", "batch", "0.5"),
    "loss.nested": ("2", "4,8", "2,4,8"),
    "train.optimizer": ("adamw", "adam", "sgd"),
    "train.proxy_optimizer": ("rowwise-adagrad",),
    "train.decay": ("none", "step", "cosine", "plateau"),
    "train.amp": ("auto", "bf16", "fp16", "off"),
    "train.parallel": ("ddp", "fsdp"),
    "train.monitor": ("R@1", "MAP@R"),
    "train.metrics": ("R@1,MAP@R", "MAP@R", "MAP@R,EER", "MAP@R,NMI", "MAP@R,covering_radius"),
}
"""values that the program knows, as text; lists of a comma"""
TINY_TOML = """method = "proxy-anchor"
protocol = "held-out"
seed = 1

[data]
path = "photos"
validation = 0.2
workers = 0

[view]
size = 16
resize = 16
scale = [0.5, 1.0]

[encoder]
backbone = "small"
dim = 8
head_init = "kaiming"

[loss]
margin = 0.1
scale = 32.0

[train]
epochs = 1
batch = 16
device = "cpu"
lr = 1e-3
betas = [0.9, 0.999]
metrics = ["R@1", "MAP@R"]
"""
STUDY_TOML = """title = "Two methods"
seeds = [0, 1]
protocols = ["held-out"]
metrics = ["R@1", "MAP@R"]

[settings]
"train.epochs" = 1
"view.size" = 16
"view.resize" = 16
"encoder.dim" = 8

[data.photos]
path = "photos"

[backbones.small]

[[rows]]
name = "one"
recipe = "recipe.toml"
settings = { "loss.margin" = 0.2 }
minutes = 0.1

[[rows]]
name = "two"
title = "Two"
recipe = "recipe.toml"
baseline = "one"
minutes = 0.1
"""
TINY_TRAIN = ["train", "--data", "photos", "--out", "out/run", *TINY, "--no-report"]
LINES: dict[str, Words] = {
    "train": TINY_TRAIN,
    "train a CSV": ["train", "--data", "table.csv", "--out", "out/run", *TINY, "--no-report"],
    "train a recipe": ["train", "--recipe", "recipe.toml", "--out", "out/run", "--no-report"],
    "resume": ["train", "--out", "run", "--resume", "--epochs", "2", "--no-report"],
    "mlrc": ["train", "--protocol", "mlrc", "--data", "table.csv", "--out", "out/folds", "--folds", "2", "--dim", "8",
             "--backbone", "small", "--epochs", "1", "--size", "16", "--device", "cpu", "--set", "data.workers=0",
             "--set", "view.resize=16"],
    "evaluate": ["evaluate", "run", "--metrics", "R@1,MAP@R", "--no-report"],
    "evaluate a CSV": ["evaluate", "run", "--data", "table.csv", "--differs", "camera", "--no-report"],
    "evaluate against": ["evaluate", "run", "--data", "photos", "--against", "slim.safetensors", "--no-report"],
    "inspect": ["inspect", "run", "photos", "--out", "out/inspected"],
    "inspect a CSV": ["inspect", "run", "table.csv", "--out", "out/inspected", "--json"],
    "index": ["index", "run", "photos", "--out", "out/index", "--map", "pca"],
    "index again": ["index", "run", "photos", "--out", "index", "--map", "none"],
    "index metadata": ["index", "run", "photos", "--out", "out/index", "--map", "none", "--metadata", "cameras.csv"],
    "search": ["search", "index", "photos/class1/1.png", "-k", "3"],
    "search where": ["search", "index", "new.png", "--where", "camera=a", "--differs", "camera=b", "--json"],
    "identify": ["search", "--identify", "index", "photos/class1/1.png", "new.png", "--far", "0.05"],
    "search pages": ["search", "index", "new.png", "photos/class1/1.png", "--together", "--offset", "2",
                     "--min-similarity", "-0.5", "--one-per", "camera"],
    "add-class": ["index", "add-class", "index", "wren", "new.png"],
    "change metadata": ["index", "metadata", "index", "cameras.csv"],
    "verify": ["index", "verify", "index"],
    "compact": ["index", "compact", "index"],
    "remove": ["index", "remove", "index", "class1/1.png"],
    "remove a class": ["index", "remove", "index", "--class", "class2"],
    "embed": ["embed", "run", "photos", "--out", "out/vectors.safetensors"],
    "embed a pack": ["embed", "slim.safetensors", "photos", "--out", "vectors.safetensors"],
    "search in": ["search", "run", "new.png", "--in", "photos", "-k", "3"],
    "search in vectors": ["search", "hub", "new.png", "--in", "vectors.safetensors", "--json"],
    "slim": ["export", "run", "--slim", "out/slim.safetensors"],
    "hub": ["export", "run", "--hub", "out/hub", "--licence", "mit"],
    "torch": ["export", "run", "--torch", "out/run.pt2"],
    "report": ["evaluate", "run", "--redraw"],
    "study": ["study", "study.toml", "--out", "out/study", "--dry-run", "--data-root", "."],
    "tables": ["study", "study.toml", "--out", "out/study", "--tables", "out/tables"],
    "collect": ["study", "study.toml", "--collect", "run", "--results", "out/results"],
    "methods": ["methods", "proxy-anchor"],
    "plan": ["methods", "--plan", "1M", "--dim", "512", "--batch", "4096", "--devices", "8", "--json"],
}  # fmt: skip
"""a valid line of every verb; paths are those of `write_inputs`"""
PATHS = ("photos", "run", "index", "hub", "table.csv", "cameras.csv", "recipe.toml", "study.toml",
         "slim.safetensors", "new.png",
         "vectors.safetensors", "run/run.json", "run/best.safetensors", "index/manifest.json", "photos/class1", "out",
         "nowhere", "new.png/x", ".", "", "out/ß 名 'x'", "~nobody/x", "hf://owner/name", "hf:x", "glyphs:12", "digits",
         "\udcff")  # fmt: skip
TYPED = {
    int: ("-9223372036854775808", "-1", "0", "1", "2", "3", "5", "17", "2147483648", "9223372036854775808",
    "1" + "0" * 30),
    float: ("-1", "0", "1e-300", "0.5", "1", "2", "1e30", "1e308", "inf", "-inf", "nan"),
}  # fmt: skip
SMALL_INTEGERS = ("-1", "0", "1", "2", "3")
"""of options whose size is the time of a run"""
TEXTS = ("", " ", "auto", "all", "none", "best", "last", "x", "=", "a=", "=a", "class=class1", "camera=a", "camera",
         "4",
         "2,4,8", "8,8", "R@1,R@1", "R@0", "R@99999999999", "nDCG@3", "NMI", "EER", "FNMR@FMR=0", "cpu", "meta",
         "ß" * 300,
         "a,b", ",", "train", "validation", "folder", "nested", "csv", "euclidean", "int8", "binary", "pca", "tsne",
         "faiss", "kind=flat", "kind=hnsw", "uint8", "float", "papers", "batch", "0.1", "test_vit", "vpt", "lora",
         "proxy-nca++", "one", "\udcff", "%s%n", "../x", "{}", "[1]")  # fmt: skip
VALUES = ("0", "1", "-1", "2", "7", "0.5", "-0.5", "1e-30", "1e30", "1e400", "nan", "-inf", "true", "false", '""',
          '"x"',
          '"auto"', '"none"', '"full"', '"ß 名"', '"1"', "[]", "[0]", "[1, 2]", "[0.5, 0.5, 0.5]", "[[1]]", '["R@1"]',
          '["x"]', "{}", "{a = 1}", "1979-05-27", "07:32:00", "9223372036854775808", "-9223372036854775809", "0x10",
          "1_000", "[" * 60 + "]" * 60, "1" * 5000, '"' + "x" * 70_000 + '"', '"module:function"', '"cpu"', '"linear"',
          "{method = 'mpa'}", "[nan, nan]", "[true, false]")  # fmt: skip
"""values of a recipe, as TOML"""
SLOW_KEYS = {
    "train.epochs": ("-1", "0", "1", "2", "0.5", '"x"', "[1]", "{}"),
    "epochs": ("-1", "0", "1", "2", "0.5", '"x"', "[1]", "{}"),
    "data.workers": ("-1", "0", "0.5", '"x"', "[1]", "{}"),
    "workers": ("-1", "0", "0.5", '"x"', "[1]", "{}"),
}
JSON_VALUES: tuple[Any, ...] = (None, True, 0, -1, 1, 2.5, 1e308, 10**30, float("nan"), float("inf"), "", "x",
                                "ß\u0000\ud800",
                                "../../x", "/etc/passwd", [], [1], ["x"], {}, {"a": 1}, [[[]]], 2**31,
                                2**63)  # fmt: skip
UNCHANGED_OPTIONS = {"--help", "-h", "--open", "--device", "--uri", "--serve", "--verbose", "-v"}
"""options that open a browser, need a server or a GPU, or print a traceback before the sentence"""
SLOW_OPTIONS = {"epochs", "jobs", "folds", "minutes"}


def write_inputs(root: Path) -> Path:
    """What the lines read: photos, a CSV, recipes, a finished run, an index, and what `export` and `embed` write."""
    rows = [
        f"photos/class{c}/{k}.png,class{c},{'train' if c < 7 else 'test'},{'abc'[k % 3]}"
        for c in range(10)
        for k in range(6)
    ]
    with contextlib.chdir(root):
        photos = write_photos(Path("photos"), images=6)
        Path("new.png").write_bytes((photos / "class3" / "3.png").read_bytes())
        Path("table.csv").write_text("\n".join(["file,class,split,camera", *rows, ""]))
        Path("recipe.toml").write_text(TINY_TOML)
        Path("study.toml").write_text(STUDY_TOML)
        run = finished_run(photos, Path("run"))
        for words in (
            ("export", run, "--slim", "slim.safetensors"),
            ("export", run, "--hub", "hub"),
            ("embed", run, photos, "--out", "vectors.safetensors"),
            ("index", run, photos, "--out", "index", "--map", "pca", "--metadata", write_cameras(photos)),
        ):
            answer = proxymetric(*words)
            assert answer.code == 0, answer
    return root


def write_cameras(photos: Path) -> Path:
    """The metadata of an index of the photos."""
    file = photos.parent / "cameras.csv"
    lines = [
        f"{path.relative_to(photos).as_posix()},{'abc'[int(path.stem) % 3]}" for path in sorted(photos.rglob("*.png"))
    ]
    file.write_text("\n".join(["file,camera", *lines, ""]))
    return file


def line_of(random: Random, root: Path) -> Words:
    """A line of a random verb with one or two changes that its parser takes."""
    name = random.choice([name for name in LINES if name not in ("torch", "report") or random.random() < 0.2])
    words = list(LINES[name])
    for _ in range(random.choice((1, 1, 2))):
        words = random.choice((_swapped, _another_path, _another_value, _another_value, _another_option, _set))(
            random, words
        )
    return words


def _path_places(words: Words) -> list[int]:
    return [place for place, word in enumerate(words) if place and (word in PATHS or word.startswith("out/"))]


def _swapped(random: Random, words: Words) -> Words:
    places = _path_places(words)
    if len(places) < 2:
        return _another_option(random, words)
    a, b = random.sample(places, 2)
    words = list(words)
    words[a], words[b] = words[b], words[a]
    return words


def _another_path(random: Random, words: Words) -> Words:
    places = _path_places(words)
    if not places:
        return _another_option(random, words)
    words = list(words)
    words[random.choice(places)] = random.choice(PATHS)
    return words


def _options(words: Words) -> dict[str, TyperOption]:
    """The options of the verb of a line, by the words that set them."""
    verbs = get_command(app).commands
    verb = " ".join(words[:2])
    parameters = verbs[verb if verb in verbs else words[0]].params
    return {
        word: option
        for option in parameters
        if isinstance(option, TyperOption)
        for word in (*option.opts, *option.secondary_opts)
        if word not in UNCHANGED_OPTIONS
    }


def _value(random: Random, option: TyperOption) -> str:
    kind = getattr(option.type_descriptor, "annotation", str)
    if option.name in SLOW_OPTIONS:
        return random.choice(SMALL_INTEGERS)
    if option.name == "settings":
        return _setting(random, None)
    if kind is Path or option.name in ("data", "run", "against", "weights", "recipe"):
        return random.choice(PATHS)
    return random.choice(TYPED.get(kind, TEXTS))


def _another_value(random: Random, words: Words) -> Words:
    options = _options(words)
    places = [place for place, word in enumerate(words[:-1]) if word in options and not options[word].is_flag]
    if not places:
        return _another_option(random, words)
    words, place = list(words), random.choice(places)
    words[place + 1] = _value(random, options[words[place]])
    return words


def _another_option(random: Random, words: Words) -> Words:
    options = _options(words)
    if not options:
        return [*words, *random.choice((["--recipes"], ["x"], []))]
    word = random.choice(sorted(options))
    return [*words, word] if options[word].is_flag else [*words, word, _value(random, options[word])]


@functools.cache
def recipe_defaults(method: str) -> list[tuple[str, Any]]:
    """The dotted keys of a recipe of a method, with their values."""
    return sorted(flat_keys(check({"method": method, "encoder": {"backbone": "small"}}).as_dict()).items())


def _setting(random: Random, method: str | None) -> str:
    key, value = random.choice(recipe_defaults(method or "proxy-anchor"))
    return f"{key}={_any_value(random, key, value)}"


def _any_value(random: Random, key: str, default: Any) -> str:
    return _near(random, key, default) if random.random() < 0.85 else random.choice(SLOW_KEYS.get(key, VALUES))


def _near(random: Random, key: str, default: Any) -> str:
    """A value of the type of the default, as TOML: another one that is known, a larger or smaller one, an edge."""
    if key in SLOW_KEYS:
        return random.choice(SLOW_KEYS[key])
    if key in NEAR and random.random() < 0.9:
        text = random.choice(NEAR[key])
        is_list = isinstance(default, list | tuple) or (key == "loss.nested" and random.random() < 0.9)
        parts = [part if part.isdecimal() else json.dumps(part) for part in text.split(",")]
        return f"[{', '.join(parts)}]" if is_list else json.dumps(text)
    if isinstance(default, bool):
        return "false" if default else "true"
    if isinstance(default, int):
        edges = (0, -1, 2**31, 10**12)
        near = (1, 2, 3, 5, default * 2, default + 1, max(default // 2, 1))
        return str(random.choice(edges if random.random() < 0.25 else near))
    if isinstance(default, float):
        edges, near = (
            (0.0, -default, 1e-30, 1e6, 1e30),
            (1.0, default / 2, default * 0.9, default * 1.5, 1e-3, 0.5, 0.99),
        )
        return repr(random.choice(edges if random.random() < 0.25 else near))
    if isinstance(default, list | tuple):
        return f"[{', '.join(_near(random, '', value) for value in default)}]"
    return random.choice(("0", "1", "2", "0.5", "true", "[1, 1]", "[0.5, 0.5, 0.5]", '"x"', '"table.csv"', *VALUES))


def _set(random: Random, words: Words) -> Words:
    if words[0] != "train":
        return _another_option(random, words)
    if "--resume" in words or random.random() < 0.3:
        return [*words, "--set", _setting(random, None)]
    method = random.choice(sorted(CATALOGUE))
    return [*words, "--method", method, "--set", _setting(random, method)]


def recipe_of(random: Random, root: Path) -> Words:
    """Change one or two places of a recipe or a study, and return the line that reads it."""
    name = random.choice(("recipe.toml", "recipe.toml", "recipe.toml", "study.toml"))
    content = (root / name).read_bytes()
    for _ in range(random.choice((1, 1, 2))):
        content = random.choice((_toml_value, _toml_key, _toml_key, _toml_key, _toml_line, _bytes_of_text))(
            random, content
        )
    (root / name).write_bytes(content)
    if name == "study.toml":
        return list(LINES[random.choice(("study", "study", "tables"))])
    return list(LINES["train a recipe" if random.random() < 0.9 else "study"])


def _toml_value(random: Random, content: bytes) -> bytes:
    lines = content.decode(errors="replace").splitlines()
    places = [place for place, line in enumerate(lines) if " = " in line]
    if places:
        place = random.choice(places)
        key, _, value = lines[place].partition(" = ")
        tables = [line.strip("[]") for line in lines[:place] if line.startswith("[")]
        dotted = f"{tables[-1]}.{key}" if tables else key
        try:
            default = tomllib.loads(f"value = {value}")["value"]
        except (tomllib.TOMLDecodeError, ValueError, RecursionError):
            default = None
        lines[place] = f"{key} = {_any_value(random, dotted.removeprefix('settings.').replace(chr(34), ''), default)}"
    return "\n".join(lines).encode()


def _toml_key(random: Random, content: bytes) -> bytes:
    """Add a known key of a recipe, of one method or another."""
    method = random.choice(sorted(CATALOGUE))
    key, default = random.choice(recipe_defaults(method))
    value = _any_value(random, key, default)
    table, _, name = key.rpartition(".")
    text = content.decode(errors="replace")
    if text.startswith("title"):  # a study
        heading, name = random.choice(("[settings]", "[[rows]]")), f'"{key}"'
        if heading == "[[rows]]":
            return text.replace("settings = {", f"settings = {{ {name} = {value}, ", 1).encode()
    else:
        text = text.replace('method = "proxy-anchor"', f'method = "{method}"').replace(
            "margin = 0.1\nscale = 32.0\n", ""
        )
        heading = f"[{table}]"
    if heading not in text:
        return f"{key} = {value}\n{text}".encode()
    kept = [line for line in text.splitlines() if not line.startswith(f"{name} = ")]
    kept.insert(kept.index(heading) + 1, f"{name} = {value}")
    return "\n".join(kept).encode()


def _toml_line(random: Random, content: bytes) -> bytes:
    """Leave a line out, have it twice or elsewhere, or put another one in."""
    lines = content.decode(errors="replace").splitlines() or [""]
    place, line = random.randrange(len(lines)), random.choice(lines)
    new = random.choice(([], [line], [line, line], ["[loss.base]"], ["x = 1"], ["[[rows]]"], ["[train]"], ["loss = 3"],
                         ["'ß 名' = 'ß'"], ["a.b.c = 1"], ["[data.'']"], ["[rows.settings]"], ["= 3"]))  # fmt: skip
    lines[place : place + random.choice((0, 1))] = new
    return "\n".join(lines).encode()


def _bytes_of_text(random: Random, content: bytes) -> bytes:
    """Another encoding, other line ends, a cut, or bytes that are no text."""
    place = random.randrange(len(content) + 1)
    text = content.decode(errors="replace")
    return random.choice((
        lambda: b"\xef\xbb\xbf" + content,
        lambda: text.encode("utf-16"),
        lambda: text.encode("utf-32"),
        lambda: text.replace("a", "ä").encode("latin-1", errors="replace"),
        lambda: content.replace(b"\n", b"\r\n"),
        lambda: content.replace(b"\n", b"\r"),
        lambda: content[:place],
        lambda: content[:place] + b"\0" + content[place:],
        lambda: content[:place] + b"\xff\xfe" + content[place:],
        lambda: content[:place] + "\u2028\u202e".encode() + content[place:],
        lambda: content[:place] + b"x" * 200_000 + content[place:],
        lambda: content * 2,
        lambda: b"",
    ))()  # fmt: skip


CSV_LINES = (*("train a CSV", "evaluate a CSV", "inspect a CSV", "index metadata") * 4, "mlrc")


def table_of(random: Random, root: Path) -> Words:
    """Change one or two places of a CSV, and return the line that reads it."""
    name = random.choice(CSV_LINES)
    file = root / ("cameras.csv" if name == "index metadata" else "table.csv")
    content = file.read_bytes()
    for _ in range(random.choice((1, 1, 2))):
        content = random.choice((_cells, _cells, _columns, _rows, _separators, _bytes_of_text))(random, content)
    file.write_bytes(content)
    return list(LINES[name])


def _grid(content: bytes) -> list[list[str]]:
    return [line.split(",") for line in content.decode(errors="replace").splitlines()] or [[""]]


def _written(grid: list[list[str]]) -> bytes:
    return "\n".join(",".join(row) for row in grid).encode(errors="surrogatepass") + b"\n"


CELLS = ("", " ", '"', '""', '"a,b"', '"a\nb"', "'", "\0", "x", "nowhere.png", ".", "..", "/", "photos",
         "photos/class1",
         "/dev/null", "table.csv", "run/best.safetensors", "photos/class1/1.png", "./photos/class1/../class1/1.png",
         "PHOTOS/CLASS1/1.PNG", "photos\\class1\\1.png", "~/x.png", "http://x/y.png", "train", "test", "val", "query",
         "gallery", "distractor", "Train ", "nan", "1e400", "-1", "=1+1", "ß 名", "\u202eabc", "x" * 300, "x" * 5000,
         "x" * 140_000, "class1", "class 1", "none of these", "a/b", "\ud800")  # fmt: skip


def _cells(random: Random, content: bytes) -> bytes:
    """Another value in one cell, in the cells of a column, or in many cells."""
    grid, value = _grid(content), random.choice(CELLS)
    column = random.randrange(max(len(row) for row in grid))
    chosen = {0: [random.randrange(len(grid))], 1: range(1, len(grid)), 2: range(1, len(grid), 3)}[random.randrange(3)]
    for row in chosen:
        if column < len(grid[row]):
            grid[row][column] = value
    return _written(grid)


def _columns(random: Random, content: bytes) -> bytes:
    """Another name of a column, a column less, one twice, or an additional one."""
    grid = _grid(content)
    column = random.randrange(len(grid[0]))
    kind = random.randrange(4)
    if kind == 0:
        grid[0][column] = random.choice(("file", "class", "split", "label", "path", "camera", "id", "", "Class ", "row",
                                         "vector", "rowid", "similarity", "ß", '"a', "x" * 3000, "select", "a]b",
                                         "a'b"))  # fmt: skip
    elif kind == 1:
        grid = [row[:column] + row[column + 1 :] for row in grid]
    elif kind == 2:
        grid = [[*row, *row[column : column + 1]] for row in grid]
    else:
        grid = [[*row, *("c" + "0" * (k == 0) for k in range(300))] for row in grid]
    return _written(grid)


def _rows(random: Random, content: bytes) -> bytes:
    """A row less, one twice, too short, too long, empty; the header alone, or no header; the rows in another order."""
    grid = _grid(content)
    place = random.randrange(len(grid))
    kind = random.randrange(8)
    if kind == 0:
        del grid[place]
    elif kind == 1:
        grid.insert(place, grid[-1])
    elif kind == 2:
        grid[place] = grid[place][:1]
    elif kind == 3:
        grid[place] = grid[place] * 3
    elif kind == 4:
        grid.insert(place, [""])
    elif kind == 5:
        grid = grid[: random.choice((1, 2, 3, 8))]
    elif kind == 6:
        random.shuffle(grid)
    else:
        grid = grid[1:]
    return _written(grid)


def _separators(random: Random, content: bytes) -> bytes:
    return content.replace(b",", random.choice((b";", b"\t", b"|", b" ", b", ", b",,", b',"', b"\0", b";,")))


RUN_LINES = ("resume", "evaluate", "evaluate against", "inspect", "index", "embed", "embed a pack", "search in",
             "search in vectors",
             "slim", "hub", "report", "collect")  # fmt: skip
INDEX_LINES = ("index again", "search", "search where", "identify", "add-class", "remove", "remove a class",
               "change metadata", "verify", "compact")  # fmt: skip
INDEX_WORDS = {"search where": ["search", "index", "new.png", "--where", "class=class1", "--json"]}


def file_of(random: Random, root: Path) -> Words:
    """Change a file of a run, an index or an export, and return a line that reads it."""
    if random.random() < 0.5:
        files = [root / "run" / name for name in ("run.json", "run.json", "result.json", "best.safetensors",
        "last.safetensors",
                                                  "held_out.safetensors", "log.jsonl")]  # fmt: skip
        files += [root / "slim.safetensors", root / "vectors.safetensors", *sorted((root / "hub").iterdir())]
        name = random.choice(RUN_LINES)
        file = random.choice(files)
        # A line that reads the changed file: most of them read one of these only.
        if file.parent.name == "hub" or file.name == "vectors.safetensors":
            name = random.choice(("search in vectors", "embed a pack"))
        elif file.name == "slim.safetensors":
            name = random.choice(("evaluate against", "embed a pack"))
        elif name in ("search in vectors", "embed a pack"):
            name = "resume"
        elif name == "report" and random.random() < 0.5:
            name = "evaluate"
    else:
        files = [file for file in sorted((root / "index").rglob("*")) if file.is_file() and file.suffix != ".png"]
        file, name = random.choice([*files, root / "index" / "manifest.json"]), random.choice(INDEX_LINES)
    content = file.read_bytes()
    change: Callable[[Random, bytes], bytes] = _damaged
    if file.suffix in (".json", ".jsonl") and random.random() < 0.85:
        change = _json
    elif file.suffix == ".safetensors" and random.random() < 0.85:
        change = random.choice((_tensor_header, _signed_header))
    elif file.suffix == ".npy" and random.random() < 0.5:
        change = _array_header
    elif file.suffix == ".sqlite" and random.random() < 0.7:
        change = _database
    file.write_bytes(change(random, content))
    return list(INDEX_WORDS.get(name, LINES[name]))


def _damaged(random: Random, content: bytes) -> bytes:
    """Flip bits near the beginning or anywhere, cut, repeat or empty a file."""
    if not content:
        return b"x"
    place = random.randrange(min(len(content), random.choice((16, 300, len(content)))))
    flipped = bytes([content[place] ^ 1 << random.randrange(8)])
    return random.choice((
        content[:place] + flipped + content[place + 1 :],
        content[:place] + flipped + content[place + 1 :],
        content[:place],
        content[:place] + b"\0" * 8 + content[place + 8 :],
        content[:place] + content[place + 1 :],
        content + content[:64],
        b"",
    ))  # fmt: skip


def _changed(random: Random, value: Any) -> Any:
    """Change a random place of a JSON value: another value, a key less or more, a level more or less."""
    if isinstance(value, dict) and value and random.random() < 0.8:
        key = random.choice(sorted(value))
        return value | {key: _changed(random, value[key])}
    if isinstance(value, list) and value and random.random() < 0.6:
        place = random.randrange(len(value))
        return [*value[:place], _changed(random, value[place]), *value[place + 1 :]]
    if isinstance(value, dict) and value and random.random() < 0.7:
        key = random.choice(sorted(value))
        less = {other: item for other, item in value.items() if other != key}
        return random.choice((less, less | {key + "x": value[key]}, value | {"x": 1}))
    if isinstance(value, str) and random.random() < 0.3:
        return random.choice((value + "x", value.upper(), value[:-1], [value]))
    if isinstance(value, int | float) and random.random() < 0.4:
        return random.choice((-value, value + 1, value * 1000, str(value), [value], value + 0.5))
    if isinstance(value, list) and random.random() < 0.5:
        return random.choice((value * 2, value[:-1], value[::-1], [value]))
    return random.choice(JSON_VALUES)


def _json(random: Random, content: bytes) -> bytes:
    lines = content.splitlines() if content[:1] == b"{" and content.count(b"\n{") else [content]
    place = random.randrange(len(lines))
    value = json.loads(lines[place])
    if random.random() < 0.06:
        return random.choice((b"[" * 100_000, b"{}", b"[]", b"null", b'{"a": 1, "a": 2}', b"1" * 5000, b"\xff\xfe{}"))
    lines[place] = json.dumps(_changed(random, value)).encode()
    return b"\n".join(lines)


def _header(content: bytes) -> tuple[dict[str, Any], bytes]:
    size = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + size]), content[8 + size :]


def _with_header(header: Any, tensors: bytes) -> bytes:
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + tensors


def _tensor_header(random: Random, content: bytes) -> bytes:
    """Another header of a tensor file: types, shapes, places and texts, whose checksum no longer fits."""
    header, tensors = _header(content)
    if random.random() < 0.2:
        place = random.randrange(8)
        return content[:place] + bytes([content[place] ^ 1 << random.randrange(8)]) + content[place + 1 :]
    return _with_header(_changed(random, header), tensors)


def _signed_header(random: Random, content: bytes) -> bytes:
    """Another header of a tensor file with a checksum that fits: what a file of another program or a forger holds."""
    from safetensors.torch import load

    header, _ = _header(content)
    tensors, texts = load(content), dict(header.get("__metadata__", {}))
    key = random.choice([*texts, *tensors])
    if key in texts:
        try:
            value = json.loads(texts[key])
        except ValueError:
            value = texts[key]
        texts[key] = json.dumps(_changed(random, value))
    else:
        tensor = tensors.pop(key)
        other = random.choice((
            lambda: None, lambda: tensor.reshape(-1), lambda: tensor[None],
            lambda: tensor[:0] if tensor.ndim else tensor[None],
            lambda: tensor.double(), lambda: tensor.to(bool), lambda: tensor.long(), lambda: tensor * float("nan"),
            lambda: tensor.bfloat16(),
        ))()  # fmt: skip
        if other is not None:
            tensors[random.choice((key, key, key + "x"))] = other.contiguous()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "x.safetensors"
        write_tensors(file, tensors, texts)
        return file.read_bytes()


def _array_header(random: Random, content: bytes) -> bytes:
    """Another type, order or shape of a NumPy array, in a header of the same length."""
    changes = ((b"<f4", b"<f8"), (b"<f4", b">f4"), (b"<f4", b"|O8"), (b"False", b"True "), (b"(60,", b"(61,"),
    (b"(60,", b"(-1,"),
               (b"(60,", b"( 6,"), (b", 8)", b", 9)"), (b"shape", b"shApe"), (b"NUMPY", b"NUMPX"), (b"<f4",
               b"<i4"))  # fmt: skip
    old, new = random.choice(changes)
    return content[:128].replace(old, new) + content[128:]


def _database(random: Random, content: bytes) -> bytes:
    """A changed table of an SQLite file."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "x.sqlite"
        file.write_bytes(content)
        with contextlib.closing(sqlite3.connect(file)) as database:
            tables = [name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
            table = random.choice(tables)
            column = random.choice([row[1] for row in database.execute(f'PRAGMA table_info("{table}")')])
            value = random.choice(("NULL", "-1", "'x'", "x'00ff'", "2.5", "9223372036854775807", "''"))
            rows = random.choice(("", " WHERE rowid = 3", " WHERE rowid > 30"))
            statement = random.choice((
                f'UPDATE OR REPLACE "{table}" SET "{column}" = {value}{rows}', f'DELETE FROM "{table}"{rows}',
                f'DROP TABLE "{table}"', f'ALTER TABLE "{table}" RENAME COLUMN "{column}" TO "other"',
            ))  # fmt: skip
            with contextlib.suppress(sqlite3.Error):
                database.execute(statement)
                database.commit()
        return file.read_bytes()
