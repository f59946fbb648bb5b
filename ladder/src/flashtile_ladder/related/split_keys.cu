// Split-Q against split-K: what the warps of a block share out, rows or keys.
//
// A block of 4 warps has 64 rows, and goes through tiles of 64 keys. There are two ways to give each warp a quarter:
//
//     split-Q    16 rows, and all 64 keys of a tile (FlashAttention-2; step 9's fourth kernel). A warp's rows are its
//                own: m, l and acc stay in its registers, and warps exchange nothing
//     split-K    16 keys of each tile, and all 64 rows (here). Each warp has a state of every row, so four times the
//                accumulators, and the four states are merged through shared memory: m and l, then one acc after another
//
// Bytes from HBM and operations are the same. Shared memory is read differently: split-Q brings its Q once and all of K
// and V for each tile, split-K its part of K and V and all of Q. FlashAttention-1's kernel split keys and merged in each
// tile; here it is once, at the end, as Flash-Decoding does between blocks where there are too few rows to fill a GPU.
//
// HEAD_DIM (d: 16, 32 or 64, since acc takes 2 d registers of each thread) and HALF (f16 or bf16) are set when this is
// compiled. float16 or bfloat16. Launched by _host/cuda_steps.py; the table `cuda` has its time beside split-Q's.
#include "step09_instructions.cuh"

constexpr int D = HEAD_DIM;
constexpr int BLOCK = 64, WARPS = 4, THREADS = 32 * WARPS;
constexpr int STRIDE = D + 8;

// Rows [first, first + BLOCK) of a matrix [n, D]; zeros beyond n. All threads wait until they are there.
__device__ void copy(half_bits (*tile)[STRIDE], const half_bits* matrix, int first, int n) {
    constexpr int PIECES = D / 8;
    for (int i = threadIdx.x; i < BLOCK * PIECES; i += THREADS) {
        const int row = first + i / PIECES, column = i % PIECES * 8;
        const bool there = row < n;
        copy_16_bytes(&tile[i / PIECES][column], matrix + (there ? (long long)row * D + column : 0), there);
    }
    wait_for_copies();
    __syncthreads();
}

