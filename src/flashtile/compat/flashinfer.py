"""FlashInfer's wrapper for latent attention, `flashinfer.mla.BatchMLAPagedAttentionWrapper`, by flashtile.

Names, order and defaults of arguments, shapes and results are the original's.
"""

import math
from typing import Any

import torch
from torch import Tensor

from ..api.latent import rows_of_both
from ..api.varlen import attention_varlen
from .arguments import refuse

__all__ = ["BatchMLAPagedAttentionWrapper"]

GROUP = 128  # features that share a scale of `ckv_scale_arr`
EXAMPLE = "wrapper = BatchMLAPagedAttentionWrapper(workspace); wrapper.plan(...); wrapper.run(q_nope, q_pe, ckv, kpe)"


class BatchMLAPagedAttentionWrapper:
    """Attention over pages of latent rows: `plan` takes their places and lengths, `run` the numbers.

    The workspace and `backend` are ignored, but "cutlass", which plans nothing, is refused, and so is `use_cuda_graph`:
    `flashtile.attention_with_kvcache` with `v_dim` reads lengths and pages when a captured graph is replayed.
    """

    def __init__(
        self,
        float_workspace_buffer: Tensor,
        use_cuda_graph: bool = False,
        qo_indptr: Tensor | None = None,
        kv_indptr: Tensor | None = None,
        kv_indices: Tensor | None = None,
        kv_len_arr: Tensor | None = None,
        backend: str = "auto",
    ) -> None:
        if use_cuda_graph:
            accepted = "False; in CUDA graphs, flashtile.attention_with_kvcache(..., v_dim=512, page_table=page_table)"
            refuse("use_cuda_graph", use_cuda_graph, accepted, EXAMPLE)
        if backend == "cutlass":
            refuse("backend", backend, "'auto', 'fa2' or 'fa3', which are ignored", EXAMPLE)
        self.planned: dict[str, Any] | None = None

    def plan(
        self,
        qo_indptr: Tensor,
        kv_indptr: Tensor,
        kv_indices: Tensor,
        kv_len_arr: Tensor,
        num_heads: int,
        head_dim_ckv: int,
        head_dim_kpe: int,
        page_size: int,
        causal: bool,
        sm_scale: float,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
        use_profiler: bool = False,
    ) -> None:
        """Take the places of queries and keys. The number of pages is read back, as by the original.

        Args:
            qo_indptr: integers `[B + 1]`, offsets of the sequences in q.
            kv_indptr: integers `[B + 1]`, offsets of their pages in `kv_indices`, the numbers of all pages.
            kv_len_arr: integers `[B]`, keys of each sequence.
            page_size: keys of a page.
            causal: as in flashtile: the last query sees every key.
            sm_scale: the factor of scores, for DeepSeek-V3 `192 ** -0.5` times the factor of its rotary scaling.
            num_heads, head_dim_ckv, head_dim_kpe, q_data_type, kv_data_type, use_profiler: ignored; tensors tell.
        """
        counts = kv_indptr.diff().long()  # [B]
        column = torch.arange(max(int(counts.max()) if len(counts) else 0, 1), device=kv_indices.device)
        exists = column < counts[:, None]
        place = torch.where(exists, kv_indptr[:-1, None] + column, 0)  # [B, columns], of pages in `kv_indices`
        used = kv_indices[: int(kv_indptr[-1])]
        pages = used.int()[place] if len(used) else torch.zeros_like(place).int()
        self.planned = {
            "page_size": page_size,
            "page_table": torch.where(exists, pages, 0),
            "place": place.int(),
            "used": used,
            "call": {
                "cu_seqlens_q": qo_indptr, "cu_seqlens_k": None, "seqused_k": kv_len_arr, "causal": causal,
                "scale": sm_scale,
            },
        }  # fmt: skip

    def run(
        self,
        q_nope: Tensor,
        q_pe: Tensor,
        ckv_cache: Tensor,
        kpe_cache: Tensor,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        return_lse: bool = False,
        profiler_buffer: Tensor | None = None,
        kv_len: Tensor | None = None,
        page_table: Tensor | None = None,
        return_lse_base_on_e: bool = False,
        o_scale: float | None = None,
        *,
        ckv_scale: float | None = None,
        ckv_scale_arr: Tensor | None = None,
        kpe_scale: float | None = None,
    ) -> Any:
        """Attention of the planned sequences.

        Args:
            q_nope: absorbed queries `[T, H, head_dim_ckv]`, and `q_pe` turned ones `[T, H, head_dim_kpe]`.
            ckv_cache: latent rows `[num_pages, page_size, head_dim_ckv]`, and `kpe_cache` their turned keys
                `[num_pages, page_size, head_dim_kpe]`. Read in place if they are views of one tensor,
                `rows[..., :head_dim_ckv]` and `rows[..., head_dim_ckv:]`; else the planned pages are copied together.
            out, lse: tensors for the results.
            return_lse_base_on_e: log-sum-exp by the natural logarithm, not the one of base 2.
            ckv_scale, kpe_scale: of caches of float8_e4m3fn, what numbers of each are multiplied by.
            ckv_scale_arr: in place of `ckv_scale` one for each 128 features, float32 `[num_pages, page_size,
                head_dim_ckv / 128]`. Rows in one tensor with one scale for both parts are read in place; of others the
                planned pages are copied in q's dtype.
            o_scale: must be `None`.
            profiler_buffer, kv_len, page_table: ignored; they belong to what is refused.

        Returns:
            `out [T, H, head_dim_ckv]`; with `return_lse` `(out, lse [T, H])`, -inf for rows that see no key.

        Raises:
            ArgumentError: an argument is not what it should be, or nothing is planned.
        """
        if self.planned is None:
            refuse("plan", None, "a plan before the first run", EXAMPLE)
        p = self.planned
        for name, x in (("ckv_cache", ckv_cache), ("kpe_cache", kpe_cache)):
            if x.dim() != 3 or x.shape[1] != p["page_size"]:
                refuse(name, x, f"[num_pages, {p['page_size']}, features]", EXAMPLE)
        if o_scale is not None:
            refuse("o_scale", o_scale, "None: out has q's dtype", EXAMPLE)
        scale = scale_of(ckv_cache, ckv_scale, ckv_scale_arr, kpe_scale)
        rows, table, descale = rows_of_both(kpe_cache, ckv_cache), p["page_table"], None
        if rows is not None and ckv_scale is not None and ckv_scale == kpe_scale:
            descale = q_nope.new_full((1,), ckv_scale, dtype=torch.float32)
        elif rows is None or scale is not None:
            ckv, kpe, table = ckv_cache[p["used"]], kpe_cache[p["used"]], p["place"]
            if scale is not None and kpe_scale is not None:
                of_pages = scale[p["used"]] if isinstance(scale, Tensor) else scale
                ckv, kpe = times(ckv, of_pages, q_nope.dtype), times(kpe, kpe_scale, q_nope.dtype)
            rows = torch.cat((ckv, kpe), -1)
        assert rows is not None
        result, natural = attention_varlen(
            torch.cat((q_nope, q_pe), -1), rows[:, :, None], None, v_dim=ckv_cache.shape[-1], page_table=table, out=out,
            return_lse=True, k_descale=descale, **p["call"],
        )  # fmt: skip
        if not return_lse:
            return result
        found = natural.transpose(0, 1) * (1.0 if return_lse_base_on_e else 1 / math.log(2))
        return result, found if lse is None else lse.copy_(found)


