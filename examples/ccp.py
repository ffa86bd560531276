"""CCP in your own training loop: `python examples/ccp.py`.

CCP compares a batch with a few proxies of each class. When the score on held-out classes stops improving, it picks new
proxies among training images that the old proxies cover badly, and training continues. CCP needs two more calls than
other methods: `bind(net)` before the first step, and `boundary(score, pool)` before the first step and after each
evaluation. The data are drawn characters: half of them are never seen in training, every fifth of the others is held
out and decides when to pick, and the rest is trained on.
"""

import argparse

import torch
from torch import Tensor, nn

import proxymetric as pm

DIM = 64
CLASSES, IMAGES_PER_CLASS = 8, 4
"""in a batch"""


def network() -> nn.Module:
    layers: list[nn.Module] = []
    for channels, features in ((1, 24), (24, 48), (48, 96)):
        layers += [nn.Conv2d(channels, features, 3, 2, 1, bias=False), nn.BatchNorm2d(features), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(96 * 4 * 4, DIM))


def three_parts(name: str) -> list[tuple[Tensor, Tensor]]:
    """Images (N, 1, 32, 32) in [-1, 1] and labels of the training classes, the held-out classes, the unseen classes."""
    data = pm.open_data(name)
    seen = [c for c in range(len(data.classes)) if c not in data.test_classes]
    held_out = seen[::5]
    classes = ([c for c in seen if c not in held_out], held_out, data.test_classes)
    parts = [data.of_classes(group) for group in classes]
    return [(torch.tensor(part.arrays)[:, None] / 127.5 - 1, torch.tensor(part.labels)) for part in parts]


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

    def draw(count: int, classes: Tensor) -> Tensor:
        """Rows of `count` random images of each class."""
        return torch.cat([members[c][torch.randperm(len(members[c]))[:count]] for c in classes])

    def pool(count: int) -> tuple[Tensor, Tensor]:
        """Embeddings and labels of `count` random training images of each class; called only when CCP picks proxies."""
        rows = draw(count, torch.arange(len(members)))
        return embed(net, images[rows]), labels[rows]

    criterion.boundary(score(net, *held_out), pool)  # the first proxies
    for epoch in range(epochs):
        net.train()
        for _ in range(len(images) // (CLASSES * IMAGES_PER_CLASS)):
            rows = draw(IMAGES_PER_CLASS, torch.randperm(len(members))[:CLASSES])
            optimizer.zero_grad()
            loss = criterion(net(images[rows]), labels[rows])
            loss.backward()
            optimizer.step()
            criterion.commit()
        value = score(net, *held_out)
        criterion.boundary(value, pool)  # CCP may start its next problem here
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
