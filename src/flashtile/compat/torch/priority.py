"""PyTorch's order of implementations of `scaled_dot_product_attention`, with flash attention as the first."""

import torch
from torch.nn.attention import SDPBackend

from ... import private_torch

FLASH = int(SDPBackend.FLASH_ATTENTION)  # pyright: ignore[reportArgumentType] - an enumeration of C++


class FlashFirst:
    """The order with flash attention first, until it is undone. A PyTorch without such an order is left as it is."""

    def __init__(self) -> None:
        self.before: list[int] | None = None
        self.order: list[int] = []
        if private_torch.get_sdp_priority_order is None or private_torch.set_sdp_priority_order is None:
            return
        settle()
        before = list(private_torch.get_sdp_priority_order())
        self.before, self.order = before, [FLASH, *(x for x in before if x != FLASH)]
        private_torch.set_sdp_priority_order(self.order)

    def undo(self) -> None:
        """Restore the former order, unless the program has set another one since."""
        if self.before is not None and list(private_torch.get_sdp_priority_order()) == self.order:
            private_torch.set_sdp_priority_order(self.before)
        self.before = None


def settle() -> None:
    """Let PyTorch choose an implementation once on CUDA. Its first choice there sets the order, on Hopper and Blackwell
    with cuDNN before flash attention, and would undo ours.
    """
    if torch.cuda.is_available() and private_torch.fused_sdp_choice is not None:
        x = torch.zeros(1, 1, 8, 64, dtype=torch.float16, device="cuda")
        private_torch.fused_sdp_choice(x, x, x)
