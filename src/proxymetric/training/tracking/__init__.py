"""Trackers: programs that show the curves of a run while it trains, chosen by `train.track`."""

from proxymetric.training.tracking.recorder import Recorder
from proxymetric.training.tracking.tracker import TRACKERS, Tracker

__all__ = ["TRACKERS", "Recorder", "Tracker"]
