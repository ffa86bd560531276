"""What a user typed: checks with the nearest right name, registries, own code, keys of a recipe."""
