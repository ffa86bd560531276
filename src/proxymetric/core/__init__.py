"""The pieces that every method is made of: losses, sources, weightings and objectives, and the data they exchange."""