extern "C" __global__ void __launch_bounds__(THREADS) attention_split_keys(
    const half_bits* __restrict__ q,  // [heads, N, D], heads of all sequences together
    const half_bits* __restrict__ k,  // [heads / group, N, D]
    const half_bits* __restrict__ v,  // [heads / group, N, D]
    half_bits* out,                   // [heads, N, D]
    float* lse,                       // [heads, N]
    int group, int n, float scale, int causal
) {
    __shared__ __align__(16) half_bits q_tile[BLOCK][STRIDE];
    __shared__ __align__(16) half_bits tile[BLOCK][STRIDE];  // of K, then of V
    __shared__ float m_of[WARPS][BLOCK], l_of[WARPS][BLOCK], sum_of[BLOCK][D];

    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int first = blockIdx.x * BLOCK;
    const long long head = blockIdx.y;
    q += head * n * D;
    out += head * n * D;
    lse += head * n;
    k += head / group * n * D;
    v += head / group * n * D;
    copy(q_tile, q, first, n);

    float acc[BLOCK / 16][D / 8][4];  // [BLOCK, D] for each warp: four times the registers of split-Q
    float m[BLOCK / 16][2], l[BLOCK / 16][2];  // of the rows g and g + 8 of each 16
#pragma unroll
    for (int i = 0; i < BLOCK / 16; i++) {
        for (int r = 0; r < 2; r++) m[i][r] = MINUS_INFINITY, l[i][r] = 0.0f;
        for (int c = 0; c < D / 8; c++)
            for (int e = 0; e < 4; e++) acc[i][c][e] = 0.0f;
    }
    const float scale_log2 = scale * LOG2_E;

    const int end = causal ? min(first + BLOCK, n) : n;
    for (int start = 0; start < end; start += BLOCK) {
        __syncthreads();  // no thread reads the last V any more
        copy(tile, k, start, n);
        float s[BLOCK / 16][2][4];  // S = Q Kᵀ, [BLOCK, 16] for each warp
#pragma unroll
        for (int i = 0; i < BLOCK / 16; i++)
            for (int e = 0; e < 8; e++) s[i][e / 4][e % 4] = 0.0f;
#pragma unroll
        for (int c = 0; c < D / 16; c++) {
            unsigned k_part[4];  // this warp's 16 keys alone, for all rows
            load_matrices(k_part, &tile[16 * warp + lane / 16 * 8 + lane % 8][16 * c + lane / 8 % 2 * 8]);
#pragma unroll
            for (int i = 0; i < BLOCK / 16; i++) {
                unsigned q_part[4];
                load_matrices(q_part, &q_tile[16 * i + lane % 16][16 * c + lane / 16 * 8]);
                multiply_add(s[i][0], q_part, k_part[0], k_part[1]);
                multiply_add(s[i][1], q_part, k_part[2], k_part[3]);
            }
        }
        __syncthreads();  // no thread reads K any more: V takes its place
        copy(tile, v, start, n);

        unsigned p[BLOCK / 16][4];
#pragma unroll
        for (int i = 0; i < BLOCK / 16; i++) {
            for (int r = 0; r < 2; r++) {
                const int row = first + 16 * i + lane / 4 + 8 * r;
                float m_new = m[i][r];
                for (int j = 0; j < 2; j++) {
                    for (int e = 2 * r; e < 2 * r + 2; e++) {
                        const int key = start + 16 * warp + 8 * j + lane % 4 * 2 + e % 2;
                        const bool visible = key < n && !(causal && key > row);
                        s[i][j][e] = visible ? s[i][j][e] * scale_log2 : MINUS_INFINITY;
                        m_new = fmaxf(m_new, s[i][j][e]);
                    }
                }
                m_new = row_max(m_new);
                const float m_safe = m_new == MINUS_INFINITY ? 0.0f : m_new;  // a warp may have no key that a row sees
                const float alpha = exp2f(m[i][r] - m_safe);
                m[i][r] = m_new;
                l[i][r] *= alpha;
                for (int j = 0; j < 2; j++) {
                    for (int e = 2 * r; e < 2 * r + 2; e++) {
                        s[i][j][e] = exp2f(s[i][j][e] - m_safe);
                        l[i][r] += s[i][j][e];
                    }
                }
                for (int c = 0; c < D / 8; c++) {
                    acc[i][c][2 * r] *= alpha;
                    acc[i][c][2 * r + 1] *= alpha;
                }
            }
            for (int e = 0; e < 4; e++) p[i][e] = pack(s[i][e / 2][e % 2 * 2], s[i][e / 2][e % 2 * 2 + 1]);
        }
#pragma unroll
        for (int c = 0; c < D / 16; c++) {
            unsigned v_part[4];
            load_transposed_matrices(v_part, &tile[16 * warp + lane % 16][16 * c + lane / 16 * 8]);
#pragma unroll
            for (int i = 0; i < BLOCK / 16; i++) {
                multiply_add(acc[i][2 * c], p[i], v_part[0], v_part[1]);
                multiply_add(acc[i][2 * c + 1], p[i], v_part[2], v_part[3]);
            }
        }
    }

    // The merge, which split-Q does not have: maxima and sums of all warps, then their accumulators one by one.
#pragma unroll
    for (int i = 0; i < BLOCK / 16; i++) {
        for (int r = 0; r < 2; r++) {
            const float sum = row_sum(l[i][r]);
            if (lane % 4 == 0) {
                m_of[warp][16 * i + lane / 4 + 8 * r] = m[i][r];
                l_of[warp][16 * i + lane / 4 + 8 * r] = sum;
            }
        }
    }
    for (int i = threadIdx.x; i < BLOCK * D; i += THREADS) sum_of[i / D][i % D] = 0.0f;
    __syncthreads();  // the statistics of all warps are there
    for (int w = 0; w < WARPS; w++) {  // one at a time and in one order: the same bits always
        if (warp == w) {
#pragma unroll
            for (int i = 0; i < BLOCK / 16; i++) {
                for (int r = 0; r < 2; r++) {
                    const int row = 16 * i + lane / 4 + 8 * r;
                    float m_all = MINUS_INFINITY;
                    for (int other = 0; other < WARPS; other++) m_all = fmaxf(m_all, m_of[other][row]);
                    const float weight = exp2f(m[i][r] - m_all);
                    for (int c = 0; c < D / 8; c++) {
                        sum_of[row][8 * c + lane % 4 * 2] += weight * acc[i][c][2 * r];
                        sum_of[row][8 * c + lane % 4 * 2 + 1] += weight * acc[i][c][2 * r + 1];
                    }
                }
            }
        }
        __syncthreads();  // this warp has added its part
    }
    for (int i = threadIdx.x; i < BLOCK * D / 2; i += THREADS) {
        const int row = i / (D / 2), column = i % (D / 2) * 2;
        if (first + row >= n) continue;
        float m_all = MINUS_INFINITY, l_all = 0.0f;
        for (int w = 0; w < WARPS; w++) m_all = fmaxf(m_all, m_of[w][row]);
        for (int w = 0; w < WARPS; w++) l_all += l_of[w][row] * exp2f(m_of[w][row] - m_all);
        half_bits* pair = out + (long long)(first + row) * D + column;
        *reinterpret_cast<unsigned*>(pair) = pack(sum_of[row][column] / l_all, sum_of[row][column + 1] / l_all);
        if (column == 0) lse[first + row] = m_all / LOG2_E + logf(l_all);
    }
}
