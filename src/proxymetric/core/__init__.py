"""The pieces that everything is made of: losses, sources, weightings and objectives, and what they hand each other."""
