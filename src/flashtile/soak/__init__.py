"""Random calls for any time, from several threads, in memory that has to stay flat.

`run` has the rounds, `calls` the work of one thread, `mistakes` the calls that have to be refused. `graphs` and
`exhaustion` are for GPUs: captured graphs, and memory that runs out. `memory` tells a leak from a cache.
"""
