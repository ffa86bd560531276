"""The handwritten digits of scikit-learn as an image set."""

from __future__ import annotations

import numpy as np
from PIL import Image

from proxymetric.data.images import ImageSet


def digits(size: int = 32) -> ImageSet:
    """Return 1,797 handwritten digits of 8 x 8 grey pixels, enlarged to `size` x `size`; 5-9 are the test classes.

    Args:
        size: side of the enlarged images in pixels.

    Example:
        >>> images = digits()
        >>> len(images), images.classes[-1], images.test_classes
        (1797, '9', (5, 6, 7, 8, 9))
    """
    from sklearn.datasets import load_digits

    bunch = load_digits()
    levels = np.round(bunch.images * (255 / 16)).astype(np.uint8)
    enlarged = [Image.fromarray(image).resize((size, size), Image.Resampling.BILINEAR) for image in levels]
    return ImageSet(
        name="digits",
        labels=bunch.target,
        classes=[str(c) for c in range(10)],
        arrays=np.stack([np.asarray(image) for image in enlarged]),
        test_classes=(5, 6, 7, 8, 9),
    )
