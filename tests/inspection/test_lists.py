"""The lists of an inspection: each finds what it should, and nothing where there is nothing."""

from __future__ import annotations

import io

import numpy as np
import pytest
import torch
from PIL import Image

from proxymetric.inspection import find_duplicates, find_lonely, find_wrong_labels, nearest_images, picture_of_rows
from proxymetric.inspection import wrong_labels as wrong_labels_module
from proxymetric.inspection.duplicates import MIN_CORRELATION, MIN_DETAIL, NEIGHBOURS
from proxymetric.inspection.pixels import SIDE, agreement, grey_copy


def clusters(classes: int = 8, images: int = 30, noise: float = 0.15, dim: int = 16, seed: int = 0):
    """Unit vectors around class centres, and their labels."""
    random = torch.Generator().manual_seed(seed)
    labels = torch.arange(classes).repeat_interleave(images)
    centres = torch.nn.functional.normalize(torch.randn(classes, dim, generator=random))
    vectors = centres[labels] + noise * torch.randn(len(labels), dim, generator=random)
    return torch.nn.functional.normalize(vectors), labels


def picture(seed: int, width: int = 240, height: int = 180) -> Image.Image:
    """A smooth coloured picture."""
    cells = np.random.default_rng(seed).integers(0, 256, (9, 12, 3), dtype=np.uint8)
    return Image.fromarray(cells).resize((width, height), Image.Resampling.BICUBIC)


def as_jpeg(image: Image.Image, quality: int) -> Image.Image:
    buffer = io.BytesIO()
    image.save(buffer, "jpeg", quality=quality)
    return Image.open(io.BytesIO(buffer.getvalue()))


class TestWrongLabels:
    def test_changed_labels_are_listed_with_the_right_one(self):
        vectors, right = clusters()
        labels = right.clone()
        changed = torch.tensor([3, 50, 100, 200])
        labels[changed] = (labels[changed] + 3) % 8
        found = find_wrong_labels(vectors, labels)
        assert {each.row for each in found.listed} == set(changed.tolist())
        for each in found.listed:
            assert each.suggestion == right[each.row]
            assert labels[each.nearest_of_label] == labels[each.row]
            assert labels[each.nearest_of_suggestion] == each.suggestion
            assert each.nearest_of_label != each.row
        assert found.share == pytest.approx(4 / 240, abs=0.01)

    def test_right_labels_are_not_listed(self):
        vectors, labels = clusters()
        found = find_wrong_labels(vectors, labels)
        assert found.listed == []
        assert found.share < 0.01

    def test_random_labels_are_not_all_listed(self):
        """Where labels say nothing about vectors, no label is more likely wrong than another."""
        vectors, labels = clusters()
        labels = labels[torch.randperm(len(labels), generator=torch.Generator().manual_seed(1))]
        assert len(find_wrong_labels(vectors, labels).listed) <= 2

    def test_the_distances_are_those_without_the_image(self):
        """The formula for leaving an image out gives what the analysis without that image gives."""
        vectors, labels = clusters(classes=4, images=6, dim=5)
        vectors, pictures = vectors.double(), torch.arange(len(labels))
        own, others, classes = wrong_labels_module._distances(vectors, labels, pictures)
        for row in (0, 7, 23):
            rest = pictures != row
            centres = torch.stack([vectors[rest & (labels == c)].mean(dim=0) for c in range(4)])
            residuals = vectors[rest] - centres[labels[rest]]
            # Sums are divided by the same count, and the sphere is that of all images.
            everything = vectors - torch.stack([vectors[labels == c].mean(dim=0) for c in range(4)])[labels]
            sphere = everything.square().sum() / len(labels) / 5 * torch.eye(5, dtype=torch.float64)
            covariance = 0.5 * residuals.T @ residuals / len(labels) + 0.5 * sphere
            differences = vectors[row] - centres
            wanted = (differences @ torch.linalg.inv(covariance) * differences).sum(dim=1)
            torch.testing.assert_close(own[row], wanted[labels[row]])
            torch.testing.assert_close(others[row], wanted[classes[row]])
            assert set(classes[row].tolist()) == set(range(4)) - {int(labels[row])}

    def test_copies_do_not_speak_for_each_other(self):
        """Five copies of a picture with the same wrong label would otherwise confirm each other."""
        vectors, labels = clusters(images=8)
        copies = vectors[:1].expand(5, -1)
        vectors, labels = torch.cat([vectors, copies]), torch.cat([labels, torch.full((5,), 4)])
        pictures = torch.arange(len(labels))
        rows = set(range(64, 69))
        pictures[64:] = 0
        assert rows <= {each.row for each in find_wrong_labels(vectors, labels, pictures).listed}
        assert 0 not in {each.row for each in find_wrong_labels(vectors, labels, pictures).listed}
        assert find_wrong_labels(vectors, labels, pictures).listed[0].nearest_of_label < 64

    def test_a_class_of_copies_is_no_wrong_label(self):
        """Where all images of a class look alike, they are its evidence."""
        vectors, labels = clusters(noise=0.05)
        labels[3] = 5
        pictures = labels * 30
        pictures[3] = 0
        assert [each.row for each in find_wrong_labels(vectors, labels, pictures).listed] == [3]

    def test_a_class_of_one_image_is_not_judged(self):
        vectors, labels = clusters()
        labels[5] = 8
        found = find_wrong_labels(vectors, labels)
        assert found.probability.isnan().nonzero().flatten().tolist() == [5]
        assert 5 not in {each.row for each in found.listed}

    def test_blocks_and_missing_labels_change_nothing(self, monkeypatch):
        vectors, labels = clusters()
        labels[[3, 50]] = torch.tensor([5, 7])
        whole = find_wrong_labels(vectors, labels)
        monkeypatch.setattr(wrong_labels_module, "NUMBERS_PER_BLOCK", 64)
        torch.testing.assert_close(find_wrong_labels(vectors, labels).probability, whole.probability)
        spread = find_wrong_labels(vectors, labels * 3)  # two of three labels have no image
        torch.testing.assert_close(spread.probability, whole.probability)
        assert [each.suggestion for each in spread.listed] == [3 * each.suggestion for each in whole.listed]

    @pytest.mark.parametrize("labels", [[0, 0, 0, 0], [0, 1, 2, 3], [0, 0, 1, 1]])
    def test_few_images_are_no_error(self, labels):
        assert find_wrong_labels(torch.eye(4), torch.tensor(labels)).listed == []


