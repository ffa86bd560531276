"""Runs: from a recipe to a folder with a model, its scores and a report."""
