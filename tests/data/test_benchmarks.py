"""The large benchmarks in small trees of their official shape, and the sentences for broken ones."""

import gzip
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from proxymetric.data import BENCHMARKS, EvalFeed, EvalView, ImageSet, open_data, split
from proxymetric.metrics import evaluate


def write(root: Path, *files: str, mode: str = "RGB") -> None:
    for k, file in enumerate(files):
        path = root / file
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new(mode, (8 + k % 3, 8), 1).save(path)


def lines(path: Path, *rows: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{row}\n" for row in rows))


def shown(images: ImageSet, root: Path) -> list[str]:
    assert images.paths is not None
    return [path.relative_to(root).as_posix() for path in images.paths]


def opened(source: Path, layout: str) -> ImageSet:
    """Open `source` with the layout detected and with the layout named; both must give the same set."""
    found, named = open_data(source), open_data(source, layout=layout)
    assert found.name == named.name == layout
    assert found.identity() == named.identity()
    return found


SOP = "image_id class_id super_class_id path"


def sop(root: Path) -> None:
    train = ["bicycle_final/1_0.JPG", "bicycle_final/1_1.JPG", "cabinet_final/2_0.JPG", "cabinet_final/10_0.JPG"]
    test = ["bicycle_final/12_0.JPG", "cabinet_final/11_0.JPG", "cabinet_final/11_1.JPG"]
    write(root, *train, *test)
    rows = [f"{k} {file.split('/')[1].split('_')[0]} 1 {file}" for k, file in enumerate(train + test, 1)]
    lines(root / "Ebay_train.txt", SOP, *rows[: len(train)])
    lines(root / "Ebay_test.txt", SOP, *rows[len(train) :])


def test_stanford_online_products(tmp_path: Path) -> None:
    root = tmp_path / "Stanford_Online_Products"
    sop(root)
    for source in (root, tmp_path):
        images = opened(source, "sop")
        assert images.classes == ["bicycle 1", "cabinet 2", "cabinet 10", "cabinet 11", "bicycle 12"]
        assert images.labels.tolist() == [0, 0, 1, 2, 3, 3, 4]
        assert images.test_classes == (3, 4)
        assert shown(images, root)[4:] == [
            "cabinet_final/11_0.JPG",
            "cabinet_final/11_1.JPG",
            "bicycle_final/12_0.JPG",
        ]
    parts = split(images, validation=0)
    assert (len(parts.train), len(parts.test)) == (4, 3)


def test_stanford_online_products_broken(tmp_path: Path) -> None:
    sop(tmp_path)
    good = (tmp_path / "Ebay_train.txt").read_text()
    file = tmp_path / "Ebay_train.txt"
    file.write_text(good.replace(SOP + "\n", ""))
    with pytest.raises(
        ValueError, match=r"line 1: got '1 1 1 bicycle_final/1_0.JPG', expected the header 'image_id class_id"
    ):
        open_data(tmp_path)
    file.write_text(good + "5 x 1 a.jpg\n")
    with pytest.raises(ValueError, match=r"Ebay_train.txt, line 6: got '5 x 1 a.jpg', expected"):
        open_data(tmp_path)
    file.write_text(good + "5 11 1 cabinet_final/11_0.JPG\n")
    with pytest.raises(ValueError, match="1 classes for both training and test, first 'cabinet 11'"):
        open_data(tmp_path)
    file.write_text(good + "5 2 1 cabinet_final/2_7.JPG\n")
    with pytest.raises(ValueError, match=r"1 of 8 files that do not exist.*cabinet_final/2_7.JPG"):
        open_data(tmp_path)
    file.write_text(SOP + "\n")
    with pytest.raises(ValueError, match="got 0 training classes, expected at least two"):
        open_data(tmp_path)
    file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="expected a text file"):
        open_data(tmp_path)
    file.unlink()
    with pytest.raises(ValueError, match=r"expected the layout of Stanford_Online_Products: Ebay_train.txt and"):
        open_data(tmp_path, layout="sop")


