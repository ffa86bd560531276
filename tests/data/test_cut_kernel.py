"""The kernel that cuts boxes against the same cut in PyTorch: on a GPU where there is one, else in the interpreter."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported
pytest.importorskip("triton")

from proxymetric.data import image_buffer
from proxymetric.data.cut_kernel import cut_boxes
from proxymetric.data.image_buffer import ImageBuffer
from proxymetric.data.views import Boxes, TrainView

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("crop", ["random-resized", "random", "none"])
@pytest.mark.parametrize("size", [7, 16, 25])
def test_the_kernel_cuts_the_same_pixels(crop: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to 3 x 3 samples for a pixel, images larger and smaller than the result, mirrored and not."""
    random = np.random.default_rng(size)
    sides = [(21, 29), (40, 21), (21, 21), (6, 9), (1, 1)]
    images = [random.integers(256, size=(*side, 3), dtype=np.uint8) for side in sides]
    view = TrainView(size, resize=None if crop == "random-resized" else size + 3, crop=crop)
    rows = np.array([0, 1, 2, 3, 4, 2, 0])
    cpu = ImageBuffer(list(images))
    boxes = view.boxes(cpu.heights[rows], cpu.widths[rows], view.draw(len(rows), 0))
    assert 0 < boxes.flip.sum() < len(rows)
    expected = cpu.cut(rows, boxes, size)
    monkeypatch.setattr(image_buffer, "_cut_kernel", lambda device: cut_boxes)
    found = ImageBuffer(list(images), DEVICE).cut(rows, boxes, size).cpu()
    assert found.shape == expected.shape
    assert int((found.int() - expected.int()).abs().max()) <= 1
    assert float((found != expected).float().mean()) <= 1e-3  # products are rounded differently


def test_a_tie_is_rounded_to_even(monkeypatch: pytest.MonkeyPatch) -> None:
    pixels = np.array([[[0, 1, 2], [1, 2, 3]]], dtype=np.uint8)
    monkeypatch.setattr(image_buffer, "_cut_kernel", lambda device: cut_boxes)
    whole = Boxes(*(np.array([value]) for value in (0.0, 0.0, 1.0, 2.0)), flip=np.array([False]))
    assert ImageBuffer([pixels], DEVICE).cut(np.array([0]), whole, 1).flatten().tolist() == [0, 2, 2]


def test_no_boxes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_buffer, "_cut_kernel", lambda device: cut_boxes)
    none = np.empty(0)
    cut = ImageBuffer([np.zeros((4, 4, 3), np.uint8)], DEVICE).cut(
        none.astype(np.int64), Boxes(none, none, none, none, none.astype(bool)), 3
    )
    assert cut.shape == (0, 3, 3, 3)
