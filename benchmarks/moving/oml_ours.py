"""ArcFace with proxymetric."""

import torch
from torch.utils.data import DataLoader, TensorDataset

import proxymetric as pm


def train(net, images, labels, classes, epochs):
    criterion = pm.method("arcface", classes=classes, dim=128, margin=0.2, scale=16, init="xavier")
    groups = [{"params": net.parameters(), "lr": 1e-3}, *criterion.param_groups(lr=1e-2)]
    optimizer = torch.optim.AdamW(groups)
    loader = DataLoader(TensorDataset(images, labels), batch_size=64, shuffle=True, drop_last=True)
    curve = []
    for _ in range(epochs):
        for batch, classes_of_batch in loader:
            loss = criterion(net(batch), classes_of_batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            criterion.commit(optimizer)
            curve.append(loss.item())
    return curve


@torch.no_grad()
def measure(net, images, labels):
    return pm.evaluate(net(images), labels, ["R@1", "P@5"])
