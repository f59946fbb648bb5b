"""Hopper's Gluon kernels without a GPU: run as plain Python, one thread for each partition of each program.

`values` and `language` are Gluon's values and functions on CPU tensors; `machine` runs partitions in random order, one
at a time, beside a copy engine whose work happens some time after it was asked for; `hopper` has what the two make of
barriers, copies and products. `backend` puts them in the place of Triton while the kernels are imported.

What is wrong in the logic shows: positions, masks, phases of barriers, waits that go in a circle, a slot that is let go
too early, a result that is read before it is there, a missing fence. Layouts and speed do not.
"""
