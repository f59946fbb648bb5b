"""The forward kernel of latent rows, whose first columns are the values."""
