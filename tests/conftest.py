"""Settings that all tests share: hypothesis profiles, threads and seeds."""

import functools
import gc
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from roomy import with_room

from flashtile.as_arch import install_inherited

# Examples are the same on every run, so that failures repeat. `--hypothesis-profile=thorough` searches for new ones.
slow_is_fine = [HealthCheck.too_slow, HealthCheck.data_too_large]
settings.register_profile(
    "default", max_examples=60, derandomize=True, deadline=None, suppress_health_check=slow_is_fine
)
settings.register_profile(
    "thorough", max_examples=3000, deadline=None, suppress_health_check=slow_is_fine, print_blob=True
)
settings.load_profile("default")

install_inherited()  # with FLASHTILE_AS_ARCH=sm_80, tests on a GPU compile as for that chip

# Inductor compiles programs for seconds to see that the compiler has the vectors that the processor names.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")

gc.set_threshold(50_000, 20, 50)  # collections of few objects took a tenth of the time
STARTUP = str(Path(__file__).with_name("startup"))  # what processes begin with
if STARTUP not in os.environ.get("PYTHONPATH", "").split(os.pathsep):
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (STARTUP, os.environ.get("PYTHONPATH"))))

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)


BUGS_OF_A_RUN = 12  # one of so many planted bugs; the others have the marker `bugs`


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Planted bugs say whether tests would notice mistakes in kernels. They change when tests or kernels do."""
    planted: Counter[Any] = Counter()
    for item in items:
        callspec = getattr(item, "callspec", None)  # of a test with parameters
        if isinstance(item, pytest.Function) and callspec is not None and "bug" in callspec.params:
            if planted[item.function] % BUGS_OF_A_RUN:
                item.add_marker("bugs")
            planted[item.function] += 1


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Iterator[Any]:
    test = pyfuncitem.obj
    pyfuncitem.obj = functools.partial(with_room, test)
    try:
        return (yield)
    finally:
        pyfuncitem.obj = test


@pytest.fixture(scope="session")
def unfrozen_at_the_end() -> Iterator[None]:
    yield
    gc.unfreeze()


@pytest.fixture(scope="module", autouse=True)
def frozen_imports(unfrozen_at_the_end: None) -> None:
    """Exclude all modules imported so far from garbage collections, each of which would take 0.2 s."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    """Dynamo without the code that other tests have compiled."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
