"""Tests over versions of Python, PyTorch and Triton: `PYTHONPATH=src:tests python -m matrix`."""
