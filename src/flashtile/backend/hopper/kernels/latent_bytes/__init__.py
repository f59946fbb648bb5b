"""The forward kernel of latent rows of 8 bits, for few query rows."""
