"""The command `flashtile-ladder`: all steps measured, and the stored runs that the pages are made of."""
