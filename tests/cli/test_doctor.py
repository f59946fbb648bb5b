"""`flashtile doctor`: what it finds on a sound machine and on broken ones, and the backends of a model."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import Result, invoke

from flashtile.backend.gpu import archive
from flashtile.backend.tiled import forward
from flashtile.call.device import Device
from flashtile.cli import doctor
from flashtile.dispatch import fast_path


def run(*words: str) -> Result:
    return invoke(["doctor", *words])


def found(check: Any) -> dict[str, doctor.Finding]:
    return {finding.check: finding for finding in doctor.attempted(check)}


def test_a_sound_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FLASHTILE_CACHE_DIR", str(tmp_path))
    result = run("--json")
    told = json.loads(result.stdout)
    assert (result.exit_code, told["broken"]) == (0, False)
    states = {finding["check"]: finding["state"] for finding in told["findings"]}
    assert {"device", "Triton", "kernels", "cache", "backend tiled", "backend cpu", "a plain call"} <= states.keys()
    assert set(states.values()) == {"ok"}


def test_kernels_that_are_compiled_at_first_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHTILE_KERNELS", "none")
    monkeypatch.setattr(archive, "_archives", {})
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(doctor, "describe_device", lambda _: Device("cuda", "a chip", "sm_90", 132))
    (finding,) = doctor.kernels()
    assert (finding.state, finding.words) == ("ok", "sm_90: compiled by Triton when a call first needs them")
    assert "flashtile prepare" in finding.advice


def test_wrong_results_are_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    right = forward.update

    def wrong(*arguments: Any) -> Any:
        state = right(*arguments)
        return state._replace(acc=state.acc * 0.5)

    monkeypatch.setattr(forward, "update", wrong)
    monkeypatch.setattr(doctor, "CHECKS", (doctor.calls,))
    fast_path.forget()
    result = run()
    fast_path.forget()
    assert result.exit_code == 1
    (line,) = (line for line in result.stdout.splitlines() if line.startswith("BROKEN"))
    assert line.startswith("BROKEN   backend tiled: its results are off by")
    assert result.stdout.endswith("something is broken\n")


def test_an_invalid_setting_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHTILE_BACKEND", "none")
    finding = doctor.called("auto")
    assert finding.state == doctor.BROKEN
    assert "none" in finding.words


@pytest.mark.parametrize(("build", "advice"), [(None, "install a CUDA build"), ("12.8", "run `nvidia-smi`")])
def test_a_gpu_that_pytorch_cannot_use(
    build: str | None, advice: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "nvidiactl").touch()
    monkeypatch.setattr(doctor, "NVIDIA", tmp_path / "nvidiactl")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.version, "cuda", build)
    monkeypatch.setattr(torch.version, "hip", None)
    (finding,) = doctor.attempted(doctor.device)
    assert finding.state == doctor.BROKEN
    assert advice in finding.advice


def test_a_gpu_without_triton_or_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """And a driver that says nothing is a finding, not a traceback."""

    def silent() -> str:
        raise FileNotFoundError("nvidia-smi")

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(doctor, "describe_device", lambda device: Device("cuda", "H100", "sm_90", 132))
    monkeypatch.setattr(doctor, "triton_version", lambda: None)
    monkeypatch.setattr(doctor, "gpu_driver", silent)
    assert "pip install triton" in found(doctor.triton)["Triton"].advice
    devices = found(doctor.device)
    assert devices["device"].state == doctor.OK
    assert "FileNotFoundError" in devices["the check of device"].words


@pytest.mark.parametrize("variable", ["FLASHTILE_KERNELS", "FLASHTILE_CPU_KERNELS"])
def test_kernels_that_are_not_there(variable: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(variable, str(tmp_path / "none.zip"))
    finding = found(doctor.kernels)["kernels"]
    assert finding.state == doctor.BROKEN
    assert f"unset {variable}" in finding.advice


def test_a_cache_that_is_not_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("FLASHTILE_CACHE_DIR", str(tmp_path / "file" / "folder"))
    finding = found(doctor.cache)["cache"]
    assert finding.state == doctor.WARNING
    assert "FLASHTILE_CACHE_DIR" in finding.advice


# Models ---------------------------------------------------------------------------------------------------------------


def saved(name: str, folder: Path, **settings: Any) -> str:
    """A configuration of transformers in a folder."""
    transformers = pytest.importorskip("transformers", reason="needs the extra `transformers`")
    transformers.CONFIG_MAPPING[name](**settings).save_pretrained(folder)
    return str(folder)


def test_the_backends_of_a_model(tmp_path: Path) -> None:
    path = saved("gemma2", tmp_path, num_attention_heads=4, num_key_value_heads=2, head_dim=32, sliding_window=64)
    result = run("--model", path)
    assert result.exit_code == 0, result.output
    assert "gemma2, 4 heads over 2 of 32" in result.stdout
    for kind in ("full attention", "window of 64"):
        for words in ("prompt of 2048 tokens", "one token after 2048"):
            assert f"{kind}, {words}: backend " in result.stdout
    assert "backward" in result.stdout


def test_a_model_with_code_of_its_own(tmp_path: Path) -> None:
    result = run("--model", saved("bloom", tmp_path))
    assert "takes no attention functions" in result.stdout.replace("its classes take", "takes")


def test_a_model_that_is_not_there(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="needs the extra `transformers`")
    result = run("--model", str(tmp_path))
    assert result.exit_code == 1
    assert result.stderr.startswith("Error: --model")
