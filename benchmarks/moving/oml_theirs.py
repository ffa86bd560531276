"""ArcFace with open-metric-learning."""

import torch
from oml.functional.metrics import calc_retrieval_metrics
from oml.losses.arcface import ArcFaceLoss
from torch.utils.data import DataLoader, TensorDataset


def train(net, images, labels, classes, epochs):
    criterion = ArcFaceLoss(in_features=128, num_classes=classes, m=0.2, s=16)
    groups = [{"params": net.parameters(), "lr": 1e-3}, {"params": criterion.parameters(), "lr": 1e-2}]
    optimizer = torch.optim.AdamW(groups)
    loader = DataLoader(TensorDataset(images, labels), batch_size=64, shuffle=True, drop_last=True)
    curve = []
    for _ in range(epochs):
        for batch, classes_of_batch in loader:
            loss = criterion(net(batch), classes_of_batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            curve.append(loss.item())
    return curve


@torch.no_grad()
def measure(net, images, labels):
    vectors = torch.nn.functional.normalize(net(images))
    found = torch.cdist(vectors, vectors).fill_diagonal_(float("inf")).argsort(1)[:, :-1]
    same = (labels[:, None] == labels).fill_diagonal_(False)
    truth = [row.nonzero().flatten() for row in same]
    scores = calc_retrieval_metrics(tuple(found), truth, cmc_top_k=(1,), precision_top_k=(5,), map_top_k=(5,))
    return {"R@1": float(scores["cmc"][1]), "P@5": float(scores["precision"][5])}
