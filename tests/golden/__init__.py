"""What a short run of every method ended with, as it was before the tree was laid out anew."""
