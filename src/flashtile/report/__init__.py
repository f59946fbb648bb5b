"""The report: correctness, speed, memory and error on this machine, on one self-contained page.

`settings` has the amount of measurements, `cells` the calls; `training` makes the inputs. `gate`, `speed`, `memory`,
`errors` and `planner` each measure one thing and make a `section` of it. `verdict` has the rule for better and worse,
`overview` puts all comparisons on the first screen, `gather` runs everything in order, `plots` draws, `page` writes.
"""
