"""Signatures of the originals, as facts: FlashAttention 2.8.3, PyTorch 2.13, and the others of 2026."""

SIGNATURES = {
    ("flash_attn", "flash_attn_func"): (
        "(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, "
        "alibi_slopes=None, deterministic=False, return_attn_probs=False)"
    ),
    ("flash_attn", "flash_attn_qkvpacked_func"): (
        "(qkv, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, "
        "alibi_slopes=None, deterministic=False, return_attn_probs=False)"
    ),
    ("flash_attn", "flash_attn_kvpacked_func"): (
        "(q, kv, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, "
        "alibi_slopes=None, deterministic=False, return_attn_probs=False)"
    ),
    ("flash_attn", "flash_attn_varlen_func"): (
        "(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None, "
        "causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False, "
        "return_attn_probs=False, block_table=None)"
    ),
    ("flash_attn", "flash_attn_varlen_qkvpacked_func"): (
        "(qkv, cu_seqlens, max_seqlen, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), "
        "softcap=0.0, alibi_slopes=None, deterministic=False, return_attn_probs=False)"
    ),
    ("flash_attn", "flash_attn_varlen_kvpacked_func"): (
        "(q, kv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None, "
        "causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False, "
        "return_attn_probs=False)"
    ),
    ("flash_attn", "flash_attn_with_kvcache"): (
        "(q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None, "
        "cache_batch_idx=None, cache_leftpad=None, block_table=None, softmax_scale=None, causal=False, "
        "window_size=(-1, -1), softcap=0.0, rotary_interleaved=True, alibi_slopes=None, num_splits=0, "
        "return_softmax_lse=False)"
    ),
    ("flash_attn.flash_attn_interface", "_flash_attn_forward"): (
        "(q, k, v, dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes, "
        "return_softmax)"
    ),
    ("flash_attn.flash_attn_interface", "_flash_attn_varlen_forward"): (
        "(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal, "
        "window_size_left=-1, window_size_right=-1, softcap=0.0, alibi_slopes=None, return_softmax=False, "
        "block_table=None, leftpad_k=None, seqused_k=None, zero_tensors=False, num_splits=0)"
    ),
    ("flash_attn.flash_attn_interface", "_flash_attn_backward"): (
        "(dout, q, k, v, out, softmax_lse, dq, dk, dv, dropout_p, softmax_scale, causal, window_size_left, "
        "window_size_right, softcap, alibi_slopes, deterministic, rng_state=None)"
    ),
    ("flash_attn.flash_attn_interface", "_flash_attn_varlen_backward"): (
        "(dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, "
        "dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes, "
        "deterministic, rng_state=None, zero_tensors=False)"
    ),
    ("flash_attn.bert_padding", "unpad_input"): "(hidden_states, attention_mask, unused_mask=None)",
    ("flash_attn.bert_padding", "pad_input"): "(hidden_states, indices, batch, seqlen)",
    ("flash_attn.layers.rotary", "apply_rotary_emb"): (
        "(x, cos, sin, interleaved=False, inplace=False, seqlen_offsets=0, cu_seqlens=None, max_seqlen=None)"
    ),
    ("flash_attn.layers.rotary", "apply_rotary_emb_qkv_"): (
        "(qkv, cos, sin, cos_k=None, sin_k=None, interleaved=False, seqlen_offsets=0, num_heads_q=None)"
    ),
    ("flash_attn.layers.rotary", "apply_rotary_emb_kv_"): "(kv, cos, sin, interleaved=False, seqlen_offsets=0)",
    ("flash_attn.layers.rotary", "RotaryEmbedding"): (
        "(dim, base=10000.0, interleaved=False, scale_base=None, device=None)"
    ),
    ("flash_attn_3", "flash_attn_combine"): "(out_partial, lse_partial, out=None, out_dtype=None)",
    ("flash_attn_3", "flash_attn_func"): (
        "(q, k, v, softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None, v_descale=None, "
        "window_size=(-1, -1), attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None, "
        "deterministic=False, sm_margin=0, return_attn_probs=False)"
    ),
    ("flash_attn_3", "flash_attn_qkvpacked_func"): (
        "(qkv, softmax_scale=None, causal=False, q_descale=None, k_descale=None, v_descale=None, "
        "window_size=(-1, -1), attention_chunk=0, softcap=0.0, deterministic=False, num_heads_q=None, "
        "sm_margin=0, return_attn_probs=False)"
    ),
    ("flash_attn_3", "flash_attn_varlen_func"): (
        "(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q=None, seqused_k=None, "
        "softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None, v_descale=None, "
        "window_size=(-1, -1), attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None, "
        "deterministic=False, sm_margin=0, return_attn_probs=False)"
    ),
    ("flash_attn_3", "flash_attn_with_kvcache"): (
        "(q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None, "
        "cache_batch_idx=None, cache_leftpad=None, page_table=None, cu_seqlens_q=None, cu_seqlens_k_new=None, "
        "max_seqlen_q=None, rotary_seqlens=None, q_descale=None, k_descale=None, v_descale=None, "
        "softmax_scale=None, causal=False, window_size=(-1, -1), attention_chunk=0, softcap=0.0, "
        "rotary_interleaved=True, scheduler_metadata=None, num_splits=0, pack_gqa=None, sm_margin=0, "
        "return_softmax_lse=False)"
    ),
    ("flash_attn_3", "get_scheduler_metadata"): (
        "(batch_size, max_seqlen_q, max_seqlen_k, num_heads_q, num_heads_kv, headdim, cache_seqlens, "
        "qkv_dtype=torch.bfloat16, headdim_v=None, cu_seqlens_q=None, cu_seqlens_k_new=None, cache_leftpad=None, "
        "page_size=None, max_seqlen_k_new=0, causal=False, window_size=(-1, -1), attention_chunk=0, "
        "has_softcap=False, num_splits=0, pack_gqa=None, sm_margin=0)"
    ),
    ("flash_attn_4", "flash_attn_func"): (
        "(q, k, v, qv=None, gather_kv_indices=None, softmax_scale=None, causal=False, window_size=(None, "
        "None), learnable_sink=None, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False, "
        "score_mod=None, score_mod_bwd=None, mask_mod=None, aux_tensors=None, aux_scalars=None, "
        "block_sparse_tensors=None, block_sparse_tensors_bwd=None, return_lse=False)"
    ),
    ("flash_attn_4", "flash_attn_varlen_func"): (
        "(q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None, "
        "min_seqlen_k=None, seqused_q=None, seqused_k=None, gather_kv_indices=None, page_table=None, "
        "softmax_scale=None, causal=False, window_size=(None, None), learnable_sink=None, softcap=0.0, "
        "num_splits=1, pack_gqa=None, deterministic=False, score_mod=None, score_mod_bwd=None, mask_mod=None, "
        "block_sparse_tensors=None, aux_tensors=None, aux_scalars=None, return_lse=False, "
        "scheduler_metadata=None, seqlen_k_per_split=None, disable_scheduler_metadata=False)"
    ),
    ("flash_attn_4", "flash_attn_combine"): (
        "(out_partial, lse_partial, out=None, out_dtype=None, cu_seqlens=None, seqused=None, virtual_batch_idx=None, "
        "return_lse=True)"
    ),
    ("flash_attn_4", "get_scheduler_metadata"): (
        "(max_seqlen_q, max_seqlen_k, nheads, nheads_kv, headdim, num_splits, headdim_v=None, pack_gqa=None, "
        "causal=False, window_size_left=None, window_size_right=None, seqlen_k_new=0, cu_seqlens_q=None, "
        "cu_seqlens_k=None, cu_seqlens_k_new=None, seqused_q=None, seqused_k=None, leftpad_k=None, "
        "seqlen_k_per_split=None, _arch=None)"
    ),
    ("vllm_flash_attn", "flash_attn_varlen_func"): (
        "(q, k, v, max_seqlen_q, cu_seqlens_q, max_seqlen_k, cu_seqlens_k=None, seqused_k=None, q_v=None, "
        "dropout_p=0.0, softmax_scale=None, causal=False, window_size=None, softcap=0.0, alibi_slopes=None, "
        "deterministic=False, return_attn_probs=False, block_table=None, return_softmax_lse=False, out=None, "
        "scheduler_metadata=None, q_descale=None, k_descale=None, v_descale=None, num_splits=0, fa_version=2, "
        "s_aux=None, cp_world_size=1, cp_rank=0, cp_tot_seqused_k=None)"
    ),
    ("vllm_flash_attn", "get_scheduler_metadata"): (
        "(batch_size, max_seqlen_q, max_seqlen_k, num_heads_q, num_heads_kv, headdim, cache_seqlens, "
        "qkv_dtype=torch.bfloat16, headdim_v=None, cu_seqlens_q=None, cu_seqlens_k_new=None, cache_leftpad=None, "
        "page_size=None, max_seqlen_k_new=0, causal=False, window_size=(-1, -1), has_softcap=False, num_splits=0, "
        "pack_gqa=None, sm_margin=0)"
    ),
    ("vllm_flash_attn", "is_fa_version_supported"): "(fa_version, device=None)",
    ("vllm_flash_attn", "fa_version_unsupported_reason"): "(fa_version, device=None)",
    ("sgl_flash_attn", "flash_attn_varlen_func"): (
        "(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q=None, max_seqlen_k=None, seqused_q=None, "
        "seqused_k=None, page_table=None, softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None, "
        "v_descale=None, window_size=(-1, -1), attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None, "
        "sm_margin=0, return_softmax_lse=False, sinks=None, score_mod=None, aux_tensors=None, ver=3, out=None)"
    ),
    ("sgl_flash_attn", "flash_attn_with_kvcache"): (
        "(q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None, "
        "cache_batch_idx=None, cache_leftpad=None, page_table=None, cu_seqlens_q=None, cu_seqlens_k_new=None, "
        "max_seqlen_q=None, rotary_seqlens=None, q_descale=None, k_descale=None, v_descale=None, "
        "softmax_scale=None, causal=False, window_size=(-1, -1), attention_chunk=None, softcap=0.0, "
        "rotary_interleaved=True, scheduler_metadata=None, num_splits=0, pack_gqa=None, only_qv=False, sm_margin=0, "
        "return_softmax_lse=False, sinks=None, score_mod=None, aux_tensors=None, ver=3, out=None)"
    ),
    ("flash_mla", "get_mla_metadata"): "(*args, **kwargs)",
    ("flash_mla", "flash_mla_with_kvcache"): (
        "(q, k_cache, block_table, cache_seqlens, head_dim_v, tile_scheduler_metadata, num_splits=None, "
        "softmax_scale=None, causal=False, is_fp8_kvcache=False, indices=None, attn_sink=None, extra_k_cache=None, "
        "extra_indices_in_kvcache=None, topk_length=None, extra_topk_length=None)"
    ),
    ("flashinfer", "BatchMLAPagedAttentionWrapper"): (
        "(float_workspace_buffer, use_cuda_graph=False, qo_indptr=None, kv_indptr=None, kv_indices=None, "
        "kv_len_arr=None, backend='auto')"
    ),
    ("flashinfer", "BatchMLAPagedAttentionWrapper.plan"): (
        "(self, qo_indptr, kv_indptr, kv_indices, kv_len_arr, num_heads, head_dim_ckv, head_dim_kpe, page_size, "
        "causal, sm_scale, q_data_type, kv_data_type, use_profiler=False)"
    ),
    ("flashinfer", "BatchMLAPagedAttentionWrapper.run"): (
        "(self, q_nope, q_pe, ckv_cache, kpe_cache, out=None, lse=None, return_lse=False, profiler_buffer=None, "
        "kv_len=None, page_table=None, return_lse_base_on_e=False, o_scale=None, *, ckv_scale=None, "
        "ckv_scale_arr=None, kpe_scale=None)"
    ),
    ("torch", "flex_attention"): (
        "(query, key, value, score_mod=None, block_mask=None, scale=None, enable_gqa=False, return_lse=False, "
        "kernel_options=None, *, return_aux=None)"
    ),
    ("torch", "varlen_attn"): (
        "(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, return_aux=None, scale=None, "
        "window_size=(-1, -1), enable_gqa=False, seqused_k=None, block_table=None, num_splits=None)"
    ),
    ("torch", "varlen_attn_out"): (
        "(out, query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, return_aux=None, scale=None, "
        "window_size=(-1, -1), enable_gqa=False, seqused_k=None, block_table=None, num_splits=None)"
    ),
    ("torch", "scaled_dot_product_attention"): (
        "(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, *, scale=None, enable_gqa=False)"
    ),
}
