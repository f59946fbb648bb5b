"""The report: what this machine computes, how fast, in how much memory and how exactly, on one self-contained page.

`settings` says how much is measured and `cells` which calls, `training` makes the inputs, each of `gate`, `speed`,
`memory`, `errors` and `planner` measures one thing and turns it into a `section`, `verdict` has the rule for better and
worse, `overview` puts all comparisons on the first screen, `gather` runs everything in order, `plots` draws, `page`
writes.
"""