IN_SHOP = [
    ("img/WOMEN/Dresses/id_00000003/01_1_front.jpg", "id_00000003", "train"),
    ("img/WOMEN/Dresses/id_00000001/02_1_front.jpg", "id_00000001", "query"),
    ("img/WOMEN/Dresses/id_00000001/02_2_side.jpg", "id_00000001", "gallery"),
    ("img/MEN/Denim/id_00000002/01_1_front.jpg", "id_00000002", "train"),
    ("img/MEN/Denim/id_00000002/01_7_additional.jpg", "id_00000002", "train"),
    ("img/MEN/Denim/id_00000004/01_1_front.jpg", "id_00000004", "gallery"),
    ("img/MEN/Denim/id_00000004/02_1_front.jpg", "id_00000004", "gallery"),
    ("img/MEN/Denim/id_00000004/03_1_front.jpg", "id_00000004", "query"),
]


def in_shop(root: Path, place: str, images: str) -> Path:
    write(root / images, *(file for file, _, _ in IN_SHOP))
    file = root / place / "list_eval_partition.txt"
    rows = [f"{image:70s} {item} {status}" for image, item, status in IN_SHOP]
    lines(file, str(len(rows)), "image_name item_id evaluation_status", *rows)
    return file


@pytest.mark.parametrize(("place", "folder"), [("", ""), ("Eval", ""), ("Eval", "Img"), ("", "Img")])
def test_in_shop(tmp_path: Path, place: str, folder: str) -> None:
    in_shop(tmp_path, place, folder)
    images = opened(tmp_path, "in-shop")
    assert images.classes == ["id_00000001", "id_00000002", "id_00000003", "id_00000004"]
    assert images.test_classes == (0, 3)
    status = {file: status for file, _, status in IN_SHOP}
    assert images.gallery is not None
    assert [status[file] == "gallery" for file in shown(images, tmp_path / folder)] == images.gallery.tolist()
    parts = split(images, validation=0)
    assert parts.train.gallery is None
    assert (len(parts.train), len(parts.test)) == (3, 5)
    assert parts.test.gallery.tolist() == [False, True, True, True, False]
    assert parts.test.labels.tolist() == [0, 0, 1, 1, 1]


def test_in_shops_gallery_is_what_evaluation_takes(tmp_path: Path) -> None:
    in_shop(tmp_path, "Eval", "Img")
    test = split(open_data(tmp_path), validation=0).test
    feed = EvalFeed(test, EvalView(8, resize=8))
    assert sum(len(batch.labels) for batch in feed) == 5
    gallery = test.subset(feed.kept).gallery
    vectors = torch.tensor([[1.0, 0], [0.9, 0.1], [0, 1], [0.1, 0.9], [1.0, 0.1]])
    labels = torch.from_numpy(test.labels)
    scores = evaluate(
        vectors[~gallery], labels[~gallery], ["R@1"], gallery=vectors[gallery], gallery_labels=labels[gallery]
    )
    assert scores["R@1"] == 0.5


def test_in_shop_broken(tmp_path: Path) -> None:
    file = in_shop(tmp_path, "Eval", "")
    good = file.read_text()
    file.write_text(good.replace("image_name item_id", "image_name"))
    with pytest.raises(ValueError, match="with images of one class only"):
        open_data(tmp_path)
    with pytest.raises(
        ValueError, match=r"line 2: got 'image_name evaluation_status', expected the header .*; lists of other"
    ):
        open_data(tmp_path, layout="in-shop")
    file.write_text(good.replace("8\n", "9\n", 1))
    with pytest.raises(ValueError, match="got 8 images, expected 9 as on line 1; is the file complete"):
        open_data(tmp_path)
    file.write_text(good.replace(" query", " val"))
    with pytest.raises(
        ValueError, match=r"line 4: got .*, expected an image, an item and one of train, query, gallery"
    ):
        open_data(tmp_path)
    file.write_text(good.replace(" query", " gallery"))
    with pytest.raises(ValueError, match="got no images with the status query"):
        open_data(tmp_path)
    file.write_text(good.replace("id_00000003 train", "id_00000001 train"))
    with pytest.raises(ValueError, match="for both training and test, first 'id_00000001'"):
        open_data(tmp_path)
    file.write_text("")
    with pytest.raises(ValueError, match="expected the header"):
        open_data(tmp_path, layout="in-shop")
    file.unlink()
    with pytest.raises(ValueError, match="expected the layout of In-Shop"):
        open_data(tmp_path, layout="in-shop")


