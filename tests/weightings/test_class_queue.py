"""What a checkpoint of a `ClassQueue` holds."""

import torch

from proxymetric.sources.queue import Queue
from proxymetric.weightings.class_queue import ClassQueue


def test_a_checkpoint_holds_the_rows_and_the_sums_are_computed_from_them() -> None:
    """The state is that of a plain queue, so that a checkpoint does not depend on how the means are kept."""
    torch.manual_seed(0)
    vectors, labels = torch.randn(7, 3), torch.tensor([2, 0, 2, 1, 0, 2, 2])
    plain, other = Queue(size=5, dim=3), ClassQueue(size=5, dim=3, classes=4)
    plain.remember(vectors, labels)
    other.remember(torch.ones(2, 3), torch.tensor([3, 3]))
    assert other.state_dict().keys() == plain.state_dict().keys()
    other.load_state_dict(plain.state_dict())
    assert other.number.tolist() == [1, 1, 3, 0], "the first two rows were replaced, and those before loading are gone"
    expected = torch.stack([vectors[4], vectors[3], vectors[[2, 5, 6]].mean(0), torch.zeros(3)])
    torch.testing.assert_close(other.means(torch.arange(4)), expected)
