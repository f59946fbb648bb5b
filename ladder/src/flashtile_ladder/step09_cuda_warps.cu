// Step 9, second of four. CUDA C++: one block for each query position, reductions by warp shuffles.
//
// The change. Rows are blocks of their own, so a call of one head has N of them. The 32 threads of a warp, its lanes,
// share a key: lane t multiplies the numbers t, t + 32, ... of q and k, and five exchanges between registers of the
// warp, `__shfl_xor_sync`, add the products up, without shared memory and without a barrier:
//
//     x + x of the lane at distance 1, then 2, 4, 8, 16:    every lane has the sum of all 32
//
// Each of four warps keeps the online softmax of every fourth key, and step 1's merge joins the four at the end:
//
//     m = max_w m_w        l = sum_w l_w exp(m_w - m)        O = sum_w acc_w exp(m_w - m) / l
//
// Why it is faster. All of the GPU has work, and 32 lanes read 32 neighbouring numbers, which is one access to memory
// where the kernel before made 32. Heads come in groups that share K and V, and causal ends the loop at the row. It
// lacks this: each row reads all of K and V for itself, N times in all, and five exchanges for each key take time.
//
// HEAD_DIM (d) and WARPS are set when this is compiled. float32, d up to 256.
//
// Run it: python -m flashtile_ladder step09_cuda_warps

constexpr int D = HEAD_DIM;
constexpr int PER_LANE = (D + 31) / 32;  // lane t has the numbers t, t + 32, ... of a row

// After log2(32) exchanges each lane has the sum: neighbours first, then pairs, fours, ...
__device__ float warp_sum(float x) {
    for (int distance = 1; distance < 32; distance *= 2) x += __shfl_xor_sync(0xffffffffu, x, distance);
    return x;
}

extern "C" __global__ void attention_warps(
    const float* __restrict__ q,  // [heads, N, D], heads of all sequences together
    const float* __restrict__ k,  // [heads / group, N, D]
    const float* __restrict__ v,  // [heads / group, N, D]
    float* out,                   // [heads, N, D]
    float* lse,                   // [heads, N]
    int group, int n, float scale, int causal
) {
    __shared__ float m_of[WARPS], l_of[WARPS], acc_of[WARPS][D];

    const int row = blockIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const long long head = blockIdx.y;
    q += (head * n + row) * D;
    k += head / group * n * D;  // `group` query heads share a key head
    v += head / group * n * D;

    float q_lane[PER_LANE], acc[PER_LANE];
    for (int i = 0; i < PER_LANE; i++) {
        const int c = lane + 32 * i;
        q_lane[i] = c < D ? scale * q[c] : 0.0f;
        acc[i] = 0.0f;
    }
    float m = MINUS_INFINITY, l = 0.0f;

    const int seen = causal ? row + 1 : n;
    for (int j = warp; j < seen; j += WARPS) {  // the online softmax, one key at a time
        float x = 0.0f;
        for (int i = 0; i < PER_LANE; i++) {
            const int c = lane + 32 * i;
            if (c < D) x += q_lane[i] * k[(long long)j * D + c];  // 32 neighbours in one load
        }
        x = warp_sum(x);
        const float m_new = fmaxf(m, x);
        const float alpha = expf(m - m_new), p = expf(x - m_new);
        l = alpha * l + p;
        for (int i = 0; i < PER_LANE; i++) {
            const int c = lane + 32 * i;
            acc[i] = alpha * acc[i] + (c < D ? p * v[(long long)j * D + c] : 0.0f);
        }
        m = m_new;
    }

    // The warps' states are merged as in step 1. One that had no key has m = -inf, l = 0 and changes nothing.
    for (int i = 0; i < PER_LANE; i++) {
        const int c = lane + 32 * i;
        if (c < D) acc_of[warp][c] = acc[i];
    }
    if (lane == 0) {
        m_of[warp] = m;
        l_of[warp] = l;
    }
    __syncthreads();
    float m_all = MINUS_INFINITY, l_all = 0.0f;
    for (int w = 0; w < WARPS; w++) m_all = fmaxf(m_all, m_of[w]);
    for (int w = 0; w < WARPS; w++) l_all += l_of[w] * expf(m_of[w] - m_all);
    for (int c = threadIdx.x; c < D; c += 32 * WARPS) {
        float sum = 0.0f;
        for (int w = 0; w < WARPS; w++) sum += acc_of[w][c] * expf(m_of[w] - m_all);
        out[(head * n + row) * D + c] = sum / l_all;
    }
    if (threadIdx.x == 0) lse[head * n + row] = m_all + logf(l_all);
}
