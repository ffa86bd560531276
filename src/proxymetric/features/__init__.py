"""Features of frozen backbones that are computed once and kept."""
