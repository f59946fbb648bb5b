"""Streams, by which launches share semaphores: launches of one stream run one after another."""

from ...private_torch import current_device, current_raw_stream

MAX_STREAMS = 256  # for which a cache has an entry

StreamKey = tuple[int, int]  # device and stream


def current_stream_key() -> StreamKey:
    index = current_device()
    return index, current_raw_stream(index)
