"""Sharded calls over gloo give the results of one device."""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed

WORKER = Path(__file__).with_name("worlds.py")
LIMIT = 150  # seconds
# Without a name, calls take a backend that compiles nothing: each rank would compile the same kernels at the same time.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "FLASHTILE_BACKEND": "tiled"}


@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="PyTorch without gloo")
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_worlds_of_two_to_eight_ranks(tmp_path: Path) -> None:
    """Random pairs of features over worlds of 2, 3, 4 and 8 ranks, in each scheme and layout, and what is refused."""
    log = tmp_path / "log"
    with log.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, str(WORKER), str(tmp_path / "store")],
            stdout=file, stderr=file, env=os.environ | ENVIRONMENT, start_new_session=True,
        )  # fmt: skip
        try:
            code = process.wait(LIMIT)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            with contextlib.suppress(ProcessLookupError):  # all have ended
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    assert code == 0, log.read_text()[-8000:]
