"""Step 9's calls of NVIDIA's driver, against functions with the driver's signatures that write down what they get."""

import ctypes
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from flashtile_ladder._host import cpp as step03_cpp
from flashtile_ladder._host import cuda_compile, cuda_launch
from flashtile_ladder._host.cuda_steps import tensor_cores, tensor_cores_of, warps

SOURCE = Path(__file__).parent / "driver.c"
pytestmark = pytest.mark.skipif(step03_cpp.compiler() is None, reason="there is no C++ compiler")


class Record(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int) for name in ("ordinal", "launches")),
        *((name, ctypes.c_int * 3) for name in ("grid", "block")),
        *((name, ctypes.c_int) for name in ("shared", "allowed", "causal", "group")),
        *((name, ctypes.c_void_p) for name in ("stream", "function", "context", "q")),
        ("scale", ctypes.c_float),
        ("name", ctypes.c_char * 64),
        ("code", ctypes.c_char * 4),
    )


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ctypes.CDLL]:
    """The recording driver in the place of libcuda, GPU 1 of capability 9.0 as the current one, and no compiler."""
    library = tmp_path / "driver.so"
    path = step03_cpp.compiler()
    assert path is not None
    subprocess.run([path, "-x", "c", "-fPIC", "-shared", str(SOURCE), "-o", str(library)], check=True)
    loaded = ctypes.CDLL(str(library))
    monkeypatch.setattr(cuda_launch, "driver", lambda: loaded)
    monkeypatch.setattr(cuda_launch, "unavailable", lambda device, dtype=None: None)
    monkeypatch.setattr(cuda_launch, "cubin", lambda source, arch: f"sm{arch}".encode())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda index: SimpleNamespace(cuda_stream=2**40 + index))
    cuda_launch.kernel.cache_clear()
    yield loaded
    cuda_launch.kernel.cache_clear()


def test_a_launch(driver: ctypes.CDLL) -> None:
    q, k, v = torch.randn(2, 6, 33, 16), torch.randn(2, 3, 33, 16), torch.randn(2, 3, 33, 16)
    for launches in (1, 2):
        warps.attention(q, k, v, True, 3)
        record = Record.in_dll(driver, "record")
        assert record.launches == launches
    assert (tuple(record.grid), tuple(record.block)) == ((33, 12, 1), (128, 1, 1))
    assert (record.shared, record.stream) == (0, 2**40 + 1)
    assert (record.group, record.scale, record.causal) == (2, 3.0, 1)
    assert record.q == q.data_ptr()
    assert (record.ordinal, record.context) == (1, 1041), "the primary context of the GPU"
    assert (record.name, record.code) == (b"attention_warps", b"sm90")
    kernel = cuda_launch.kernel(warps.source_for(16), warps.NAME, 1)
    assert record.function == kernel.function.value == 77
    assert (kernel.shared_bytes, kernel.spilled_bytes, kernel.registers) == (7701, 7703, 7704)
    assert cuda_launch.kernel.cache_info().misses == 1


def test_more_than_48_kb_of_shared_memory_are_asked_for(driver: ctypes.CDLL) -> None:
    """The driver's kernels have 7,701 bytes of their own, and its GPU allows a block 227 KB."""
    q = torch.zeros(100, 256, dtype=torch.float16)
    tensor_cores.attention(q[:, :64], q[:, :64], q[:, :64])
    record = Record.in_dll(driver, "record")
    assert (record.shared, record.allowed) == (18 * 1024, 0), "48 KB need no attribute"
    tensor_cores_of(stages=2).attention(q, q, q)
    assert (record.shared, record.allowed) == (2 * 264 * 192, 2 * 264 * 192)
    assert (tuple(record.grid), tuple(record.block)) == ((2, 1, 1), (128, 1, 1))
    with pytest.raises(ValueError, match="311,829 bytes of shared memory, and this GPU allows it 232,448"):
        tensor_cores_of(512).attention(q, q, q)
    assert record.launches == 2


def test_an_error_of_the_driver_is_quoted(driver: ctypes.CDLL) -> None:
    ctypes.c_int.in_dll(driver, "failure").value = 9
    with pytest.raises(RuntimeError, match="CUDA: invalid configuration"):
        warps.attention(*torch.randn(3, 5, 16))


def test_without_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    cuda_launch.driver.cache_clear()
    monkeypatch.setattr(cuda_launch.ctypes, "CDLL", missing)
    with pytest.raises(cuda_compile.CudaUnavailableError, match=r"NVIDIA's driver: libcuda.so.1: cannot open"):
        cuda_launch.driver()


def test_tensors_at_odd_addresses_are_copied(driver: ctypes.CDLL) -> None:
    """`cp.async` takes multiples of 16 bytes; a part of another tensor may begin elsewhere."""
    whole = torch.randn(5 * 16 + 1)
    part = whole[1:].view(5, 16)
    call = cuda_launch.prepare(part, part, part, False, None, head_dims=(16,), dtypes=(torch.float32,))
    assert call.q.data_ptr() % 16 == 0
    assert torch.equal(call.q, part)
