"""The reductions as Triton kernels, for NVIDIA GPUs."""