@pytest.mark.parametrize("place", ["", "Inat_dataset_splits"])
@pytest.mark.parametrize("labelled", [False, True])
def test_inaturalist(tmp_path: Path, place: str, labelled: bool) -> None:
    train = [f"train_val2018/{kind}/{k}.jpg" for kind in ("Plantae/6000", "Aves/3305") for k in range(2)]
    test = [f"train_val2018/{kind}/{k}.jpg" for kind in ("Aves/3306", "Fungi/5600") for k in range(3)]
    write(tmp_path, *train, *test)
    for name, files in (("train", train), ("test", test)):
        rows = [f"{file} {file.split('/')[2]}" if labelled else file for file in files]
        lines(tmp_path / place / f"Inaturalist_{name}_set1.txt", *rows)
    images = opened(tmp_path, "inaturalist")
    names = ["3305", "6000", "3306", "5600"] if labelled else ["Aves/3305", "Plantae/6000", "Aves/3306", "Fungi/5600"]
    assert images.classes == names
    assert images.test_classes == (2, 3)
    assert shown(images, tmp_path)[:3] == [train[2], train[3], train[0]]
    lines(tmp_path / place / "Inaturalist_test_set1.txt", "3305/a.jpg")
    with pytest.raises(
        ValueError, match=r"Inaturalist_test_set1.txt, line 1: got '3305/a.jpg', expected a path such as"
    ):
        open_data(tmp_path)
    (tmp_path / place / "Inaturalist_test_set1.txt").unlink()
    with pytest.raises(ValueError, match="expected the layout of iNaturalist"):
        open_data(tmp_path, layout="inaturalist")


@pytest.mark.parametrize("parts", [("images_background", "images_evaluation"), ("background", "evaluation")])
@pytest.mark.parametrize("alphabets", [True, False])
def test_omniglot(tmp_path: Path, parts: tuple[str, str], alphabets: bool) -> None:
    kinds = (
        ["Greek/character01", "Greek/character02", "Latin/character01"],
        ["Tagalog/character01", "Tagalog/character02"],
    )
    if not alphabets:
        kinds = tuple([kind.replace("/", "_") for kind in part] for part in kinds)
    for part, names in zip(parts, kinds):
        write(tmp_path / "omniglot" / part, *(f"{name}/{k:04d}_01.png" for name in names for k in (1, 2)), mode="1")
    for source in (tmp_path, tmp_path / "omniglot"):
        images = opened(source, "omniglot")
        assert images.classes == kinds[0] + kinds[1]
        assert images.test_classes == (3, 4)
        assert images.labels.tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    assert images.read(0).getpixel((0, 0)) == (255, 255, 255)


def test_omniglot_broken(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="expected the layout of Omniglot: images_background/ and"):
        open_data(tmp_path, layout="omniglot")
    write(tmp_path, "background/a/1.png", "background/b/1.png", "evaluation/c/1.png")
    with pytest.raises(ValueError, match="evaluation: got 1 characters"):
        open_data(tmp_path)


def idx(array: np.ndarray) -> bytes:
    """Two zeros, 8 for bytes, the number of dimensions, the sizes, the values: all big-endian."""
    return struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.tobytes()


def digits(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    return random.integers(0, 256, (count, 28, 28), dtype=np.uint8), np.arange(count, dtype=np.uint8) % 10


def official(root: Path, joint: str = "-", packed: bool = False) -> dict[str, Path]:
    files = {}
    root.mkdir(parents=True, exist_ok=True)
    for name, (pixels, labels) in (("train", digits(30, 0)), ("t10k", digits(20, 1))):
        for what, array in (("images", pixels), ("labels", labels)):
            file = root / f"{name}-{what}{joint}idx{array.ndim}-ubyte{'.gz' if packed else ''}"
            file.write_bytes(gzip.compress(idx(array)) if packed else idx(array))
            files[f"{name}-{what}"] = file
    return files


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("folder", "joint"), [("", "-"), ("MNIST/raw", "-"), ("mnist", ".")])
def test_mnist_official_files(tmp_path: Path, packed: bool, folder: str, joint: str) -> None:
    official(tmp_path / folder, joint, packed)
    images = opened(tmp_path, "mnist")
    assert images.arrays.shape == (50, 28, 28)
    assert np.array_equal(images.arrays[30:], digits(20, 1)[0])
    assert images.test_images.tolist() == [False] * 30 + [True] * 20
    parts = split(images, validation=0.2)
    assert (len(parts.train), len(parts.validation), len(parts.test)) == (24, 6, 20)
    assert parts.test.classes == list("0123456789")
    assert np.array_equal(parts.test.arrays, digits(20, 1)[0])
    assert not set(parts.train.classes) & set(parts.validation.classes)


