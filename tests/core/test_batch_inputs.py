"""What a criterion accepts as embeddings and labels, and how it treats embeddings that are not finite."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch

import proxymetric as pm
from proxymetric.core.batch_inputs import LabelCheck, all_length, one_if_finite

C, D = 4, 3
X = torch.randn(4, D, generator=torch.Generator().manual_seed(0))
Y = torch.tensor([0, 1, 2, 1])
READ_ONLY = Y.numpy().copy()
READ_ONLY.flags.writeable = False


@pytest.mark.parametrize(
    "labels",
    [
        Y.tolist(), tuple(Y.tolist()), Y.numpy(), Y.numpy().astype(np.uint8), Y.numpy().astype(np.uint64), READ_ONLY,
        list(Y), list(Y.numpy()), Y.int(), Y.to(torch.uint8), range(4),
    ],
)  # fmt: skip
def test_labels_may_be_a_list_or_an_array(labels, recwarn) -> None:
    torch.manual_seed(0)
    criterion = pm.method("proxy-anchor", classes=C, dim=D)
    expected = Y if len(set(map(int, labels))) == 3 else torch.arange(4)
    assert torch.equal(criterion(X, labels), criterion(X, expected))
    assert not recwarn.list


def test_no_labels_for_no_embeddings() -> None:
    assert pm.method("proxy-anchor", classes=C, dim=D)(X[:0], []) == 0


@pytest.mark.parametrize(
    ("embeddings", "labels", "sentence"),
    [
        (X, ["cat", "dog", "cat", "cow"], "labels: got text ('cat', ...), expected whole numbers from 0; number the "
         "classes of all training images once: names, numbers = numpy.unique(texts, return_inverse=True)"),
        (X, np.array(["cat"] * 4), "labels: got text ('cat', ...), expected whole numbers"),
        (X, [b"cat"] * 4, "labels: got text"),
        (X, None, "labels: got NoneType, expected a tensor, an array or a list of whole numbers"),
        (X, [0, 1, None, 2], "labels: got list, expected a tensor, an array or a list of whole numbers"),
        (X, [[0], [1, 2], 3, 4], "labels: got list, expected"),
        (X, {0, 1, 2, 3}, "labels: got set, expected"),
        (X, [0.0, 1.0, 2.0, 3.0], "labels: got shape (4,) of torch.float64, expected 4 whole numbers"),
        (X, [True, False, True, True], "labels: got shape (4,) of torch.bool, expected 4 whole numbers"),
        (X, [0, 1, 2], "labels: got shape (3,) of torch.int64, expected 4 whole numbers, one for each embedding"),
        (X, [0, 1, 2, 4], "labels: got 4, expected 0 to 3 (classes=4)"),
        (X, 3, "labels: got shape () of torch.int64, expected 4"),
        (None, Y, "embeddings: got NoneType, expected a torch tensor of floats (batch, dim), the output of"),
        (X.numpy(), Y, "embeddings: got ndarray, expected a torch tensor"),
        (X.tolist(), Y, "embeddings: got list, expected a torch tensor"),
        (X.to_sparse(), Y, "embeddings: got a sparse tensor, expected a dense one: embeddings.to_dense()"),
        (X.long(), Y, "embeddings: got shape (4, 3) of torch.int64, expected floats"),
        (X[:, :2], Y, "embeddings: got 2 dimensions, expected dim=3"),
    ],
)  # fmt: skip
def test_other_inputs_get_a_sentence_and_leave_nothing(embeddings, labels, sentence) -> None:
    criterion = pm.method("proxy-anchor", classes=C, dim=D)
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}"):
        criterion(embeddings, labels)
    assert criterion.pending == 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_the_factor_is_exactly_one_for_every_finite_length(dtype) -> None:
    largest = 60000.0 if dtype == torch.float16 else 1e18
    values = torch.tensor([[0.0, -0.0], [largest, -largest], [1e-30, 1.0]], dtype=dtype)
    factor = one_if_finite(all_length(values.float() if dtype in (torch.float16, torch.bfloat16) else values))
    assert factor == 1
    assert not factor.requires_grad


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_half_embeddings_that_are_not_finite(value) -> None:
    criterion = pm.method("norm-softmax", classes=C, dim=D)
    for dtype in (torch.float16, torch.bfloat16):
        embeddings = X.to(dtype)
        embeddings[1, 2] = value
        assert criterion(embeddings, Y).isnan()
    criterion.double()
    embeddings = X.double()
    embeddings[1, 2] = value
    assert criterion(embeddings, Y).isnan()


@pytest.mark.parametrize(
    ("dtype", "value", "sentence"),
    [
        (torch.float32, -1e20, "got numbers up to 1e+20, whose squares overflow torch.float32, expected numbers below"),
        (torch.bfloat16, 1e30, "got numbers up to 1e+30, whose squares overflow torch.float32, expected numbers below"),
        (
            torch.float64,
            1e200,
            "got numbers up to 1e+200, whose squares overflow torch.float64, expected numbers below",
        ),
    ],
)
def test_embeddings_whose_length_overflows_get_a_sentence(dtype, value, sentence) -> None:
    """Also beside a row that overflows, numbers that are not finite are a matter of a scaler: the loss is NaN."""
    criterion = pm.method("norm-softmax", classes=C, dim=D).to(dtype)
    embeddings = X.to(dtype).clone()
    embeddings[1, 2] = value
    with pytest.raises(ValueError, match=f"^embeddings: {re.escape(sentence)} 1e"):
        criterion(embeddings, Y)
    assert criterion.pending == 0
    embeddings[2, 0] = torch.inf
    assert criterion(embeddings, Y).isnan()
    embeddings[2, 0], criterion.careful = 0.0, False
    assert criterion(embeddings, Y).isnan()


def test_the_limit_that_the_sentence_names_is_safe() -> None:
    criterion = pm.method("norm-softmax", classes=C, dim=D)
    assert criterion(torch.full((4, D), 9e17), Y).isfinite()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("next_call", [False, True])
@pytest.mark.parametrize("name", ["proxy-anchor", "supcon"])
def test_on_a_gpu_the_next_call_or_commit_says_it(name, next_call) -> None:
    criterion = pm.method(name, classes=C, dim=D).cuda()
    x, y = X.cuda(), Y.cuda()
    criterion(x, y)
    criterion.commit()
    bad = x.clone()
    bad[1, 2] = 1e20
    assert criterion(bad, y).isnan()
    torch.cuda.synchronize()
    with pytest.raises(ValueError, match=r"^embeddings: got numbers up to 1e\+20"):
        criterion(x, y) if next_call else criterion.commit()
    criterion.discard()
    assert criterion(x, y).isfinite()


EIGHT_BITS = [getattr(torch, name) for name in ("float8_e4m3fn", "float8_e5m2") if hasattr(torch, name)]


@pytest.mark.parametrize("name", ["proxy-anchor", "triplet"])
def test_tensors_without_numbers_and_floats_of_8_bits_get_a_sentence(name) -> None:
    criterion = pm.method(name, classes=C, dim=D)
    bad = [(X.to("meta"), Y, 'embeddings: got a tensor on the device "meta", which holds no numbers')]
    bad += [(X, Y.to("meta"), 'labels: got a tensor on the device "meta", which holds no numbers')]
    for dtype in EIGHT_BITS:
        bad += [(X.to(dtype), Y, f"embeddings: got shape (4, 3) of {dtype}, expected floats of 16, 32 or 64 bits")]
        bad += [(X, Y.float().to(dtype), f"labels: got shape (4,) of {dtype}, expected 4 whole numbers")]
    for embeddings, labels, sentence in bad:
        with pytest.raises(ValueError, match=f"^{re.escape(sentence)}"):
            criterion(embeddings, labels)
        assert criterion.pending == 0
    if name == "proxy-anchor":
        with pytest.raises(ValueError, match=r"^labels: got a tensor on the device"):
            criterion(X, Y[:, None].to("meta"))


def test_a_loss_that_is_not_finite_has_no_finite_gradient() -> None:
    criterion = pm.method("norm-softmax", classes=C, dim=D)
    embeddings = X.clone()
    embeddings[1, 2] = torch.nan
    criterion(embeddings.requires_grad_(), Y).backward()
    assert criterion.objective.source.vectors.grad.isnan().all()
    assert embeddings.grad.isnan().any()


@pytest.mark.parametrize("name", ["proxy-anchor", "norm-softmax", "soft-triple"])
def test_a_finite_loss_keeps_its_bits(name) -> None:
    """The loss and its gradients are those of the objective itself."""
    from proxymetric.core.pieces import Batch, Context, Progress

    torch.manual_seed(0)
    criterion = pm.method(name, classes=C, dim=D)
    x = X.clone().requires_grad_()
    inputs = [x, *criterion.parameters()]
    ours = criterion(x, Y)
    theirs = criterion.objective(Context(Batch(None, Y), x, Progress(0, None))).loss
    assert torch.equal(ours, theirs)
    for one, other in zip(torch.autograd.grad(ours, inputs), torch.autograd.grad(theirs, inputs), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("name", ["proxy-anchor", "norm-softmax", "triplet"])
def test_a_criterion_is_compiled_once_and_not_at_every_step(name: str) -> None:
    criterion = pm.method(name, classes=C, dim=D)
    compiled = torch.compile(criterion, backend="eager")
    for step in range(6):
        embeddings = X.clone().requires_grad_()
        # The first steps may differ: the label check keeps what it has allocated.
        with torch.compiler.set_stance("default" if step < 2 else "fail_on_recompile"):
            compiled(embeddings, Y).backward()
        criterion.commit()
    assert criterion.step == 6


def test_a_compiled_criterion_is_not_finite_either() -> None:
    criterion = pm.method("norm-softmax", classes=C, dim=D)
    compiled = torch.compile(criterion, backend="eager")
    assert compiled(X, Y).isfinite()
    criterion.discard()
    embeddings = X.clone()
    embeddings[0] = torch.nan
    assert compiled(embeddings, Y).isnan()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", [name for name in pm.methods() if not name.startswith(("vptsp", "moco", "ccp"))])
def test_the_gpu_is_not_waited_for(name) -> None:
    """Also with fused kernels, which "auto" chooses for this many pairs."""
    torch.manual_seed(0)
    criterion = pm.method(name, classes=2000, dim=64, steps_per_epoch=4).cuda()
    x, y = torch.randn(64, 64, device="cuda"), torch.arange(64, device="cuda") % 16
    criterion.careful = False
    assert criterion(x, y).isfinite()
    criterion.discard()
    for value in (torch.nan, torch.inf, 1e30):
        bad = x.clone()
        bad[3, 5] = value
        assert criterion(bad, y).isnan()
        criterion.discard()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        one_if_finite(all_length(x))
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_labels_may_lie_on_another_device() -> None:
    """Labels in main memory are checked there, and copied to the embeddings."""
    criterion = pm.method("proxy-anchor", classes=C, dim=D)
    labels = Y.clone()
    assert LabelCheck().within(labels, C) is labels
    assert torch.isfinite(criterion(X, labels))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
class TestLabelsOnAGPU:
    def test_the_first_wrong_labels_are_refused_at_once(self) -> None:
        criterion = pm.method("proxy-anchor", classes=C, dim=D).cuda()
        with pytest.raises(ValueError, match=r"^labels: got 4, expected 0 to 3 \(classes=4\)"):
            criterion(X.cuda(), (Y + 2).cuda())
        assert criterion.pending == 0

    @pytest.mark.parametrize("wrong", [-3, C])
    def test_later_ones_by_the_next_call_or_commit(self, wrong: int) -> None:
        for next_call in (False, True):
            criterion = pm.method("proxy-anchor", classes=C, dim=D).cuda()
            x, y = X.cuda().requires_grad_(), Y.cuda()
            criterion(x, y).backward()
            criterion.commit()
            bad = y.clone()
            bad[1] = wrong
            loss = criterion(x, bad)
            assert torch.isfinite(loss), "the GPU is not stopped by an index outside of a table"
            loss.backward()
            torch.cuda.synchronize()
            with pytest.raises(ValueError, match=rf"^labels: got {wrong}, expected 0 to 3"):
                criterion(x, y) if next_call else criterion.commit()
            criterion.discard()
            criterion(x, y).backward()
            criterion.commit()

    @pytest.mark.parametrize("name", ["proxy-anchor", "norm-softmax", "arcface", "soft-triple", "multi-similarity"])
    def test_nothing_waits_for_the_gpu_after_the_first_call(self, name: str) -> None:
        criterion = pm.method(name, classes=C, dim=D).cuda()
        x, y = X.cuda().requires_grad_(), Y.cuda()
        for mode in ("default", "error"):
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode(mode)
            try:
                for _ in range(2):
                    criterion(x, y).backward()
                    criterion.commit()
            finally:
                torch.cuda.set_sync_debug_mode("default")
        assert x.grad is not None
        assert x.grad.isfinite().all()

    def test_labels_in_main_memory_are_copied(self) -> None:
        criterion = pm.method("proxy-anchor", classes=C, dim=D).cuda()
        for _ in range(2):
            torch.testing.assert_close(criterion(X.cuda(), Y), criterion(X.cuda(), Y.cuda()))
