"""Work, bytes and rates: what an attention call costs at least."""
