"""What the chips of GPUs have."""

from ...call.device import Device

SHARED_MEMORY = {  # KiB that one program may take
    "sm_80": 163, "sm_86": 99, "sm_87": 163, "sm_89": 99, "sm_90": 227, "sm_100": 227, "sm_103": 227, "sm_120": 99,
    "sm_121": 99, "gfx942": 64, "gfx950": 160,
}  # fmt: skip
MMA_SYNC = {"sm_80", "sm_86", "sm_87", "sm_89", "sm_120", "sm_121"}  # matrix units take operands from registers


def memory_of(device: Device) -> int:
    """KiB of shared memory that one program may take."""
    return SHARED_MEMORY.get(device.arch, min(SHARED_MEMORY.values()))


def unlike(one: str, other: str) -> int:
    """How far two architectures are from each other: 0 for the same one, 1 with matrix units of the same kind."""
    if one == other:
        return 0
    return 1 if one in MMA_SYNC and other in MMA_SYNC else 2
