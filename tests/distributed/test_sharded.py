"""Sharded calls over gloo give the results of one device."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch.distributed

WORKER = Path(__file__).with_name("worlds.py")
WORLD, LIMIT = 4, 120  # processes, seconds


@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="PyTorch without gloo")
def test_worlds_of_two_to_four_ranks(tmp_path: Path) -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    logs = [tmp_path / f"rank{rank}" for rank in range(WORLD)]
    started = []
    try:
        for rank, log in enumerate(logs):
            command = [sys.executable, str(WORKER), str(rank), str(tmp_path / "store")]
            with log.open("w") as file:
                started.append(subprocess.Popen(command, stdout=file, stderr=file, env=environment))
        end = time.monotonic() + LIMIT
        while any(p.poll() is None for p in started) and time.monotonic() < end:
            if any(p.poll() for p in started):  # the others would wait for it
                break
            time.sleep(0.05)
        codes = [p.poll() for p in started]
    finally:
        for p in started:
            p.kill()
            p.wait()
    assert codes == [0] * WORLD, "\n".join(f"rank {n}:\n{log.read_text()[-3000:]}" for n, log in enumerate(logs))
