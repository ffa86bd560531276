"""The tensors at the end of a short run of every method, from before the packages were rearranged."""
