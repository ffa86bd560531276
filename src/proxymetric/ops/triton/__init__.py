"""The reductions with Triton kernels, for NVIDIA GPUs."""
