"""The exact search behind the metrics: nearest neighbours whose ranks are those of exact arithmetic."""
