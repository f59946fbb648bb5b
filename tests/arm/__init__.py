"""The CPU kernels on an emulated ARM processor: `PYTHONPATH=src:tests python -m arm`.

Needs qemu-user and a cross compiler (Debian: `qemu-user-static gcc-aarch64-linux-gnu libc6-dev-arm64-cross`).
"""
