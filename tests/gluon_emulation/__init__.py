"""Emulation of Gluon on Hopper: kernels run as plain Python, with one thread for each partition of each program.

`values` and `language` implement Gluon's values and functions on CPU tensors. `machine` runs the partitions in random
order, one at a time, next to asynchronous TMA operations that complete later. `hopper` implements mbarriers, TMA and
wgmma. `backend` substitutes all of them for Triton while the kernels are imported.

The emulation detects wrong positions, masks, barrier phases, deadlocks, stages released too early, results read too
early and missing fences. It knows nothing of layouts and speed.
"""
