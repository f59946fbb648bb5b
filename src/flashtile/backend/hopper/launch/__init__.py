"""Host code that prepares the arguments of Hopper's kernels and launches them."""

KERNELS = __name__.removesuffix("launch") + "kernels"  # the package of device code
