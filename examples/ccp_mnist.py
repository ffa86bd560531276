"""Draw the effect of alternating projections: `python examples/ccp_mnist.py --data MNIST --out FOLDER`.

This is the proof of concept of the CCP paper (Gürbüz et al. 2023, Sec. V-B, Fig. 2): digits in a plane, 4 proxies for
each class, picked from a pool of 16. The panel "before" shows the end of the first proxy problem. Four projections
follow; each is a problem with newly picked proxies. The last panel is a control that the paper does not have: the first
problem, trained for as many more steps as the four projections took. The script writes ccp-mnist.png and ccp-mnist.json
into FOLDER.

As in the paper, all ten digits are trained on, and the scores are of other images of these digits. The example does not
measure unseen classes (examples/ccp.py does). There are three sets of images: one is trained on; MAP@R of the second
decides when a problem has converged; covering radius, MAP@R and the dots are of the third, the test images. The paper
names no margin and no learning rates for MNIST. Here the margin is 0.8, with which ten classes fill the disc (with 0.38
they overlap). The learning rate is the same for all parameters, but the proxies get a tenth of it after the first
problem; otherwise the proxies of a class would coincide again in every problem.

MNIST takes 3 minutes on one core. Without --data, the example uses the small digits of scikit-learn.
"""

import argparse
import copy
import sys
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

import proxymetric as pm
from proxymetric.data import ImageSet
from proxymetric.metrics import covering_radius, inter_class_distance
from proxymetric.plots.ccp_stages import CcpStage, draw_ccp_stages
from proxymetric.system.files import write_json

PER_CLASS, POOL, DIM = 4, 16, 2


class Images(NamedTuple):
    pixels: Tensor
    labels: Tensor


class Block(nn.Module):
    """BatchNorm and ReLU before each convolution, as in ResNetV2."""

    def __init__(self, channels: int, features: int, stride: int) -> None:
        super().__init__()
        self.before = nn.Sequential(nn.BatchNorm2d(channels), nn.ReLU())
        self.path = nn.Sequential(
            nn.Conv2d(channels, features, 3, stride, 1, bias=False),
            nn.BatchNorm2d(features),
            nn.ReLU(),
            nn.Conv2d(features, features, 3, 1, 1, bias=False),
        )
        self.skip = nn.Conv2d(channels, features, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        return self.skip(x) + self.path(x)


def network() -> nn.Module:
    """ResNetV2 of three blocks, where the paper has nine."""
    blocks = (nn.Conv2d(1, 16, 3, 2, 1, bias=False), Block(16, 16, 1), Block(16, 32, 2), Block(32, 64, 2))
    return nn.Sequential(
        *blocks, nn.BatchNorm2d(64), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, DIM)
    )


