"""Calls on which `compare_sources.py` times checkouts by their public functions alone, of whatever version."""

from typing import Any

SAMPLE_SECONDS = 0.03


def cell(name: str, measure: str = "forward", **given: Any) -> dict[str, Any]:
    return {"name": f"{name} {measure}", "measure": measure, **given}


def both(name: str, **given: Any) -> list[dict[str, Any]]:
    return [cell(name, measure, **given) for measure in ("forward", "backward")]


CELLS = [
    *both("float32 64 512", dtype="float32", heads=16, head_dim=64, seqlen=512),
    *both("float32 64 2k", dtype="float32", heads=8, head_dim=64, seqlen=2048),
    *both("float32 64 4k causal", dtype="float32", heads=8, head_dim=64, seqlen=4096, causal=True),
    *both("float32 128 2k", dtype="float32", heads=8, head_dim=128, seqlen=2048),
    *both("float32 32 1k", dtype="float32", heads=16, head_dim=32, seqlen=1024),
    *both("float32 bias 64 1k", dtype="float32", heads=8, head_dim=64, seqlen=1024, bias=True),
    *both("float32 bias 128 1k", dtype="float32", heads=8, head_dim=128, seqlen=1024, bias=True),
    *both("float32 dropout 64 1k", dtype="float32", heads=8, head_dim=64, seqlen=1024, dropout_p=0.1),
    *(cell(f"triton {d} 4k {c}", backend="triton", head_dim=d, heads=2048 // d, seqlen=4096, causal=c == "causal")
      for d in (64, 128, 256) for c in ("full", "causal")),
    *(cell(f"triton {f} {d}", measure, backend="triton", head_dim=d, heads=2048 // d, seqlen=2048, batch=2, **{f: v})
      for f, v in (("bias", True), ("mask", True), ("slopes", True), ("dropout_p", 0.1), ("softcap", 30.0))
      for d in (64, 128) for measure in ("forward", "backward")),
    *(cell(f"append {b} x {s}", "append", batch=b, heads=32, heads_kv=8, head_dim=128, seqlen=1, seqlen_k=s)
      for b, s in ((1, 8192), (64, 4096))),
    *(cell(f"decode {b} x {s}", batch=b, heads=32, heads_kv=8, head_dim=128, seqlen=1, seqlen_k=s)
      for b, s in ((1, 8192), (1, 65536), (64, 8192))),
    *(cell(f"hopper {d} {s} {c}", head_dim=d, heads=2048 // d, seqlen=s, batch=max(1, 16384 // s), causal=c == "causal")
      for d in (64, 128) for s in (1024, 4096, 16384) for c in ("full", "causal")),
    *(cell(f"hopper {d} 4k causal", measure, head_dim=d, heads=max(8, 2048 // d), seqlen=4096, batch=4, causal=True)
      for d in (96, 192, 256) for measure in ("forward", "backward")),
    *(cell(f"hopper {d} 16384 {c}", "backward", head_dim=d, heads=2048 // d, seqlen=16384, causal=c == "causal")
      for d in (64, 128) for c in ("full", "causal")),
    *both("mma 64 4k causal", head_dim=64, heads=16, seqlen=4096, batch=2, causal=True),
    *both("mma 64 16k causal", head_dim=64, heads=8, seqlen=16384, causal=True),
    *both("mma 64 512 causal", head_dim=64, heads=8, seqlen=512, batch=8, causal=True),
    *both("mma 128 512 causal", head_dim=128, heads=8, seqlen=512, batch=8, causal=True),
    *both("mma 128 2k causal", head_dim=128, heads=16, seqlen=2048, batch=4, causal=True),
    *both("mma 128 8k causal", head_dim=128, heads=8, seqlen=8192, causal=True),
    *both("mma 64 4k causal gqa", head_dim=64, heads=32, heads_kv=8, seqlen=4096, batch=2, causal=True),
    *both("mma 128 4k causal gqa", head_dim=128, heads=32, heads_kv=8, seqlen=4096, batch=2, causal=True),
    *both("mma 128 4k window", head_dim=128, heads=16, seqlen=4096, batch=2, window=(511, 0)),
    cell("hopper softcap 128 4k", head_dim=128, heads=16, seqlen=4096, batch=4, causal=True, softcap=30.0),
    cell("hopper window 128 16k", head_dim=128, heads=16, seqlen=16384, causal=True, window=(1023, 0)),
]  # fmt: skip


def call_of(given: dict[str, Any]) -> Any:
    """A function that runs the cell once."""
    import torch

    import flashtile

    dtype, heads, seqlen = getattr(torch, given.get("dtype", "bfloat16")), given["heads"], given["seqlen"]
    batch, heads_kv, seqlen_k = given.get("batch", 1), given.get("heads_kv", heads), given.get("seqlen_k", seqlen)
    generator = torch.Generator("cuda").manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", dtype=dtype, generator=generator)

    q = draw(batch, heads, seqlen, given["head_dim"])
    k, v = (draw(batch, heads_kv, seqlen_k, given["head_dim"]) for _ in range(2))
    if given["measure"] == "append":
        lengths = torch.full((batch,), seqlen_k // 2, dtype=torch.int32, device="cuda")
        new = (draw(batch, heads_kv, seqlen, given["head_dim"]) for _ in range(2))
        appended = dict(zip("kv", new, strict=True))
        return lambda: flashtile.attention_with_kvcache(q, k, v, cache_seqlens=lengths, **appended)
    options = {name: given[name] for name in ("backend", "causal", "softcap", "dropout_p", "window") if name in given}
    if "bias" in given:
        options["bias"] = draw(1, heads, seqlen, seqlen_k)
    if "mask" in given:
        options["mask"] = torch.rand(1, 1, seqlen, seqlen_k, device="cuda", generator=generator) < 0.5
    if "slopes" in given:
        options["alibi_slopes"] = torch.linspace(0.01, 0.5, heads, device="cuda")
    if "dropout_p" in given:
        options["dropout_seed"] = 1
    if given["measure"] == "forward":
        return lambda: flashtile.attention(q, k, v, **options)
    features = [options[name] for name in ("bias", "alibi_slopes") if name in options]
    inputs = [x.requires_grad_() for x in (q, k, v, *features)]
    out = flashtile.attention(*inputs[:3], **options)
    dout = torch.randn_like(out)
    return lambda: torch.autograd.grad(out, inputs, dout, retain_graph=True)


def sampled(given: dict[str, Any]) -> tuple[Any, int]:
    """The function of a cell, compiled, and its calls in a sample."""
    call = call_of(given)
    for _ in range(3):
        call()
    return call, max(3, int(SAMPLE_SECONDS / seconds(call, 3)))


def seconds(call: Any, count: int) -> float:
    """The device's time of one call of several in a row."""
    import torch

    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    for _ in range(count):
        call()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop) / 1e3 / count
