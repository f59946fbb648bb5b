"""The public functions, and how their arguments become a call."""