class TestPixels:
    @pytest.mark.parametrize(
        ("change", "mirrored"),
        [
            (lambda image: as_jpeg(image, 30), False),
            (lambda image: image.resize((100, 75)), False),
            (lambda image: image.crop((10, 7, 232, 174)), False),
            (lambda image: image.transpose(Image.Transpose.FLIP_LEFT_RIGHT), True),
            (lambda image: image.point(lambda value: value // 2 + 40), False),
            (lambda image: image.convert("L"), False),
        ],
        ids=["compressed", "scaled", "cut", "mirrored", "darker", "grey"],
    )
    def test_the_same_picture_agrees(self, change, mirrored):
        for seed in range(3):
            copies = torch.from_numpy(np.stack([grey_copy(picture(seed)), grey_copy(change(picture(seed)))]))
            found = agreement(copies, torch.tensor([0, 1]), torch.tensor([1, 0]))
            assert found.correlation.min() >= MIN_CORRELATION
            assert found.detail.min() >= MIN_DETAIL
            assert found.mirrored.tolist() == [mirrored, mirrored]

    def test_other_pictures_do_not(self):
        copies = torch.from_numpy(np.stack([grey_copy(picture(seed)) for seed in range(12)]))
        first, second = torch.triu_indices(12, 12, 1)
        assert agreement(copies, first, second).correlation.max() < 0.8

    def test_one_shape_on_white_is_not_one_picture(self):
        """Dark ellipses with different stripes, as cars in a catalogue."""
        y, x = np.mgrid[-1:1:120j, -1:1:160j]
        inside = (x / 0.8) ** 2 + (y / 0.5) ** 2 < 1
        shapes = [
            Image.fromarray(np.where(inside, 60 + 35 * np.sin(waves), 255).astype(np.uint8))
            for waves in (20 * x, 20 * y)
        ]
        copies = torch.from_numpy(np.stack([grey_copy(image) for image in shapes]))
        found = agreement(copies, torch.tensor([0]), torch.tensor([1]))
        assert found.correlation.item() > MIN_CORRELATION
        assert found.detail.item() < MIN_DETAIL

    def test_a_flat_picture_agrees_with_nothing(self):
        copies = torch.stack([torch.full((SIDE, SIDE), 255), torch.full((SIDE, SIDE), 255)]).byte()
        assert agreement(copies, torch.tensor([0]), torch.tensor([1])).correlation.tolist() == [0.0]

    def test_an_image_larger_than_its_copy_by_far_and_a_tiny_one(self):
        large, tiny = grey_copy(picture(0, 2400, 1800)), grey_copy(picture(0, 40, 30))
        copies = torch.from_numpy(np.stack([large, tiny]))
        assert agreement(copies, torch.tensor([0]), torch.tensor([1])).correlation.item() > 0.97


class TestDuplicates:
    def found(self, images: list[Image.Image], labels: list[int], digests: list[str] | None = None):
        copies = torch.from_numpy(np.stack([grey_copy(image) for image in images]))
        small = torch.nn.functional.interpolate(copies[:, None].float(), size=8, mode="area").flatten(1)
        vectors = torch.nn.functional.normalize(small - small.mean(dim=1, keepdim=True))
        digests = digests or [str(row) for row in range(len(images))]
        nearest = nearest_images(vectors, digests)
        return find_duplicates(vectors, copies, digests, torch.tensor(labels), nearest)

    def test_copies_are_grouped_through_each_other(self):
        images = [picture(seed) for seed in range(6)]
        images += [as_jpeg(images[1], 40), images[1].resize((120, 90)), as_jpeg(images[4], 60)]
        groups = self.found(images, [0, 0, 1, 1, 2, 2, 0, 0, 1])
        assert [group.rows for group in groups] == [[4, 8], [1, 6, 7]]
        assert [group.two_labels for group in groups] == [True, False]
        assert {pair.kind for group in groups for pair in group.copies} == {"same picture"}

    def test_more_equal_files_than_neighbours(self):
        images = [picture(0)] * (NEIGHBOURS + 5) + [picture(seed) for seed in range(1, 4)]
        digests = ["same"] * (NEIGHBOURS + 5) + ["a", "b", "c"]
        [group] = self.found(images, [0] * len(images), digests)
        assert group.rows == list(range(NEIGHBOURS + 5))
        assert {pair.kind for pair in group.copies} == {"same file"}

    def test_no_images_and_one_image(self):
        assert self.found([picture(0)], [0]) == []
        assert picture_of_rows(3, []).tolist() == [0, 1, 2]


class TestLonely:
    def vectors(self):
        vectors, labels = clusters(noise=0.1, dim=64)
        return vectors, labels, torch.arange(len(labels))

    def nearest(self, vectors):
        return nearest_images(vectors, [str(row) for row in range(len(vectors))])

    def test_a_stranger_is_lonely_and_others_are_not(self):
        vectors, labels, pictures = self.vectors()
        assert find_lonely(vectors, labels, pictures, self.nearest(vectors)).listed == []
        stranger = torch.linalg.svd(vectors)[2][-1]  # the direction that no image has
        vectors[10] = stranger
        [each] = find_lonely(vectors, labels, pictures, self.nearest(vectors)).listed
        assert each.row == 10
        assert labels[each.nearest_of_label] == labels[10]
        assert each.similarity_of_label <= each.similarity

    def test_a_copy_is_no_company(self):
        vectors, labels, pictures = self.vectors()
        stranger = torch.linalg.svd(vectors)[2][-1]
        vectors[10] = vectors[20] = stranger
        pictures[20] = 10
        listed = find_lonely(vectors, labels, pictures, self.nearest(vectors)).listed
        assert [each.row for each in listed] == [10, 20]

    def test_a_label_of_its_own_and_few_images(self):
        vectors, labels, pictures = self.vectors()
        vectors[10], labels[10] = torch.linalg.svd(vectors)[2][-1], 99
        [each] = find_lonely(vectors, labels, pictures, self.nearest(vectors)).listed
        assert each.nearest_of_label == -1
        few = find_lonely(vectors[:5], labels[:5], pictures[:5], self.nearest(vectors[:5]))
        assert few.listed == []
        assert np.isnan(few.limit)
