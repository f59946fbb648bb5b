"""Kernels of chips with mma.sync, in Gluon."""
