"""The forward kernel of queries, keys and values in float8_e4m3fn."""
