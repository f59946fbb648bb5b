"""Clocks of devices: one file for the CPU, one for CUDA, one interface."""

import torch

from .clock import Clock, Run

__all__ = ["Clock", "Run", "clock_of"]


def clock_of(device: torch.device) -> Clock:
    if device.type == "cuda":
        from .cuda import CudaClock

        return CudaClock(device)
    from .cpu import CpuClock

    return CpuClock(device)
