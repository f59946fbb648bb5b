// Step 9, last of four. CUDA C++ on tensor cores: `mma.sync`, `ldmatrix`, `cp.async`, P kept in registers.
//
// The change. The products of step 6's tiles are instructions: `mma.sync` multiplies 16 x 16 by 16 x 8 numbers of 16
// bits in one go, with sums in float32. The 32 lanes of a warp hold the operands between them, each lane a few numbers
// at places that the instruction prescribes (step09_instructions.cuh says which).
//
// - `ldmatrix` brings tiles from shared memory to these places, four 8 x 8 blocks at a time, transposed on the way
// or not.
//   Kᵀ needs no transposing, since a row of K is a column of Kᵀ; V does.
// - P stays in registers. The places that two blocks of S = Q Kᵀ have as a result are the places that a block of P
// needs
//   as an operand of P V: exp, round to 16 bits, multiply.
// - K and V share one buffer. When S is made, K is no longer needed, so V is copied over it by `cp.async`, which
// goes past
//   the registers and makes no thread wait, and the softmax runs in the meantime. Q passed through the same buffer,
// once.
//
//     S = Q Kᵀ  |  V: copied  |  V is there  |  acc = alpha acc + P V
//               |  P = 2^(S scale log2 e - m)
//
// Why it is faster. A tensor core does in one instruction what took a warp 64 multiply-adds for each lane. What it
// still lacks of a product's kernel: the copy of the next K runs while nothing is computed (two buffers would hide it),
// and Hopper's larger instructions, which read their operands from shared memory by themselves.
//
// Tensor cores: 4 warps with 16 rows each, tiles of 64 keys, products of 16 x 16 by 16 x 8. HEAD_DIM (d) and HALF (f16
// or bf16) are set when this is compiled. float16 or bfloat16; d 16, 32, 64 or 128; a GPU of compute capability 8.0 or
// above.
//
// Run it: python -m flashtile_ladder step09_cuda_tensor_cores
#include "step09_instructions.cuh"

constexpr int D = HEAD_DIM;
constexpr int BLOCK = 64;            // rows of a block, keys of a tile
constexpr int THREADS = 128;
constexpr int STRIDE = D + 8;        // 16 bytes more: the 8 rows that ldmatrix reads at a time lie in different banks

// Rows [first, first + BLOCK) of a matrix [n, D], 16 bytes for each thread and turn; zeros beyond n.
__device__ void start_copy(half_bits (*tile)[STRIDE], const half_bits* matrix, int first, int n) {
    constexpr int PIECES = D / 8;  // of a row
    for (int i = threadIdx.x; i < BLOCK * PIECES; i += THREADS) {
        const int row = first + i / PIECES, column = i % PIECES * 8;
        const bool there = row < n;
        copy_16_bytes(&tile[i / PIECES][column], matrix + (there ? (long long)row * D + column : 0), there);
    }
}

// The tile that was copied last is there, for all threads.
__device__ void finish_copy() {
    wait_for_copies();
    __syncthreads();
}

