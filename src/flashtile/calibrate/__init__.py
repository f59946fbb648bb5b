"""Measured times of the ways to run calls, and the rates that are fitted to them (`flashtile calibrate`)."""
