"""The forward kernel of heads above 256 features."""
