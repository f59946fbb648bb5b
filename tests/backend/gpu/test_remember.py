"""Bounded dictionaries under threads."""

import sys
import threading
from concurrent.futures import ThreadPoolExecutor

from flashtile.remember import remember

THREADS, ENTRIES, MOST = 4, 20_000, 8


def test_entries_from_several_threads_stay_bounded() -> None:
    known: dict[tuple[int, int], int] = {}
    start = threading.Barrier(THREADS)
    largest = []

    def fill(thread: int) -> None:
        start.wait()
        for n in range(ENTRIES):
            assert remember(known, (thread, n), n, MOST) == n
            largest.append(len(known))

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # threads meet inside `remember`, which they would do once a day otherwise
    try:
        with ThreadPoolExecutor(THREADS) as pool:
            for done in [pool.submit(fill, thread) for thread in range(THREADS)]:
                done.result()
    finally:
        sys.setswitchinterval(interval)
    assert max(largest) <= MOST + THREADS
    remember(known, "last", 0, MOST)
    assert len(known) == MOST
    assert list(known)[-1] == "last"
