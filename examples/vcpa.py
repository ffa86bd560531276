"""VCPA in your own training loop: `python examples/vcpa.py`.

Each class has a Gaussian instead of a proxy. Ten Newton steps fit the Gaussians to each batch before the network moves,
and `commit()` stores the new Gaussians. The rest of the loop is the same as for other methods. At the end, the spread
of a Gaussian tells how certain the method is of a training class; a proxy that is a point cannot tell that. The example
trains on half of the characters of a built-in data set and searches among the other half.
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


def halves(name: str) -> tuple[tuple[Tensor, Tensor, list[str]], tuple[Tensor, Tensor, list[str]]]:
    """Images (N, 1, 32, 32) in [-1, 1], labels and class names of the training classes, and of the unseen classes."""
    data = pm.open_data(name)
    seen = [c for c in range(len(data.classes)) if c not in data.test_classes]
    parts = (data.of_classes(seen), data.of_classes(data.test_classes))
    first, second = (
        (torch.tensor(part.arrays)[:, None] / 127.5 - 1, torch.tensor(part.labels), part.classes) for part in parts
    )
    return first, second


@torch.no_grad()
def score(net: nn.Module, images: Tensor, labels: Tensor) -> float:
    net.eval()
    return pm.evaluate(net(images), labels, "MAP@R")["MAP@R"]


def train(net: nn.Module, criterion: pm.Criterion, images: Tensor, labels: Tensor, epochs: int) -> None:
    # The optimiser has no group for the proxies: Newton steps move them.
    optimizer = torch.optim.AdamW(net.parameters(), lr=2e-3, weight_decay=1e-4)
    for epoch in range(epochs):
        net.train()
        losses = []
        for rows in torch.randperm(len(images)).split(BATCH):
            optimizer.zero_grad()
            loss = criterion(net(images[rows]), labels[rows])
            loss.backward()
            optimizer.step()
            criterion.commit()  # stores the new Gaussians; call `discard()` for a step you skip
            losses.append(loss.item())
        sigma = criterion.figures()["mean sigma"]
        print(f"epoch {epoch + 1:2d}  loss {sum(losses) / len(losses):.3f}  mean sigma {sigma:.4f}")


def main() -> None:
    parser = argparse.ArgumentParser(description="VCPA in a plain PyTorch loop, scored on unseen classes.")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.manual_seed(arguments.seed)
    (images, labels, names), unseen = halves("glyphs:60")
    net = network()
    # In few dimensions the sigmas fall to their smallest value (criterion.figures() counts that); halving prevents it.
    criterion = pm.method("vcpa", classes=len(names), dim=DIM, halving=True)
    before = score(net, *unseen[:2])
    train(net, criterion, images, labels, arguments.epochs)
    print(f"MAP@R on unseen classes: {before:.3f} before, {score(net, *unseen[:2]):.3f} after")
    uncertainty = criterion.uncertainty()
    order = uncertainty.argsort().tolist()
    for degree, classes in (("most", order[:5]), ("least", order[:-6:-1])):
        print(f"{degree} certain:", ", ".join(f"{names[c]} ({uncertainty[c]:.2f})" for c in classes))


if __name__ == "__main__":
    main()
