"""Skip this folder when you learn: checks, compilers, launches and printing around the steps."""
