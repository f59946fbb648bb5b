"""Device code in Gluon."""
