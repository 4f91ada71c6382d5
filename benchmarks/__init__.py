"""Measurements of this package on the machine at hand, and of its kernels on machines that are not."""
