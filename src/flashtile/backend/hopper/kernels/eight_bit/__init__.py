"""The forward kernel of queries, keys and values of 8 bits."""
