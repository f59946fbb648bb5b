"""The kernel for dq of wide heads."""
