"""Opening folders, CSV files and the benchmarks' layouts, and the sentences for what cannot be opened."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from scipy.io import savemat

from proxymetric.data import open_data, singletons, split


def write(root: Path, *files: str) -> None:
    for k, file in enumerate(files):
        path = root / file
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8 + k % 3, 8), (k % 256, 0, 0)).save(path)


def lines(path: Path, *rows: str) -> None:
    path.write_text("".join(f"{row}\n" for row in rows))


def test_folder(tmp_path):
    write(tmp_path, "cat/b.jpg", "cat/a.PNG", "cat/deep/er/c.webp", "ant/x.bmp", "ant/y.tif", "bee/only.gif")
    (tmp_path / "cat" / "notes.txt").write_text("no image")
    (tmp_path / "cat" / ".hidden.jpg").write_bytes(b"")
    (tmp_path / ".git").mkdir()
    (tmp_path / "empty").mkdir()
    images = open_data(tmp_path)
    assert images.classes == ["ant", "bee", "cat"]
    assert images.labels.tolist() == [0, 0, 1, 2, 2, 2]
    shown = [path.relative_to(tmp_path).as_posix() for path in images.paths]
    assert shown == ["ant/x.bmp", "ant/y.tif", "bee/only.gif", "cat/a.PNG", "cat/b.jpg", "cat/deep/er/c.webp"]
    assert images.name == tmp_path.name
    assert images.test_classes == ()
    assert singletons(images) == ["bee"]
    assert images.read(4).mode == "RGB"


def test_images_of_types_that_are_not_read_are_counted(tmp_path, without_heic):
    for name in ("cat/1.HEIC", "cat/2.heic", "dog/3.HEIC"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"photo")
    with pytest.raises(ValueError, match=r"no labelled images.*; it has images of types that are not read: 3 \.heic; "):
        open_data(tmp_path)
    write(tmp_path, "cat/a.jpg", "dog/b.jpg")
    (tmp_path / "dog" / "film.mp4").write_bytes(b"film")
    (tmp_path / "dog" / "notes.txt").write_text("no image")
    note = f"{tmp_path}: left out, images of types that are not read: 3 .heic, 1 .mp4; "
    note += "to read .heic, pip install 'proxymetric[heic]'; convert .mp4 to .jpg or .png"
    assert note in open_data(tmp_path).notes
    loose = tmp_path / "loose"
    loose.mkdir()
    (loose / "1.HEIC").write_bytes(b"photo")
    with pytest.raises(ValueError, match=r"it has images of types that are not read: 1 \.heic"):
        open_data(loose)


def test_folders_without_data_say_what_was_looked_for(tmp_path):
    with pytest.raises(ValueError, match="with no labelled images, expected one folder for each class"):
        open_data(tmp_path)
    write(tmp_path, "loose.jpg")
    with pytest.raises(ValueError, match="and 1 images outside class folders"):
        open_data(tmp_path)
    write(tmp_path, "all/one/a.jpg", "all/two/b.jpg")
    with pytest.raises(ValueError, match=r"one class only \('all'\).*did you mean .*all, which has 2 folders"):
        open_data(tmp_path)


def test_a_missing_folder_names_its_neighbour(tmp_path, monkeypatch):
    write(tmp_path, "birds/a/1.jpg", "notes/a.jpg")
    (tmp_path / "brid.txt").write_text("x")
    with pytest.raises(ValueError, match=r"which does not exist, .*; did you mean '.*/birds'\?$"):
        open_data(tmp_path / "brids")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"data: got 'brids', which does not exist, .*; did you mean 'birds'\?$"):
        open_data("brids")
    with pytest.raises(ValueError, match=r"which does not exist, [^;]*$"):
        open_data("zzzzzz")


def test_missing_source_and_wrong_layout(tmp_path):
    with pytest.raises(ValueError, match=r"data: got 'glyhps', which does not exist, .*; did you mean 'glyphs'"):
        open_data("glyhps")
    with pytest.raises(ValueError, match="did you mean 'cars'"):
        open_data(tmp_path, layout="car")
    with pytest.raises(ValueError, match="expected the layout of CUB_200_2011"):
        open_data(tmp_path, layout="cub")
    with pytest.raises(ValueError, match="layout: got 'csv' for 'glyphs:24', expected 'auto'"):
        open_data("glyphs:24", layout="csv")
    with pytest.raises(ValueError, match="layout: got 'csv' for the folder"):
        open_data(tmp_path, layout="csv")
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(ValueError, match=r"data: got the file .*, expected a folder, a \.csv file of files"):
        open_data(tmp_path / "a.txt")


@pytest.mark.parametrize(
    ("header", "separator"), [("file,class", ","), ("note;Label;PATH", ";"), ("image\tlabel", "\t")]
)
def test_csv(tmp_path, header, separator):
    write(tmp_path, "p/1.jpg", "p/2.jpg", "p/3 x.jpg")
    rows = [{"file": f, "class": c} for f, c in (("p/1.jpg", "b"), ("p/2.jpg", "a"), ("p/3 x.jpg", "b"))]
    kinds = {"file": "file", "path": "file", "image": "file", "class": "class", "label": "class"}
    columns = [kinds.get(name.lower()) for name in header.split(separator)]
    lines(tmp_path / "m.csv", header, *(separator.join(row[c] if c else "-" for c in columns) for row in rows), "")
    images = open_data(tmp_path / "m.csv")
    assert images.classes == ["a", "b"]
    assert images.labels.tolist() == [1, 0, 1]
    assert [images.read(i).size for i in range(3)] == [(8, 8), (9, 8), (10, 8)]


def test_csv_mistakes(tmp_path):
    file = tmp_path / "m.csv"
    lines(file, "a.jpg,cat")
    with pytest.raises(ValueError, match=r"got 'a.jpg', 'cat', expected a header line with the columns file and class"):
        open_data(file)
    lines(file, "file,class," + "x" * 200_000, "a.jpg,cat")
    with pytest.raises(ValueError, match=r"line 1: got a header that cannot be read \(field larger"):
        open_data(file)
    lines(file, "file,class")
    with pytest.raises(ValueError, match="a header line and no rows"):
        open_data(file)
    lines(file, "file,class", "a.jpg,x", "b.jpg,")
    with pytest.raises(ValueError, match=r"line 3: got .* without a class"):
        open_data(file)
    lines(file, "file,class", *(f"{k}.jpg,c{k % 2}" for k in range(5)))
    with pytest.raises(ValueError, match=r"5 of 5 files that do not exist.*: 0\.jpg, 1\.jpg, 2\.jpg, \.\.\."):
        open_data(file)
    write(tmp_path, "1.jpg")
    lines(file, "file,class", "1.jpg,x")
    with pytest.raises(ValueError, match=r"one class only \('x'\)"):
        open_data(file)


def cub(root: Path) -> list[str]:
    files = [f"{c:03d}.Bird_{c}/{k}.jpg" for c in range(1, 5) for k in range(3)]
    write(root / "images", *files)
    lines(root / "images.txt", *(f"{k} {file}" for k, file in enumerate(files, 1)))
    lines(root / "image_class_labels.txt", *(f"{k} {int(file[:3])}" for k, file in enumerate(files, 1)))
    lines(root / "classes.txt", *(f"{c} {c:03d}.Bird_{c}" for c in range(1, 5)))
    return files


def test_cub_official_layout_also_from_the_folder_above(tmp_path):
    files = cub(tmp_path / "CUB_200_2011")
    for source in (tmp_path, tmp_path / "CUB_200_2011"):
        images = open_data(source)
        assert (images.name, images.test_classes) == ("cub", (2, 3))
        assert [path.relative_to(tmp_path / "CUB_200_2011" / "images").as_posix() for path in images.paths] == files
        assert images.classes[3] == "004.Bird_4"
    parts = split(open_data(tmp_path), validation=0)
    assert parts.train.classes == ["001.Bird_1", "002.Bird_2"]
    assert parts.test.classes == ["003.Bird_3", "004.Bird_4"]


def test_cub_lists_that_disagree(tmp_path):
    cub(tmp_path)
    labels = (tmp_path / "image_class_labels.txt").read_text()
    (tmp_path / "image_class_labels.txt").write_text(labels.removesuffix("12 4\n"))
    with pytest.raises(ValueError, match=r"got 12 images, expected the 11 images of .*; 1 image numbers .* first 12"):
        open_data(tmp_path)
    (tmp_path / "image_class_labels.txt").write_text(labels.replace("12 4", "12 9"))
    with pytest.raises(ValueError, match="first image 12 of class '9'"):
        open_data(tmp_path)
    (tmp_path / "image_class_labels.txt").write_text("nonsense\n")
    with pytest.raises(ValueError, match=r"line 1: got .*, expected a number, a space and a name"):
        open_data(tmp_path)
    (tmp_path / "image_class_labels.txt").write_text(labels)
    (tmp_path / "images" / "002.Bird_2" / "1.jpg").unlink()
    with pytest.raises(ValueError, match=r"1 of 12 files that do not exist.*images/002.Bird_2/1.jpg"):
        open_data(tmp_path)


def test_numbered_class_folders_are_a_benchmark_only_at_its_size(tmp_path):
    few, many = tmp_path / "few", tmp_path / "many"
    write(few, "1.b/x.jpg", "2.a/x.jpg", "10.c/x.jpg", "11.d/x.jpg")
    assert open_data(few).test_classes == ()
    with pytest.raises(ValueError, match=r"4 class folders, expected the 200 of CUB-200-2011; .*'folder'"):
        open_data(few, layout="cub")
    write(many / "images", *(f"{c:03d}.Car/x.jpg" for c in range(1, 197)))
    lines(many / "classes.txt", *(f"{c} Car number {c}" for c in range(1, 197)))
    images = open_data(many)
    assert (images.name, images.classes[97], images.test_classes[0]) == ("cars", "Car number 98", 98)
    assert "196 images of 196 classes; Cars196 has 16,185 of 196" in images.notes[0]
    lines(many / "classes.txt", *(f"{c} Car number {c}" for c in range(1, 196)))
    with pytest.raises(ValueError, match="got 195 classes, expected the 196 class folders; they differ at number 196"):
        open_data(many)


def annotations(files: list[str], classes: list[int]) -> np.ndarray:
    """The official shape: a (1, N) struct with the path, four corners of the box, the class and a flag."""
    corners = [(name, object) for name in ("bbox_x1", "bbox_y1", "bbox_x2", "bbox_y2")]
    rows = np.empty(
        (1, len(files)), dtype=[("relative_im_path", object), *corners, ("class", object), ("test", object)]
    )
    for k, (file, label) in enumerate(zip(files, classes, strict=True)):
        rows[0, k] = (file, 1, 2, 30, 40, label, 0)
    return rows


def test_cars_official_layout(tmp_path):
    root = tmp_path / "cars196"
    files = [f"car_ims/{k:06d}.jpg" for k in range(1, 7)]
    write(root, *files)
    names = np.array([["Acura A", "BMW B", "Seat C", "Volvo D"]], dtype=object)
    classes = [1, 1, 2, 3, 4, 4]
    savemat(root / "cars_annos.mat", {"annotations": annotations(files, classes), "class_names": names})
    for source in (root, tmp_path):
        images = open_data(source)
        assert (images.name, images.classes, images.test_classes) == ("cars", list(names[0]), (2, 3))
        assert images.labels.tolist() == [0, 0, 1, 2, 3, 3]
        assert [path.relative_to(root).as_posix() for path in images.paths] == files
    savemat(root / "cars_annos.mat", {"annotations": annotations(files, [1, 1, 2, 3, 4, 5]), "class_names": names})
    with pytest.raises(ValueError, match="got classes from 1 to 5, expected 1 to 4"):
        open_data(root)
    savemat(root / "cars_annos.mat", {"other": names})
    with pytest.raises(ValueError, match="got the variables other, expected annotations and class_names"):
        open_data(root)


def test_a_folder_that_holds_both_benchmarks_asks_which(tmp_path):
    cub(tmp_path / "CUB_200_2011")
    write(tmp_path / "cars196", *(f"{c:03d}.Car/x.jpg" for c in range(1, 197)))
    with pytest.raises(ValueError, match=r"with .* and .* inside, expected one of these folders"):
        open_data(tmp_path)
    assert open_data(tmp_path, layout="cars").name == "cars"
    assert open_data(tmp_path, layout="cub").name == "cub"


def test_digits():
    images = open_data("digits")
    assert images.arrays.shape == (1797, 32, 32)
    parts = split(images, validation=0.4)
    assert parts.test.classes == list("56789")
    assert len(parts.train.classes) + len(parts.validation.classes) == 5