extern "C" __global__ void __launch_bounds__(THREADS) attention_tensor_cores(
    const half_bits* __restrict__ q,  // [heads, N, D], heads of all sequences together
    const half_bits* __restrict__ k,  // [heads / group, N, D]
    const half_bits* __restrict__ v,  // [heads / group, N, D]
    half_bits* out,                   // [heads, N, D]
    float* lse,                       // [heads, N]
    int group, int n, float scale, int causal
) {
    __shared__ __align__(16) half_bits tile[BLOCK][STRIDE];  // the only one: of Q, then of K and V, one after the other

    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int first = blockIdx.x * BLOCK;
    const long long head = blockIdx.y;
    q += head * n * D;
    out += head * n * D;
    lse += head * n;
    k += head / group * n * D;
    v += head / group * n * D;

    // Q stays in registers: [16, D] for each warp, as A of D / 16 products.
    unsigned q_part[D / 16][4];
    start_copy(tile, q, first, n);
    finish_copy();
    for (int c = 0; c < D / 16; c++) load_matrices(q_part[c], &tile[16 * warp + lane % 16][16 * c + lane / 16 * 8]);

    float acc[D / 8][4];  // [16, D] for each warp
    for (int c = 0; c < D / 8; c++)
        for (int e = 0; e < 4; e++) acc[c][e] = 0.0f;
    float m[2] = {MINUS_INFINITY, MINUS_INFINITY}, l[2] = {0.0f, 0.0f};  // of the rows g and g + 8; l: this lane's part
    const int row[2] = {first + 16 * warp + lane / 4, first + 16 * warp + lane / 4 + 8};
    const float scale_log2 = scale * LOG2_E;

    const int end = causal ? min(first + BLOCK, n) : n;
    for (int start = 0; start < end; start += BLOCK) {
        __syncthreads();  // no thread reads Q, or the last V, any more
        start_copy(tile, k, start, n);
        finish_copy();

        float s[BLOCK / 8][4];  // S = Q Kᵀ, [16, BLOCK] for each warp
        for (int j = 0; j < BLOCK / 8; j++)
            for (int e = 0; e < 4; e++) s[j][e] = 0.0f;
        for (int j = 0; j < BLOCK / 16; j++) {  // 16 keys: two products side by side
            for (int c = 0; c < D / 16; c++) {
                unsigned k_part[4];  // a row of K is a column of B = Kᵀ, which is how B is wanted: not transposed
                load_matrices(k_part, &tile[16 * j + lane / 16 * 8 + lane % 8][16 * c + lane / 8 % 2 * 8]);
                multiply_add(s[2 * j], q_part[c], k_part[0], k_part[1]);
                multiply_add(s[2 * j + 1], q_part[c], k_part[2], k_part[3]);
            }
        }

        __syncthreads();  // no thread reads K any more: V takes its place
        start_copy(tile, v, start, n);  // ... and travels during the softmax

        const bool partial = start + BLOCK > n || (causal && start + BLOCK > first);
        for (int j = 0; j < BLOCK / 8; j++) {
            for (int e = 0; e < 4; e++) {
                const int key = start + 8 * j + lane % 4 * 2 + e % 2;
                s[j][e] *= scale_log2;
                if (partial && (key >= n || (causal && key > row[e / 2]))) s[j][e] = MINUS_INFINITY;
            }
        }
        for (int r = 0; r < 2; r++) {
            float m_new = m[r];
            for (int j = 0; j < BLOCK / 8; j++) m_new = fmaxf(m_new, fmaxf(s[j][2 * r], s[j][2 * r + 1]));
            m_new = row_max(m_new);  // finite: the first tile has key 0, which all rows see
            const float alpha = exp2f(m[r] - m_new);
            m[r] = m_new;
            l[r] *= alpha;
            for (int j = 0; j < BLOCK / 8; j++) {
                for (int e = 2 * r; e < 2 * r + 2; e++) {
                    s[j][e] = exp2f(s[j][e] - m_new);
                    l[r] += s[j][e];
                }
            }
            for (int c = 0; c < D / 8; c++) {
                acc[c][2 * r] *= alpha;
                acc[c][2 * r + 1] *= alpha;
            }
        }

        finish_copy();
        for (int j = 0; j < BLOCK / 16; j++) {
            // A lane's parts of two blocks of C are its part of a block of A: P never leaves the registers.
            const unsigned p[4] = {
                pack(s[2 * j][0], s[2 * j][1]),
                pack(s[2 * j][2], s[2 * j][3]),
                pack(s[2 * j + 1][0], s[2 * j + 1][1]),
                pack(s[2 * j + 1][2], s[2 * j + 1][3]),
            };
            for (int c = 0; c < D / 16; c++) {
                unsigned v_part[4];  // here a row of V is a row of B: transposed on the way
                load_transposed_matrices(v_part, &tile[16 * j + lane % 16][16 * c + lane / 16 * 8]);
                multiply_add(acc[2 * c], p, v_part[0], v_part[1]);
                multiply_add(acc[2 * c + 1], p, v_part[2], v_part[3]);
            }
        }
    }

    for (int r = 0; r < 2; r++) {
        const float sum = row_sum(l[r]);
        if (row[r] >= n) continue;
        for (int c = 0; c < D / 8; c++) {
            half_bits* pair = out + (long long)row[r] * D + 8 * c + lane % 4 * 2;
            *reinterpret_cast<unsigned*>(pair) = pack(acc[c][2 * r] / sum, acc[c][2 * r + 1] / sum);
        }
        if (lane % 4 == 0) lse[row[r]] = m[r] / LOG2_E + logf(sum);
    }
}
