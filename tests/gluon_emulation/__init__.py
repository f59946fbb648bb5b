"""Emulation of Gluon: kernels run as plain Python, with one thread for each partition of each program.

`values` and `language` implement Gluon's values and functions on CPU tensors. `machine` runs the partitions in random
order, one at a time, next to asynchronous TMA operations that complete later. `hopper` implements mbarriers, TMA and
wgmma, `ampere` copies to shared memory and mma.sync. `package` substitutes all of them for Triton while a backend's
kernels are imported: `backend` those of Hopper, `mma_backend` those of chips with mma.sync.

The emulation detects wrong positions, masks, barrier phases, deadlocks, stages released too early, results read too
early and missing fences. It knows nothing of layouts and speed.
"""
