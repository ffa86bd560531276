"""A `ClassQueue` holds what a `Queue` holds, in a run and in a checkpoint."""

import pytest
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


@pytest.mark.parametrize("size", [1, 5, 8, 30])
def test_the_chosen_rows_are_added_as_if_they_were_selected(size: int) -> None:
    """Batches of 8 rows: smaller than the queue, as large, and larger; none, some or all of the rows are chosen."""
    generator = torch.Generator().manual_seed(size)
    selected, masked = Queue(size, dim=3), ClassQueue(size, dim=3, classes=4)
    for share in (0.5, 0.0, 1.0, 0.9, 0.2, 0.0, 0.7, 1.0, 0.5):
        vectors, labels = torch.randn(8, 3, generator=generator), torch.randint(4, (8,), generator=generator)
        chosen = torch.rand(8, generator=generator) < share
        selected.remember(vectors[chosen], labels[chosen])
        if share == 1:
            masked.remember(vectors, labels)
        else:
            masked.remember(vectors, labels, chosen)
        assert len(masked) == len(selected)
        expected, state = selected.state_dict(), masked.state_dict()
        assert all(torch.equal(state[name], value) for name, value in expected.items())
        sums, number = masked.sums.clone(), masked.number.clone()
        masked.recompute_sums()
        assert torch.equal(masked.sums, sums)
        assert torch.equal(masked.number, number)
        assert number.sum() == len(masked)
