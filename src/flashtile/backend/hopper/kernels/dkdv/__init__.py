"""The kernel for dk and dv of wide heads."""
