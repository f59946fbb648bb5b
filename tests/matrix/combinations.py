"""Which versions are combined, and the tests that each combination runs."""

from typing import NamedTuple

PYTHONS = ("3.11", "3.12", "3.13", "3.14")
TORCHES = ("2.10.0", "2.11.0", "2.12.1", "2.13.0", "2.14.1", "2.15.0")
TRITONS = ("3.6.0", "3.7.1", "3.8.0", "3.9.0")


class Combination(NamedTuple):
    """One environment. `triton` stands in front of the one that PyTorch has brought."""

    python: str
    torch: str
    triton: str

    @property
    def name(self) -> str:
        return f"Python {self.python}, PyTorch {self.torch}, Triton {self.triton}"


# Each version of each, each PyTorch with the Triton that it brings, and the corners.
COMBINATIONS = (
    *(Combination("3.11", "2.13.0", triton) for triton in TRITONS),
    Combination("3.11", "2.10.0", "3.6.0"),
    Combination("3.11", "2.12.1", "3.7.1"),
    Combination("3.12", "2.11.0", "3.6.0"),
    Combination("3.12", "2.11.0", "3.9.0"),
    Combination("3.12", "2.14.1", "3.8.0"),
    Combination("3.13", "2.13.0", "3.7.1"),
    Combination("3.13", "2.15.0", "3.6.0"),
    Combination("3.13", "2.15.0", "3.9.0"),
    Combination("3.14", "2.15.0", "3.9.0"),
)

# What versions change: PyTorch's dispatcher, autograd, transforms and compiler; kernels and their compilers.
TESTS = (
    "tests/test_private_torch.py",
    "tests/api/test_gradients.py",
    "tests/api/test_autocast.py",
    "tests/dispatch/test_operators.py",
    "tests/dispatch/test_fast_path.py",
    "tests/dispatch/test_compile.py",
    "tests/dispatch/test_self_check.py",
    "tests/expression/test_score_mod.py",
    "tests/expression/test_score_mod_keys.py",
    "tests/compat/test_torch.py",
    "tests/project/test_imports.py",
    "tests/backend/gpu",
    "tests/backend/hopper/test_hopper.py",
    "tests/backend/hopper/test_hopper_machine_code.py",
    "tests/backend/triton/test_offline.py",
)
# The time of an import says little on a busy machine; Inductor needs a C++ compiler; these kernels take minutes.
LEFT_OUT = ("test_import_is_quick", "test_inductor", "backward-150", "dkdv")
INTERPRETED = ("causal", "dropout")  # words of the interpreted problems; all of them take minutes
NEEDED = ("click", "hypothesis", "jinja2", "llvmlite", "matplotlib", "numpy", "pytest")
