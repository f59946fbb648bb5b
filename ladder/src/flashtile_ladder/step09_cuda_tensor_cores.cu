// Step 9, last of four. CUDA C++ on tensor cores: `mma.sync`, `ldmatrix`, `cp.async`, P kept in registers.
//
// The change. The products of step 6's tiles are instructions: `mma.sync` multiplies 16 x 16 by 16 x 8 numbers of 16
// bits in one go, with sums in float32. The 32 lanes of a warp hold the operands between them, each lane a few numbers
// at places that the instruction prescribes (step09_instructions.cuh says which). A warp has 16 rows.
//
// - `ldmatrix` brings tiles from shared memory to these places, four 8 x 8 blocks at a time, transposed on the way or
//   not. Kᵀ needs no transposing, since a row of K is a column of Kᵀ; V does.
// - P stays in registers. The places that two blocks of S = Q Kᵀ have as a result are those that a block of P needs
//   as an operand of P V: exp, round to 16 bits, multiply.
// - `cp.async` copies to shared memory past the registers, and makes no thread wait. With one stage K and V share a
//   buffer: when S is made, K is no longer needed, and V is copied over it while the softmax runs.
// - With two stages they have a buffer each: V is copied during S and the softmax, the next K during P V, and two
//   barriers for each tile do where one stage takes four.
//
//     one stage    K: waited for  |  S = Q Kᵀ  |  softmax; V: copied  |  acc = alpha acc + P V
//     two stages                  |  S = Q Kᵀ;    softmax; V: copied  |  acc = alpha acc + P V; next K: copied
//
// Why it is faster. A tensor core does in one instruction what took a warp 64 multiply-adds for each lane. It lacks
// Hopper's larger instructions, which read their operands from shared memory by themselves and make no warp wait.
//
// Tiles have BLOCK_M rows, 16 for each warp, and BLOCK_N keys. They may take more than the 48 KB that arrays of a known
// size may have, so they lie in dynamic shared memory, whose size the launch says (related/shared_memory.py has it as a
// formula). HEAD_DIM (d, a multiple of 8 up to 256), HALF (f16 or bf16), BLOCK_M, BLOCK_N and STAGES are set when this
// is compiled. float16 or bfloat16; a GPU of compute capability 8.0 or above.
//
// Run it: python -m flashtile_ladder step09_cuda_tensor_cores
#include "step09_instructions.cuh"

constexpr int D = (HEAD_DIM + 15) / 16 * 16;  // of a tile: columns from HEAD_DIM on are zeros and add nothing
constexpr int STRIDE = D + 8;                 // 16 bytes more: the 8 rows of an ldmatrix lie in different banks
constexpr int THREADS = 2 * BLOCK_M;
constexpr bool Q_STAYS = D <= 128;  // in registers: at d = 256 they are full of acc

extern __shared__ __align__(16) half_bits tiles[];  // [BLOCK_M + STAGES * BLOCK_N, STRIDE]: as large as the launch says

// Rows [first, first + ROWS) of a matrix [n, HEAD_DIM] to a tile [ROWS, STRIDE]; zeros beyond n and beyond HEAD_DIM.
template <int ROWS>
__device__ void start_copy(half_bits* tile, const half_bits* matrix, int first, int n) {
    constexpr int PIECES = D / 8;  // of a row, 16 bytes each
    for (int i = threadIdx.x; i < ROWS * PIECES; i += THREADS) {
        const int row = first + i / PIECES, column = i % PIECES * 8;
        const bool there = row < n && column < HEAD_DIM;
        const half_bits* from = matrix + (there ? (long long)row * HEAD_DIM + column : 0);
        copy_16_bytes(tile + i / PIECES * STRIDE + column, from, there);
    }
}

// The last copy is there, for all threads; and all threads have come here.
__device__ void finish_copy() {
    wait_for_copies();
    __syncthreads();
}

