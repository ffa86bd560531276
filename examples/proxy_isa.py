"""Proxy-ISA in your own training loop: `python examples/proxy_isa.py`.

Proxy-ISA gives informative samples more weight, and easy samples and outliers less. The loop calls
`criterion(embeddings, labels)`, and `commit()` after the optimiser's step. The criterion must know the number of steps
in an epoch, because its memory of past embeddings starts with the second epoch and its filter of outliers with the
third. The example trains on half of the characters of a built-in data set and searches among the other half. To use it
for your data, copy `train` and replace the network and the batches.
"""

import argparse

import torch
from torch import Tensor, nn

import proxymetric as pm

DIM, BATCH = 64, 30


def network() -> nn.Module:
    layers: list[nn.Module] = []
    for channels, features in ((1, 24), (24, 48), (48, 96)):
        layers += [nn.Conv2d(channels, features, 3, 2, 1, bias=False), nn.BatchNorm2d(features), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(96 * 4 * 4, DIM))


def halves(name: str) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Images (N, 1, 32, 32) in [-1, 1] and labels of the training classes, and of the unseen classes."""
    data = pm.open_data(name)
    seen = [c for c in range(len(data.classes)) if c not in data.test_classes]
    parts = (data.of_classes(seen), data.of_classes(data.test_classes))
    first, second = ((torch.tensor(part.arrays)[:, None] / 127.5 - 1, torch.tensor(part.labels)) for part in parts)
    return first, second


@torch.no_grad()
def score(net: nn.Module, images: Tensor, labels: Tensor) -> float:
    net.eval()
    return pm.evaluate(net(images), labels, "MAP@R")["MAP@R"]


def train(net: nn.Module, images: Tensor, labels: Tensor, epochs: int) -> None:
    steps = len(images) // BATCH
    classes = int(labels.max()) + 1
    # A network that starts from random weights changes quickly, so the memory holds the embeddings of one epoch only.
    criterion = pm.method("proxy-isa", classes=classes, dim=DIM, memory=len(images), steps_per_epoch=steps)
    groups = [
        {"params": net.parameters(), "lr": 2e-3},
        *criterion.param_groups(lr=2e-2),  # a higher learning rate for the proxies
    ]
    optimizer = torch.optim.AdamW(groups, weight_decay=1e-4)
    for epoch in range(epochs):
        net.train()
        losses = []
        for rows in torch.randperm(len(images))[: steps * BATCH].split(BATCH):
            optimizer.zero_grad()
            loss = criterion(net(images[rows]), labels[rows])
            loss.backward()
            optimizer.step()
            criterion.commit()  # adds the batch to the memory; call `discard()` for a step you skip
            losses.append(loss.item())
        figures = ", ".join(f"{name} {value:.2f}" for name, value in criterion.figures().items())
        print(f"epoch {epoch + 1:2d}  loss {sum(losses) / steps:.3f}  {figures}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Proxy-ISA in a plain PyTorch loop, scored on unseen classes.")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.manual_seed(arguments.seed)
    (images, labels), unseen = halves("glyphs:60")
    net = network()
    before = score(net, *unseen)
    train(net, images, labels, arguments.epochs)
    print(f"MAP@R on unseen classes: {before:.3f} before, {score(net, *unseen):.3f} after")


if __name__ == "__main__":
    main()