def three_parts(data: str, count: int, held_out: int) -> dict[str, Images]:
    """`count` training images, `held_out` other training images to validate on, and `held_out` test images."""
    images = pm.open_data(data)
    test = images.test_images
    if test is None and data == "digits":
        test = np.random.default_rng(0).random(len(images)) < 1 / 3
    if test is None or len(images.classes) != 10:
        raise ValueError(f"--data: got {data}, which opens as {images.name}, expected a folder with MNIST's files")
    rows, test_rows = (np.random.default_rng(0).permutation(np.flatnonzero(mask)) for mask in (~test, test))
    held_out = min(held_out, len(rows) // 3)
    parts = {"train": rows[held_out:][:count], "validation": rows[:held_out], "test": test_rows[:held_out]}
    return {name: _read(images.subset(part)) for name, part in parts.items()}


def _read(images: ImageSet) -> Images:
    levels = np.stack([np.asarray(images.read(i).convert("L")) for i in range(len(images))])
    return Images(torch.from_numpy(levels)[:, None].float() / 127.5 - 1, torch.from_numpy(images.labels))


class Training:
    """Network, criterion and optimiser, which a control run copies as one."""

    def __init__(self, data: Images, lr: float, margin: float, patience: int) -> None:
        self.data = data
        self.classes = int(data.labels.max()) + 1
        self.members = [torch.nonzero(data.labels == c)[:, 0] for c in range(self.classes)]
        self.net = network()
        self.criterion = pm.method(
            "ccp", classes=self.classes, dim=DIM, per_class=PER_CLASS, pool=POOL, patience=patience,
            base={"method": "margin-contrastive", "margin": margin},
        )  # fmt: skip
        self.criterion.bind(self.net)
        (group,) = self.criterion.param_groups(lr)
        (self.proxies,) = group["params"]
        self.optimizer = torch.optim.Adam([{"params": self.net.parameters()}, group], lr, weight_decay=1e-4)

    def slow_proxies(self, factor: float) -> None:
        self.optimizer.param_groups[1]["lr"] *= factor

    def steps(self, count: int) -> None:
        """`count` batches of 8 classes x 4 images."""
        self.net.train()
        for _ in range(count):
            members = [self.members[c] for c in torch.randperm(self.classes)[:8]]
            rows = torch.cat([images[torch.randint(len(images), (4,))] for images in members])
            self.optimizer.zero_grad()
            loss = self.criterion(self.net(self.data.pixels[rows]), self.data.labels[rows])
            loss.backward()
            self.optimizer.step()
            self.criterion.commit()

    @torch.no_grad()
    def embed(self, pixels: Tensor) -> Tensor:
        self.net.eval()
        return torch.cat([self.net(part) for part in pixels.split(500)])

    def pool(self, count: int) -> tuple[Tensor, Tensor]:
        """Embeddings and labels of `count` random training images of each class; new proxies are picked from them."""
        rows = torch.cat([images[torch.randperm(len(images))[:count]] for images in self.members])
        return self.embed(self.data.pixels[rows]), self.data.labels[rows]

    def score(self, images: Images) -> float:
        points = self.criterion.normalised(self.embed(images.pixels))
        return pm.evaluate(points, images.labels, "MAP@R", distance="euclidean")["MAP@R"]

    def plane(self, proxies: Tensor) -> np.ndarray:
        """Normalised proxies (C, K, 2)."""
        return self.criterion.normalised(proxies).view(self.classes, PER_CLASS, DIM).numpy()

    def stage(self, title: str, test: Images, converged: Tensor, picked: Tensor | None) -> CcpStage:
        """A panel of the picture: test images and proxies at this step."""
        points = self.criterion.normalised(self.embed(test.pixels))
        radius = covering_radius(points, test.labels, distance="euclidean")
        picks = None if picked is None else self.plane(picked)
        return CcpStage(
            title, points.numpy(), test.labels.numpy(), self.plane(converged), picks, radius, self.score(test)
        )


def alternate(
    training: Training, validation: Images, test: Images, projections: int, every: int, slower: float
) -> tuple[list[CcpStage], list[dict[str, object]]]:
    """Train until the first problem and `projections` more have converged, then train the control; record each."""
    criterion, stages, rows = training.criterion, list[CcpStage](), list[dict[str, object]]()
    criterion.boundary(score=training.score(validation), pool=training.pool)  # the first proxies are picked here
    control = training

    def record(title: str, side: Training, converged: Tensor, picked: Tensor | None) -> None:
        stage = side.stage(title, test, converged, picked)
        proxies = torch.from_numpy(stage.proxies)
        row = {
            "stage": title,
            "step": side.criterion.step,
            "covering_radius": stage.radius,
            "MAP@R": stage.score,
            "inter_class_distance": inter_class_distance(stage.points, stage.labels, distance="euclidean"),
            "proxies_to_their_mean": float((proxies - proxies.mean(1, keepdim=True)).norm(dim=2).mean()),
        }
        stages.append(stage)
        rows.append({name: round(value, 5) if isinstance(value, float) else value for name, value in row.items()})
        print(", ".join(f"{name} {value}" for name, value in rows[-1].items()), flush=True)

    while len(stages) <= projections:
        training.steps(every)
        if not stages:
            control = copy.deepcopy(training, {id(training.data): training.data})  # the images stay shared
        problem, converged = criterion.figures()["problem"], training.proxies.detach().clone()
        criterion.boundary(score=training.score(validation), pool=training.pool)
        if criterion.figures()["problem"] > problem:
            if not stages:
                training.slow_proxies(slower)
                control.slow_proxies(slower)
            title = f"projection {len(stages)}" if stages else "before: one problem"
            record(title, training, converged, training.proxies.detach().clone())
    # Without a boundary there is no projection: the control keeps the loss and the proxies of the first problem.
    control.steps(criterion.step - control.criterion.step)
    record("control: no projections", control, control.proxies.detach(), None)
    return stages, rows


def main() -> None:
    parser = argparse.ArgumentParser(description="CCP's alternating projections on MNIST in a plane, drawn.")
    parser.add_argument("--data", default="digits", help="a folder with MNIST's files; default: scikit-learn's digits")
    parser.add_argument("--out", type=Path, default=Path("runs/ccp-mnist"), help="folder for the picture and the JSON")
    parser.add_argument("--images", type=int, default=12_000, help="training images")
    parser.add_argument("--held-out", type=int, default=2_000, help="images to validate on, and as many test images")
    parser.add_argument("--projections", type=int, default=4)
    parser.add_argument("--every", type=int, default=100, help="steps from one evaluation to the next")
    parser.add_argument("--patience", type=int, default=3, help="evaluations without a better score that end a problem")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument(
        "--slower", type=float, default=0.1, help="factor of the learning rate of the proxies after the first problem"
    )
    parser.add_argument("--margin", type=float, default=0.8)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.manual_seed(arguments.seed)
    try:
        images = three_parts(arguments.data, arguments.images, arguments.held_out)
    except ValueError as error:
        sys.exit(str(error))
    start = time.time()
    training = Training(images["train"], arguments.lr, arguments.margin, arguments.patience)
    stages, rows = alternate(
        training, images["validation"], images["test"], arguments.projections, arguments.every, arguments.slower
    )
    draw_ccp_stages(arguments.out / "ccp-mnist.png", stages)
    content = {
        "what": "CCP in 2-D. Covering radius (Euclidean, of normalised embeddings) and MAP@R are of test images.",
        "data": "digits" if arguments.data == "digits" else "mnist",
        "images": {name: len(part.labels) for name, part in images.items()},
        "settings": {name: value for name, value in vars(arguments).items() if name not in ("data", "out")},
        "torch": torch.__version__,
        "seconds": round(time.time() - start),
        "stages": rows,
    }
    write_json(arguments.out / "ccp-mnist.json", content)


if __name__ == "__main__":
    main()
