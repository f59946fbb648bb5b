// The running log-sum-exp in CUDA C++: a thread for each row, a tile of keys at a time; one logarithm for each tile.
// HEAD_DIM (d), BLOCK_N and THREADS (of a block) are set when this is compiled. running_lse.py says what is lost.
//
// Unlike step09_cuda_rows.cu, rows are outside: a block has 128 of them and q, acc, m and lse of a row stay in
// registers; the 32 scores of a tile are in shared memory. Each thread takes the tile's maximum and sum by itself, so there is no
// reduction across threads, and takes one logarithm for each tile.
//
// float32, d 16, 32 or 64.

constexpr int D = HEAD_DIM;

extern "C" __global__ void attention_running_lse(
    const float* __restrict__ q,  // [heads, N, D], heads of all sequences together
    const float* __restrict__ k,  // [heads / group, N, D]
    const float* __restrict__ v,  // [heads / group, N, D]
    float* out,                   // [heads, N, D]
    float* lse,                   // [heads, N]
    int group, int n, float scale, int causal
) {
    __shared__ float k_tile[BLOCK_N][D];
    __shared__ float v_tile[BLOCK_N][D];
    __shared__ float s[BLOCK_N][THREADS];  // thread t has column t to itself: 32 lanes, 32 banks

    const long long head = blockIdx.y;
    const int first = blockIdx.x * THREADS, row = first + threadIdx.x;
    q += (head * n + row) * D;
    out += (head * n + row) * D;
    k += head / group * n * D;
    v += head / group * n * D;

    float q_row[D], acc[D];
#pragma unroll
    for (int c = 0; c < D; c++) {
        q_row[c] = row < n ? scale * q[c] : 0.0f;
        acc[c] = 0.0f;
    }
    float m = MINUS_INFINITY, lse_row = MINUS_INFINITY;

    const int end = causal ? min(first + THREADS, n) : n;
    for (int start = 0; start < end; start += BLOCK_N) {
        const int keys = min(BLOCK_N, n - start);
        __syncthreads();  // the last tile is no longer needed
        for (int i = threadIdx.x; i < keys * D; i += THREADS) {
            k_tile[i / D][i % D] = k[(long long)start * D + i];
            v_tile[i / D][i % D] = v[(long long)start * D + i];
        }
        __syncthreads();  // the tile is there

        const int seen = causal ? min(keys, row - start + 1) : keys;
        if (row >= n || seen <= 0) continue;  // barriers are at the top: every thread comes to them
        float m_new = m;
        for (int j = 0; j < seen; j++) {
            float x = 0.0f;
#pragma unroll
            for (int c = 0; c < D; c++) x += q_row[c] * k_tile[j][c];
            s[j][threadIdx.x] = x;
            m_new = fmaxf(m_new, x);
        }
        const float alpha = expf(m - m_new);
#pragma unroll
        for (int c = 0; c < D; c++) acc[c] *= alpha;
        float sum = 0.0f;
        for (int j = 0; j < seen; j++) {
            const float p = expf(s[j][threadIdx.x] - m_new);
            sum += p;
#pragma unroll
            for (int c = 0; c < D; c++) acc[c] += p * v_tile[j][c];
        }
        lse_row = m_new + logf(expf(lse_row - m_new) + sum);
        m = m_new;
    }
    if (row >= n) return;
    const float factor = expf(m - lse_row);
#pragma unroll
    for (int c = 0; c < D; c++) out[c] = factor * acc[c];
    lse[head * n + row] = lse_row;
}
