"""A mode in which the host may not read tensors."""

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class NoReads(TorchDispatchMode):
    """Raise for operators that copy a tensor's values to the host."""

    READS = ("_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select", "unique", "item")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        assert name not in self.READS, f"{name} reads values on the host"
        return func(*args, **(kwargs or {}))
