"""What every part stands on: files, locks, tensors on disk, devices, number types, signals, text."""
