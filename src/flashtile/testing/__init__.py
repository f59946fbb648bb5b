"""Random cases, the fp64 oracle that solves them, and the tolerances of a backend's results.

Import from the modules: `case`, `generate`, `oracle`, `tolerance`; `draw`, `generate_cache`, `pages`, `inputs`,
`layouts`, `score_functions` and `poison` are their parts and aids.
"""
