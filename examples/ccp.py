"""CCP in a training loop of your own: `python examples/ccp.py`.

A loss against a few proxies a class; when a score on held-out classes stops improving, new proxies are picked among
training images that the old ones cover badly, and training goes on. That takes two calls more than other methods do:
`bind(net)` before the first step, and `boundary(score, pool)` before it and after each evaluation. Of the characters of
an embedded data set, half are unseen to the end; of the others every fifth decides when to pick, the rest train.
"""

import argparse

import torch
from torch import Tensor, nn

import proxymetric as pm

DIM, CLASSES, EACH = 64, 8, 4  # a batch is 8 classes x 4 images


def network() -> nn.Module:
    layers: list[nn.Module] = []
    for channels, features in ((1, 24), (24, 48), (48, 96)):
        layers += [nn.Conv2d(channels, features, 3, 2, 1, bias=False), nn.BatchNorm2d(features), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(96 * 4 * 4, DIM))


def three_parts(name: str) -> list[tuple[Tensor, Tensor]]:
    """Images (N, 1, 32, 32) in [-1, 1] and labels 0, 1, ... to train on, to validate on, and of unseen classes."""
    data = pm.open_data(name)
    seen = [c for c in range(len(data.classes)) if c not in data.test_classes]
    held_out = seen[::5]
    classes = ([c for c in seen if c not in held_out], held_out, data.test_classes)
    parts = [data.of_classes(some) for some in classes]
    return [(torch.tensor(p.arrays)[:, None] / 127.5 - 1, torch.tensor(p.labels)) for p in parts]


@torch.no_grad()
def embed(net: nn.Module, images: Tensor) -> Tensor:
    net.eval()
    return net(images)


def score(net: nn.Module, images: Tensor, labels: Tensor) -> float:
    return pm.evaluate(embed(net, images), labels, "MAP@R")["MAP@R"]


def train(
    net: nn.Module, images: Tensor, labels: Tensor, held_out: tuple[Tensor, Tensor], epochs: int, patience: int
) -> None:
    members = [torch.nonzero(labels == c)[:, 0] for c in labels.unique()]
    base = {"method": "margin-contrastive", "margin": 0.5}  # any pair or proxy loss
    criterion = pm.method("ccp", classes=len(members), dim=DIM, base=base, per_class=4, pool=8, patience=patience)
    criterion.bind(net)
    groups = [{"params": net.parameters(), "lr": 1e-3}, *criterion.param_groups(lr=1e-3)]
    optimizer = torch.optim.Adam(groups, weight_decay=1e-4)

    def drawn(count: int, classes: Tensor) -> Tensor:
        return torch.cat([members[c][torch.randperm(len(members[c]))[:count]] for c in classes])

    def pool(count: int) -> tuple[Tensor, Tensor]:
        """`count` random training images of each class, by the network as it is: asked for only when picking."""
        rows = drawn(count, torch.arange(len(members)))
        return embed(net, images[rows]), labels[rows]

    criterion.boundary(score(net, *held_out), pool)  # the first proxies
    for epoch in range(epochs):
        net.train()
        for _ in range(len(images) // (CLASSES * EACH)):
            rows = drawn(EACH, torch.randperm(len(members))[:CLASSES])
            loss = criterion(net(images[rows]), labels[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            criterion.commit()
        value = score(net, *held_out)
        criterion.boundary(value, pool)  # perhaps the next problem begins
        problem = criterion.figures()["problem"]
        print(f"epoch {epoch + 1:2d}  last loss {loss.item():.3f}  held out {value:.3f}  problem {problem:.0f}")


def main() -> None:
    parser = argparse.ArgumentParser(description="CCP in a plain PyTorch loop, scored on unseen classes.")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--patience", type=int, default=2, help="epochs without a better score that end a problem")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.manual_seed(arguments.seed)
    (images, labels), held_out, unseen = three_parts("glyphs:60")
    net = network()
    before = score(net, *unseen)
    train(net, images, labels, held_out, arguments.epochs, arguments.patience)
    print(f"MAP@R on unseen classes: {before:.3f} before, {score(net, *unseen):.3f} after")


if __name__ == "__main__":
    main()
