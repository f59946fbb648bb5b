"""Two GPUs over NCCL: results of one, captured graphs, and faults, which end each process with a message."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

WORKER = Path(__file__).with_name("nccl.py")
LIMIT = 240  # seconds for all scenarios of a test, which run at once
FAULTS = {  # what the rank at fault says
    "raises_in_forward": "accepted: False, True",
    "raises_in_backward": "on purpose",
    "ends": "",
    "too_late": "",
}
LOST = re.compile("ExchangeError|[Ww]atchdog|NCCL")  # what the other one says


def run(scenarios: list[str], folder: Path) -> dict[str, list[tuple[int | None, str]]]:
    """Exit codes and words of both ranks; no code for one that had to be ended."""
    # PyTorch would collect what all ranks have done before it ends a process whose exchange has failed.
    settings = {"TORCH_NCCL_DUMP_ON_TIMEOUT": "0", "TORCH_NCCL_ENABLE_MONITORING": "0"}
    processes = []
    for scenario in scenarios:
        for rank in range(2):
            log = folder / f"{scenario}-{rank}"
            command = [sys.executable, str(WORKER), scenario, str(rank), str(folder / f"{scenario}-store")]
            with log.open("w") as file:
                process = subprocess.Popen(
                    command, stdout=file, stderr=file, env=os.environ | settings, start_new_session=True
                )
            processes.append((scenario, process, log))
    found: dict[str, list[tuple[int | None, str]]] = {scenario: [] for scenario in scenarios}
    try:
        for scenario, process, log in processes:
            try:
                code: int | None = process.wait(LIMIT)
            except subprocess.TimeoutExpired:
                code = None
            found[scenario].append((code, log.read_text()[-8000:]))
    finally:
        for _, process, _ in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    return found


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("scenario", ["results", "packed", "graph", "compiled", "decoding", "sharded_weights"])
def test_two_gpus(scenario: str, tmp_path: Path) -> None:
    for code, words in run([scenario], tmp_path)[scenario]:
        assert code == 0, words


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_faults_end_both_ranks(tmp_path: Path) -> None:
    """A rank that raises, ends or comes too late ends the other one, too."""
    for scenario, ((first, lost), (second, words)) in run(list(FAULTS), tmp_path).items():
        assert first is not None, f"{scenario}: rank 0 hangs: {lost}"
        assert second is not None, f"{scenario}: rank 1 hangs: {words}"
        assert first != 0, (scenario, lost)
        assert LOST.search(lost), (scenario, lost)
        assert FAULTS[scenario] in words, (scenario, words)
