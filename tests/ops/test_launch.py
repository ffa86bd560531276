"""Launches of Triton kernels with and without the private interface of a compiled kernel; without GPU and Triton."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from proxymetric.ops.triton import launch as module
from proxymetric.ops.triton.launch import INTERFACE, launch


class Kernel:
    """Records the launches through the public call; returns a compiled kernel that records direct launches."""

    def __init__(self, missing: str | None = None, refuses: bool = False) -> None:
        self.public: list[tuple[Any, ...]] = []
        self.direct: list[tuple[Any, ...]] = []
        self.refuses = refuses
        interface = {"run": self.run, "function": "function", "packed_metadata": "metadata"}
        self.compiled = SimpleNamespace(**{name: value for name, value in interface.items() if name != missing})

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def start(*arguments: Any, num_warps: int, **constants: Any) -> Any:
            self.public.append((grid, arguments, num_warps, constants))
            return self.compiled

        return start

    def run(self, *arguments: Any) -> None:
        if self.refuses:
            raise TypeError("function takes exactly 20 arguments")
        self.direct.append(arguments)


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Launch a kernel on two tensors, as on a GPU."""
    monkeypatch.setattr(module, "_compiled", {})
    monkeypatch.setattr(module, "interpreting", lambda: False)
    monkeypatch.setattr(module, "direct_launch", lambda: True)
    monkeypatch.setattr(module, "_current_stream", lambda: lambda device: "stream")
    tensors = torch.zeros(8), torch.zeros(8)

    def start(kernel: Kernel, offset: int = 0, size: int = 8) -> tuple[torch.Tensor, ...]:
        monkeypatch.setattr(module, "kernels", lambda: SimpleNamespace(kernel=kernel))
        given = tuple(each[offset:] for each in tensors)
        launch("kernel", (3,), 4, given, (size, 0.5), {"BLOCK": 16})
        return given

    return start


def test_the_first_launch_compiles_and_the_next_ones_are_direct(start):
    kernel = Kernel()
    tensors = start(kernel)
    assert kernel.public == [((3,), (*tensors, 8, 0.5), 4, {"BLOCK": 16})]
    start(kernel)
    addresses = [each.data_ptr() for each in tensors]
    metadata = ("stream", "function", "metadata", None, None, None)
    assert kernel.direct == [(3, 1, 1, *metadata, *addresses, 8, 0.5, 16)]
    assert len(kernel.public) == 1


def test_another_specialisation_is_compiled_again(start):
    kernel = Kernel()
    for size in (8, 1, 16, 8):
        start(kernel, size=size)
    assert (len(kernel.public), len(kernel.direct)) == (3, 1)


def test_tensors_that_are_not_aligned_use_the_public_call(start):
    kernel = Kernel()
    for _ in range(2):
        start(kernel, offset=1)
    assert (len(kernel.public), len(kernel.direct)) == (2, 0)


@pytest.mark.parametrize("missing", INTERFACE)
def test_without_the_private_interface_every_launch_uses_the_public_call(start, missing):
    kernel = Kernel(missing=missing)
    for _ in range(3):
        start(kernel)
    assert (len(kernel.public), len(kernel.direct)) == (3, 0)


def test_other_arguments_of_the_private_interface_lead_back_to_the_public_call(start):
    kernel = Kernel(refuses=True)
    for _ in range(3):
        start(kernel)
    assert (len(kernel.public), len(kernel.direct)) == (3, 0)


@pytest.mark.parametrize(
    ("version", "direct"),
    [("3.2.0", False), ("3.3.0", True), ("3.10.1+git1", True), ("4.0.0", False), ("nightly", False)],
)
def test_direct_launches_need_a_known_version(version, direct, monkeypatch):
    monkeypatch.setattr(module, "_current_stream", lambda: lambda device: "stream")
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(__version__=version))
    assert module.direct_launch.__wrapped__() is direct


@pytest.mark.parametrize("error", [AttributeError, ImportError])
def test_direct_launches_need_the_current_stream(error, monkeypatch):
    def absent():
        raise error("get_current_stream")

    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(__version__="3.5.0"))
    monkeypatch.setattr(module, "_current_stream", absent)
    assert module.direct_launch.__wrapped__() is False


def test_an_older_version_uses_the_public_call(start, monkeypatch):
    kernel = Kernel()
    monkeypatch.setattr(module, "direct_launch", lambda: False)
    for _ in range(2):
        start(kernel)
    assert (len(kernel.public), len(kernel.direct)) == (2, 0)
