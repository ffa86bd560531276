"""Proxy-ISA in a training loop of your own: `python examples/proxy_isa.py`.

Informative samples count more, easy ones and outliers less. All it asks of the loop is `criterion(embeddings, labels)`,
`commit()` after the optimiser has moved, and how many steps an epoch has: its memory of past embeddings begins with the
second epoch, its filter of outliers with the third. Trained on half of the characters of an embedded data set, scored
by retrieval among the other half. Lift `train` and swap in your own network and batches.
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
    """Images (N, 1, 32, 32) in [-1, 1] and labels 0, 1, ... of the classes to train on, and of the unseen ones."""
    data = pm.open_data(name)
    seen = [c for c in range(len(data.classes)) if c not in data.test_classes]
    parts = (data.of_classes(seen), data.of_classes(data.test_classes))
    first, second = ((torch.tensor(p.arrays)[:, None] / 127.5 - 1, torch.tensor(p.labels)) for p in parts)
    return first, second


@torch.no_grad()
def score(net: nn.Module, images: Tensor, labels: Tensor) -> float:
    net.eval()
    return pm.evaluate(net(images), labels, "MAP@R")["MAP@R"]


def train(net: nn.Module, images: Tensor, labels: Tensor, epochs: int) -> None:
    steps = len(images) // BATCH
    classes = int(labels.max()) + 1
    # From random weights embeddings age fast: the memory holds one epoch of them.
    criterion = pm.method("proxy-isa", classes=classes, dim=DIM, memory=len(images), steps_per_epoch=steps)
    groups = [{"params": net.parameters(), "lr": 2e-3}, *criterion.param_groups(lr=2e-2)]  # proxies learn faster
    optimizer = torch.optim.AdamW(groups, weight_decay=1e-4)
    for epoch in range(epochs):
        net.train()
        losses = []
        for rows in torch.randperm(len(images))[: steps * BATCH].split(BATCH):
            loss = criterion(net(images[rows]), labels[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            criterion.commit()  # the memory takes in this batch here; `discard()` for a step you skip
            losses.append(loss.item())
        known = ", ".join(f"{name} {value:.2f}" for name, value in criterion.figures().items())
        print(f"epoch {epoch + 1:2d}  loss {sum(losses) / steps:.3f}  {known}")


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
