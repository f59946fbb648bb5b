"""The report: what this machine computes, how fast, in how much memory and how exactly, on one self-contained page.

`settings` says how much is measured, `training` makes the inputs, each of `gate`, `speed`, `memory`, `errors` and
`planner` measures one thing and turns it into a `section`, `gather` runs them in order, `plots` draws, `page` writes.
"""
