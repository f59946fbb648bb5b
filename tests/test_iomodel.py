"""Least operations and bytes of a call, and the roofline, as `explain` uses them."""

from checking import dense_case

import flashtile
from flashtile import iomodel
from flashtile.iomodel import Machine


def test_roofline() -> None:
    machine = Machine(flops_per_second=1000.0, bytes_per_second=10.0)
    assert machine.ridge == 100
    assert iomodel.roofline(5000, 10, machine) == ("compute", 5.0)
    assert iomodel.roofline(5000, 100, machine) == ("memory", 10.0)
    assert iomodel.roofline(1000, 10, machine).seconds == 1.0


def test_explain_uses_it() -> None:
    """Five products of backward, two of them with head_dim_v."""
    arguments = dense_case(head_dim=8, head_dim_v=6).arguments
    found = flashtile.explain(**arguments)
    pairs = 2 * 2 * 7 * 9
    assert found.flops_forward == iomodel.forward_flops(pairs, 8, 6) == 2 * pairs * (8 + 6)
    assert found.flops_backward == iomodel.backward_flops(pairs, 8, 6) == 2 * pairs * (3 * 8 + 2 * 6)
    inputs = 4 * sum(arguments[name].numel() for name in "qkv")
    assert found.bytes_forward == iomodel.least_bytes(inputs, 2 * 2 * 7, 6, 4) == inputs + 2 * 2 * 7 * (6 * 4 + 4)
    machine = Machine(found.flops_per_second, found.bytes_per_second)
    assert (found.limit, found.seconds_at_limit) == iomodel.roofline(found.flops_forward, found.bytes_forward, machine)
