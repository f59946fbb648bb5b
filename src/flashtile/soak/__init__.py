"""Random calls for as long as one likes, from several threads, in memory that has to stay flat.

`run` goes from round to round; `calls` is what a thread does, `mistakes` are calls that have to be refused, `graphs`
and `exhaustion` are for GPUs: captured graphs, and memory that runs out; `memory` tells a leak from a cache.
"""