def test_mnist_split_by_class_when_asked(tmp_path: Path) -> None:
    official(tmp_path)
    parts = split(open_data(tmp_path), validation=0, test=0.4)
    assert (len(parts.train.classes), len(parts.test.classes)) == (6, 4)
    assert (len(parts.train), len(parts.test)) == (30, 20)
    assert not set(parts.train.classes) & set(parts.test.classes)
    assert len(split(open_data(tmp_path), validation=0, test="none").train) == 50


def test_mnist_class_folders(tmp_path: Path) -> None:
    write(tmp_path, *(f"train/{d}/{k}.png" for d in range(10) for k in range(3)), mode="L")
    write(tmp_path, *(f"test/{d}/{k}.png" for d in range(10) for k in range(2)), mode="L")
    images = opened(tmp_path, "mnist")
    assert images.test_images.sum() == 20
    assert all("test" in path.parts for path, test in zip(images.paths, images.test_images) if test)
    parts = split(images, validation=0)
    assert (len(parts.train), len(parts.test)) == (30, 20)
    assert parts.test.labels.tolist() == [d for d in range(10) for _ in range(2)]
    write(tmp_path, "test/ten/1.png")
    with pytest.raises(ValueError, match="expected 0 to 9 and no others"):
        open_data(tmp_path, layout="mnist")


def test_mnist_broken(tmp_path: Path) -> None:
    files = official(tmp_path)
    images, labels = files["train-images"], files["train-labels"]
    good, right = images.read_bytes(), labels.read_bytes()
    images.write_bytes(good[:-5])
    with pytest.raises(ValueError, match="got 23515 values, expected 30 x 28 x 28 as in its header; is it complete"):
        open_data(tmp_path)
    images.write_bytes(right)
    with pytest.raises(
        ValueError, match="got 00 00 08 01 as its first bytes, expected an IDX file of bytes with 3 dimensions"
    ):
        open_data(tmp_path)
    images.write_bytes(gzip.compress(good)[:-200])
    with pytest.raises(ValueError, match=r"got a damaged \.gz file .*expected a complete one"):
        open_data(tmp_path)
    images.write_bytes(b"")
    with pytest.raises(ValueError, match="got nothing as its first bytes"):
        open_data(tmp_path)
    images.write_bytes(idx(digits(29, 0)[0]))
    with pytest.raises(ValueError, match="got 29 images, expected 30 as in"):
        open_data(tmp_path)
    images.write_bytes(good)
    labels.write_bytes(idx(np.full(30, 11, np.uint8)))
    with pytest.raises(ValueError, match="got the label 11"):
        open_data(tmp_path)
    labels.unlink()
    with pytest.raises(ValueError, match=r"expected the layout of MNIST: train-labels-idx1-ubyte \(or"):
        open_data(tmp_path, layout="mnist")


def test_a_folder_with_several_benchmarks_asks_which(tmp_path: Path) -> None:
    sop(tmp_path / "Stanford_Online_Products")
    official(tmp_path / "mnist")
    in_shop(tmp_path / "inshop", "Eval", "Img")
    with pytest.raises(
        ValueError, match=r"with Stanford_Online_Products and inshop and mnist inside, expected one of .* layout='sop'"
    ):
        open_data(tmp_path)
    assert [open_data(tmp_path, layout=layout).name for layout in ("sop", "in-shop", "mnist")] == [
        "sop",
        "in-shop",
        "mnist",
    ]


@pytest.mark.parametrize("layout", BENCHMARKS)
def test_peoples_own_folders_are_no_benchmark(tmp_path: Path, layout: str) -> None:
    """A user's folder is not taken for a benchmark, even if a class folder has the name of a benchmark."""
    name = BENCHMARKS[layout].folder_names[0]
    write(tmp_path, f"{name}/1.jpg", f"{name}/2.jpg", "train/1.jpg", "test/1.jpg")
    assert open_data(tmp_path).test_classes == ()
    with pytest.raises(ValueError, match="expected the layout of"):
        open_data(tmp_path, layout=layout)