extern "C" __global__ void __launch_bounds__(THREADS) attention_tensor_cores(
    const half_bits* __restrict__ q,  // [heads, N, HEAD_DIM], heads of all sequences together
    const half_bits* __restrict__ k,  // [heads / group, N, HEAD_DIM]
    const half_bits* __restrict__ v,  // [heads / group, N, HEAD_DIM]
    half_bits* out,                   // [heads, N, HEAD_DIM]
    float* lse,                       // [heads, N]
    int group, int n, float scale, int causal
) {
    half_bits* q_tile = tiles;
    half_bits* k_tile = tiles + BLOCK_M * STRIDE;
    half_bits* v_tile = STAGES == 1 ? k_tile : k_tile + BLOCK_N * STRIDE;

    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int first = blockIdx.x * BLOCK_M;
    const long long head = blockIdx.y;
    q += head * n * HEAD_DIM;
    out += head * n * HEAD_DIM;
    lse += head * n;
    k += head / group * n * HEAD_DIM;
    v += head / group * n * HEAD_DIM;

    start_copy<BLOCK_M>(q_tile, q, first, n);
    if (STAGES == 2) start_copy<BLOCK_N>(k_tile, k, 0, n);

    finish_copy();
    unsigned q_part[D / 16][4];  // [16, D] for each warp, as A of D / 16 products
#pragma unroll
    for (int c = 0; c < D / 16 && Q_STAYS; c++)
        load_matrices(q_part[c], q_tile + (16 * warp + lane % 16) * STRIDE + 16 * c + lane / 16 * 8);

    float acc[D / 8][4];  // [16, D] for each warp
#pragma unroll
    for (int c = 0; c < D / 8; c++)
        for (int e = 0; e < 4; e++) acc[c][e] = 0.0f;
    float m[2] = {MINUS_INFINITY, MINUS_INFINITY}, l[2] = {0.0f, 0.0f};  // of the rows g and g + 8; l: this lane's part
    const int row[2] = {first + 16 * warp + lane / 4, first + 16 * warp + lane / 4 + 8};
    const float scale_log2 = scale * LOG2_E;

    const int end = causal ? min(first + BLOCK_M, n) : n;
    for (int start = 0; start < end; start += BLOCK_N) {
        if (STAGES == 1) {
            __syncthreads();  // no thread reads the last V any more
            start_copy<BLOCK_N>(k_tile, k, start, n);
        }
        finish_copy();  // K is there; with two stages it came during the last P V, which all threads have done
        if (STAGES == 2) start_copy<BLOCK_N>(v_tile, v, start, n);  // travels during S and its softmax

        float s[BLOCK_N / 8][4];  // S = Q Kᵀ, [16, BLOCK_N] for each warp
#pragma unroll
        for (int j = 0; j < BLOCK_N / 8; j++)
            for (int e = 0; e < 4; e++) s[j][e] = 0.0f;
#pragma unroll
        for (int c = 0; c < D / 16; c++) {
            if (!Q_STAYS)
                load_matrices(q_part[c], q_tile + (16 * warp + lane % 16) * STRIDE + 16 * c + lane / 16 * 8);
#pragma unroll
            for (int j = 0; j < BLOCK_N / 16; j++) {  // 16 keys: two products side by side
                unsigned k_part[4];  // a row of K is a column of B = Kᵀ, which is how B is wanted: not transposed
                const int key = 16 * j + lane / 16 * 8 + lane % 8;
                load_matrices(k_part, k_tile + key * STRIDE + 16 * c + lane / 8 % 2 * 8);
                multiply_add(s[2 * j], q_part[c], k_part[0], k_part[1]);
                multiply_add(s[2 * j + 1], q_part[c], k_part[2], k_part[3]);
            }
        }
        if (STAGES == 1) {
            __syncthreads();  // no thread reads K any more: V takes its place
            start_copy<BLOCK_N>(v_tile, v, start, n);  // ... and travels during the softmax
        }

        const bool partial = start + BLOCK_N > n || (causal && start + BLOCK_N > first);
#pragma unroll
        for (int j = 0; j < BLOCK_N / 8; j++) {
            for (int e = 0; e < 4; e++) {
                const int key = start + 8 * j + lane % 4 * 2 + e % 2;
                s[j][e] *= scale_log2;
                if (partial && (key >= n || (causal && key > row[e / 2]))) s[j][e] = MINUS_INFINITY;
            }
        }
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float m_new = m[r];
#pragma unroll
            for (int j = 0; j < BLOCK_N / 8; j++) m_new = fmaxf(m_new, fmaxf(s[j][2 * r], s[j][2 * r + 1]));
            m_new = row_max(m_new);  // finite: the first tile has key 0, which all rows see
            const float alpha = exp2f(m[r] - m_new);
            m[r] = m_new;
            l[r] *= alpha;
#pragma unroll
            for (int j = 0; j < BLOCK_N / 8; j++) {
                for (int e = 2 * r; e < 2 * r + 2; e++) {
                    s[j][e] = exp2f(s[j][e] - m_new);
                    l[r] += s[j][e];
                }
            }
#pragma unroll
            for (int c = 0; c < D / 8; c++) {
                acc[c][2 * r] *= alpha;
                acc[c][2 * r + 1] *= alpha;
            }
        }

        finish_copy();  // V is there; and no thread reads K any more
        if (STAGES == 2 && start + BLOCK_N < end) start_copy<BLOCK_N>(k_tile, k, start + BLOCK_N, n);  // during P V
#pragma unroll
        for (int j = 0; j < BLOCK_N / 16; j++) {
            // A lane's parts of two blocks of C are its part of a block of A: P never leaves the registers.
            const unsigned p[4] = {
                pack(s[2 * j][0], s[2 * j][1]),
                pack(s[2 * j][2], s[2 * j][3]),
                pack(s[2 * j + 1][0], s[2 * j + 1][1]),
                pack(s[2 * j + 1][2], s[2 * j + 1][3]),
            };
#pragma unroll
            for (int c = 0; c < D / 16; c++) {
                unsigned v_part[4];  // here a row of V is a row of B: transposed on the way
                load_transposed_matrices(v_part, v_tile + (16 * j + lane % 16) * STRIDE + 16 * c + lane / 16 * 8);
                multiply_add(acc[2 * c], p, v_part[0], v_part[1]);
                multiply_add(acc[2 * c + 1], p, v_part[2], v_part[3]);
            }
        }
    }

#pragma unroll
    for (int r = 0; r < 2; r++) {
        const float sum = row_sum(l[r]);
        if (row[r] >= n) continue;
#pragma unroll
        for (int c = 0; c < HEAD_DIM / 8; c++) {
            half_bits* pair = out + (long long)row[r] * HEAD_DIM + 8 * c + lane % 4 * 2;
            *reinterpret_cast<unsigned*>(pair) = pack(acc[c][2 * r] / sum, acc[c][2 * r + 1] / sum);
        }
        if (lane % 4 == 0) lse[row[r]] = m[r] / LOG2_E + logf(sum);
    }
}
