// Step 9, first of four. CUDA C++: one block for each head, one thread for each row, keys outside.
//
// The change. Triton's programs own tiles and never mention a thread; here each thread is written out. This is step 5,
// FlashAttention-1, as a kernel: the outer loop takes a block of K and V into shared memory, and the inner one brings
// all rows past it, thread t taking the rows t, t + 128, ... With l O what a row had before it was normalised,
//
//     acc = l O;   for each key j of the block:   m_new = max(m, x_j)      alpha = exp(m - m_new)
//                                                 l = alpha l + exp(x_j - m_new)
//                                                 acc = alpha acc + exp(x_j - m_new) v_j
//     O = acc / l
//
// and O, l and m go back to HBM after each block.
//
// Why it is leaner than standard attention: neither S nor P is in HBM. Why it is slow: one block for each head leaves
// nearly all of a GPU idle, threads that read rows of their own read D numbers apart, and the products run on the
// ordinary units. The next three kernels take these up in turn.
//
// HEAD_DIM (d) and BLOCK_N are set when this is compiled; blockDim.x is the number of rows that go in step. float32,
// d 16, 32 or 64: q and acc of a row are registers.
//
// Run it: python -m flashtile_ladder step09_cuda_rows

constexpr int D = HEAD_DIM;

extern "C" __global__ void attention_rows(
    const float* __restrict__ q,  // [heads, N, D], heads of all sequences together
    const float* __restrict__ k,  // [heads / group, N, D]
    const float* __restrict__ v,  // [heads / group, N, D]
    float* out,                   // [heads, N, D], zeros
    float* lse,                   // [heads, N]
    int group, int n, float scale, int causal,
    float* m,  // [heads, N], -inf: in HBM, as in the paper
    float* l   // [heads, N], zeros
) {
    __shared__ float k_tile[BLOCK_N][D];
    __shared__ float v_tile[BLOCK_N][D];

    const long long head = blockIdx.y;
    q += head * n * D;
    out += head * n * D;
    lse += head * n;
    m += head * n;
    l += head * n;
    k += head / group * n * D;
    v += head / group * n * D;

    for (int start = 0; start < n; start += BLOCK_N) {  // key blocks: outer loop
        const int keys = min(BLOCK_N, n - start);
        // Neighbouring threads copy neighbouring numbers, whatever row these belong to: coalesced.
        for (int i = threadIdx.x; i < keys * D; i += blockDim.x) {
            k_tile[i / D][i % D] = k[(long long)start * D + i];
            v_tile[i / D][i % D] = v[(long long)start * D + i];
        }
        __syncthreads();  // the tile is there

        for (int row = threadIdx.x; row < n; row += blockDim.x) {  // rows: inner loop
            const int seen = causal ? min(keys, row - start + 1) : keys;
            if (seen <= 0) continue;
            float q_row[D], acc[D];  // in registers: sizes and unrolled loops are known when this is compiled
            float m_row = m[row], l_row = l[row];
#pragma unroll
            for (int c = 0; c < D; c++) {
                q_row[c] = scale * q[(long long)row * D + c];  // neighbouring threads read D numbers apart: strided
                acc[c] = l_row * out[(long long)row * D + c];  // what the row had before it was normalised
            }
            for (int j = 0; j < seen; j++) {  // the online softmax, one key at a time
                float x = 0.0f;
#pragma unroll
                for (int c = 0; c < D; c++) x += q_row[c] * k_tile[j][c];  // all threads read one address: one read
                const float m_new = fmaxf(m_row, x);
                const float alpha = expf(m_row - m_new), p = expf(x - m_new);
                l_row = alpha * l_row + p;
#pragma unroll
                for (int c = 0; c < D; c++) acc[c] = alpha * acc[c] + p * v_tile[j][c];
                m_row = m_new;
            }
#pragma unroll
            for (int c = 0; c < D; c++) out[(long long)row * D + c] = acc[c] / l_row;  // for each block, as in the paper
            m[row] = m_row;
            l[row] = l_row;
        }
        __syncthreads();  // no thread reads the tile any more
    }
    for (int row = threadIdx.x; row < n; row += blockDim.x) lse[row] = m[row] + logf(l[row]);
}
