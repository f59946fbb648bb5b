"""The description of a call in words, for explanations and errors."""

from .problem import Problem


def in_words(problem: Problem, *, lengths: bool = True) -> str:
    """A problem for people. A plan's problem has the lengths of its bucket, which no caller knows."""
    p = problem
    dtype = str(p.dtype).removeprefix("torch.")
    heads = f"{p.num_heads_q}/{p.num_heads_kv}" if p.num_heads_q != p.num_heads_kv else f"{p.num_heads_q}"
    dim = f"{p.head_dim}/{p.head_dim_v}" if p.head_dim != p.head_dim_v else f"{p.head_dim}"
    seqlen = f"seqlen {p.seqlen_q} x {p.seqlen_k}, " if lengths else ""
    dim += ", v in k" * p.latent
    features = [
        name for name in ("softcap", "dropout", "deterministic", "batch_invariant", "seqused_q") if getattr(p, name)
    ]
    present = {name: x for name, x in p.features._asdict().items() if x is not None}
    features += [name if x is True else f"{name} with broadcast {x}" for name, x in present.items()]
    if p.score_mod is not None:
        features.append("score_mod " + "; ".join(str(p.score_mod).splitlines()))
    if p.mask_mod is not None:
        features.append("mask " + "; ".join(str(p.mask_mod).splitlines()))
    if p.window.chunk is not None:
        features.append(f"chunks of {p.window.chunk}")
    if not p.window._replace(chunk=None).unlimited:
        features.append(f"window ({p.window.left}, {p.window.right}){' top-left causal' * p.window.top_left}")
    if p.eight_bit is not None:
        dtype += f" with {p.eight_bit.format} keys and values"
    if p.out_dtype is not None:
        features.append(f"out in {str(p.out_dtype).removeprefix('torch.')}")
    return f"{p.layout} {dtype}, batch {p.batch}, heads {heads}, {seqlen}head_dim {dim}" + "".join(
        f", {feature}" for feature in features
    )