def scale_of(
    ckv_cache: Tensor, ckv_scale: float | None, ckv_scale_arr: Tensor | None, kpe_scale: float | None
) -> Tensor | float | None:
    """The scale of latent vectors, `None` of caches of 16 bits and more."""
    given = {"ckv_scale": ckv_scale, "ckv_scale_arr": ckv_scale_arr, "kpe_scale": kpe_scale}
    if ckv_cache.dtype is not torch.float8_e4m3fn:
        for name, x in given.items():
            if x is not None:
                refuse(name, x, f"None for caches of {ckv_cache.dtype}", EXAMPLE)
        return None
    if (ckv_scale is None) == (ckv_scale_arr is None):
        refuse("ckv_scale", ckv_scale, "a number, or ckv_scale_arr, for caches of float8_e4m3fn", EXAMPLE)
    if kpe_scale is None:
        refuse("kpe_scale", kpe_scale, "a number, for caches of float8_e4m3fn", EXAMPLE)
    shape = (*ckv_cache.shape[:-1], ckv_cache.shape[-1] // GROUP)
    if ckv_scale_arr is not None and (ckv_scale_arr.shape != shape or ckv_scale_arr.dtype is not torch.float32):
        refuse("ckv_scale_arr", ckv_scale_arr, f"float32 {list(shape)}", EXAMPLE)
    return ckv_scale if ckv_scale_arr is None else ckv_scale_arr


def times(x: Tensor, scale: Tensor | float, dtype: torch.dtype) -> Tensor:
    """Numbers of 8 bits `[..., features]` times one scale, or one for each GROUP of features, rounded to a dtype."""
    if isinstance(scale, Tensor):
        scale = scale.repeat_interleave(GROUP, -1)
    return (x.float() * scale).to(dtype)
