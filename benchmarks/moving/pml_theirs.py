"""Proxy-Anchor with pytorch-metric-learning."""

import torch
from pytorch_metric_learning import losses
from pytorch_metric_learning.utils.accuracy_calculator import AccuracyCalculator
from torch.utils.data import DataLoader, TensorDataset


def train(net, images, labels, classes, epochs):
    criterion = losses.ProxyAnchorLoss(num_classes=classes, embedding_size=128, margin=0.1, alpha=32)
    groups = [{"params": net.parameters(), "lr": 1e-3}, {"params": criterion.parameters(), "lr": 1e-1}]
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
    calculator = AccuracyCalculator(include=("precision_at_1", "mean_average_precision_at_r"), k="max_bin_count")
    vectors = torch.nn.functional.normalize(net(images))
    scores = calculator.get_accuracy(vectors, labels)
    return {"R@1": scores["precision_at_1"], "MAP@R": scores["mean_average_precision_at_r"]}
