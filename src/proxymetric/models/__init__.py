"""Trained models: load one, embed images with it, export it."""
