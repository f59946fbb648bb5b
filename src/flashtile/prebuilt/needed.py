"""The kernels that a pass of a call needs on a device, and their compilation without running them."""

from typing import Any

import torch

from ..backend import compiling
from ..backend.gpu.archive import archive_for
from ..backend.gpu.kernel import Kernel
from ..backend.gpu.replay import Launch, collected_launches
from ..call.call import Call, Needs
from ..call.device import Device, meta_tensors_on
from ..call.plan import Plan
from ..call.problem import Problem
from ..call.record import Record, call_of, moves_of
from ..dispatch.launches import launches_of, tangents_like, without_memory
from ..dispatch.passes import function_of
from ..dispatch.planner import plan
from .launches import BACKENDS, plan_of

Kernels = dict[str, Any]  # CPU kernels and launches, by their keys
CPU = torch.device("cpu")


def kernels_of_record(record: Record, device: Device) -> Kernels:
    """The kernels of a recorded pass on a device of this machine; none where no backend with kernels takes it.

    Raises:
        ValueError: this is no record.
    """
    on_cpu = device.type == "cpu"
    call, needs = call_of(record, "cpu" if on_cpu else "meta")
    return kernels_of(call if on_cpu else without_memory(call), needs, device, moves_of(record))


def kernels_of(call: Call, needs: Needs | None, device: Device, moves: Needs | None = None) -> Kernels:
    """The kernels of a call's forward pass or, with `needs`, of both passes; with `moves`, of forward mode.

    Raises:
        AttentionError: as the call itself would.
    """
    if device.type == "cpu":
        return cpu_kernels(call, needs) if moves is None else cpu_tangent_kernels(call, moves)
    return gpu_kernels(call, needs, device) if moves is None else gpu_tangent_kernels(call, moves, device)


def cpu_tangent_kernels(call: Call, moves: Needs) -> Kernels:
    from ..backend.cpu.machine_code import collected_kernels

    chosen = plan(Problem.describe(call), CPU, call.settings.backend, moves=moves)
    if chosen.backend != "cpu":
        return {}
    with torch.no_grad(), collected_kernels() as found:
        function_of(chosen, "tangents")(chosen, call, tangents_like(call, moves))
    return {f"{x.name} {x.variant!r} {x.target!r}": x for x in found}


def gpu_tangent_kernels(call: Call, moves: Needs, device: Device) -> Kernels:
    with torch.no_grad(), meta_tensors_on(device):
        chosen = gpu_plan(Problem.describe(call), device, None, call.settings.backend, moves)
        if chosen is None or chosen.backend not in BACKENDS:
            return {}
        with collected_launches() as found:
            function_of(chosen, "tangents")(chosen, call, tangents_like(call, moves))
    return {key_of(x, device): x for x in found}


def cpu_kernels(call: Call, needs: Needs | None) -> Kernels:
    from ..backend.cpu.machine_code import collected_kernels

    call = call.attention()  # appending to a cache needs no kernel
    problem = Problem.describe(call)
    plans = [plan(problem, CPU, call.settings.backend)]
    if needs is not None:
        plans.append(plan(problem, CPU, call.settings.backend, needs=needs))
    if any(x.backend != "cpu" for x in plans):
        return {}
    with torch.no_grad(), collected_kernels() as found:
        out, lse = function_of(plans[0], Call.kind)(plans[0], call)
        if needs is not None:
            function_of(plans[1], "backward")(plans[1], call, needs, out, lse, torch.empty_like(out), None)
    return {f"{x.name} {x.variant!r} {x.target!r}": x for x in found}


def gpu_kernels(call: Call, needs: Needs | None, device: Device) -> Kernels:
    with torch.no_grad(), meta_tensors_on(device):
        problem = Problem.describe(call.attention())
        plans = [gpu_plan(problem, device, x, call.settings.backend) for x in (None, needs)[: 1 + (needs is not None)]]
        if any(x is None or x.backend not in BACKENDS for x in plans):
            return {}
        backward = None if needs is None else (plans[1], needs)
        found = launches_of(call, device, plans[0], backward)  # type: ignore[arg-type]
    return {key_of(x, device): x for x in found}


def gpu_plan(
    problem: Problem, device: Device, needs: Needs | None, backend: str, moves: Needs | None = None
) -> Plan | None:
    """The plan that a call here has; without a GPU by the device's name, as for an archive. `None` without one."""
    if torch.cuda.is_available():
        return plan(problem, torch.device("meta"), backend, needs=needs, moves=moves)
    try:
        return plan_of(problem, device, needs) if moves is None else plan_of(problem, device, None, moves)
    except LookupError:
        return None


def key_of(launch: Launch, device: Device) -> str:
    """A kernel's name and key: of one in the archive without Triton."""
    kernel, archive = launch.kernel, archive_for(device.arch)
    ahead = None if archive is None else archive.key(kernel, launch.scalars, launch.pointers)
    if ahead is not None:
        return f"{kernel.title} {ahead}"
    from .build import key_of_launch

    name = kernel.title if isinstance(kernel, Kernel) else f"{kernel.__name__} at {id(kernel)}"
    return f"{name} {key_of_launch(launch)}"


def in_archive(kernel: Any, device: Device) -> bool:
    """Whether a kernel is compiled already, in the archive."""
    if not isinstance(kernel, Launch) or (archive := archive_for(device.arch)) is None:
        return False
    return archive.key(kernel.kernel, kernel.scalars, kernel.pointers) is not None


def can_be_sent(kernel: Any) -> bool:
    """Whether another process makes the same kernel of a record: not one for a user's function."""
    return not isinstance(kernel, Launch) or isinstance(kernel.kernel, Kernel)


def is_loaded_from_cache(kernel: Any) -> bool:
    """Load a kernel if it is in the cache; whether it was."""
    try:
        with compiling.none_compiled():
            compile_kernel(kernel, load=True)
    except compiling.NotCompiledError:
        return False
    return True


def compile_kernel(kernel: Any, *, load: bool) -> None:
    """Compile a kernel, or find it in the cache; with `load`, onto the current device of this process."""
    if not isinstance(kernel, Launch):
        from ..backend.cpu import machine_code

        machine_code.loaded(*kernel)
        return
    from ..backend.gpu.kernel import function_under_jit
    from ..backend.gpu.triton_launch import OPTIONS, for_triton

    function = function_under_jit(kernel.kernel)
    pointers = {name: for_triton(x) for name, x in kernel.pointers.items()}
    made = function.run(grid=(1,), warmup=True, **kernel.scalars, **pointers, **OPTIONS)
    if load and hasattr(made, "_init_handles"):
        made._init_handles()
