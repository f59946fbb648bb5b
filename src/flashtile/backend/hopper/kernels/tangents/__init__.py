"""The kernel of forward mode, which follows the forward kernel."""
