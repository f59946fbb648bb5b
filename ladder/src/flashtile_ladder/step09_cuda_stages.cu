// Step 9, fifth. Two stages of loads, a swizzle in place of padding, and 128 rows: the kernel before, made to wait less.
//
// The change. The products are those of step09_cuda_tensor_cores, instruction for instruction.
//
// - Two stages. K and V of the next tile are copied while this one is multiplied, into buffers of their own. What a
//   tile needs was asked for a whole tile ago, so that the wait at its begin is short, and one barrier for each tile
//   says both: all copies are there, and no thread reads the buffers any more that are filled next.
// - 128 rows, 16 for each of 8 warps: K and V are read half as often.
// - Swizzle. The eight rows that ldmatrix fetches must lie in different banks. The kernel before adds 16 bytes to each
//   row; here piece p of row r, 16 bytes, lies at place p ^ (r % 8) of the row. The eight pieces p of eight rows are
//   then at eight places, no byte is unused, and the writes of a row are as even as before. (Where a row has fewer than
//   eight pieces, several rows share a line of 128 bytes, and r counts lines.)
//
//     load tile 0      | wait, barrier | load tile 1;  S, softmax, P V of tile 0  | wait, barrier | load tile 2;  ...
//
// Why it is faster. A tile's loads have a whole tile's time. On an H200 that is worth 5%: products that stop a warp stay.
//
// HEAD_DIM (d: 16, 32, 64, 128) and HALF (f16 or bf16) are set when this is compiled; float16 or bfloat16; a GPU of
// compute capability 8.0 or above. At d = 128 the tiles take 96 KB of shared memory.
//
// Run it: python -m flashtile_ladder step09_cuda_stages
#include "step09_instructions.cuh"

constexpr int D = HEAD_DIM, BLOCK_M = 128, BLOCK_N = 64, THREADS = 2 * BLOCK_M;
constexpr int PIECES = D / 8;  // of a row, 16 bytes each
constexpr int LINE = PIECES < 8 ? 8 / PIECES : 1, MASK = PIECES < 8 ? PIECES - 1 : 7;

extern __shared__ __align__(16) half_bits tiles[];  // Q [BLOCK_M, D]; then, for each stage, K and V [BLOCK_N, D]

// Where the piece lies that begins at this column, a multiple of 8.
__device__ int swizzled(int row, int column) { return row * D + (column / 8 ^ (row / LINE & MASK)) * 8; }

// Rows [first, first + ROWS) of a matrix [n, D] to a tile; zeros beyond n.
template <int ROWS>
__device__ void start_copy(half_bits* tile, const half_bits* matrix, int first, int n) {
    for (int i = threadIdx.x; i < ROWS * PIECES; i += THREADS) {
        const int row = i / PIECES, column = i % PIECES * 8;
        const bool there = first + row < n;
        copy_16_bytes(tile + swizzled(row, column), matrix + (there ? (long long)(first + row) * D + column : 0), there);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) attention_stages(
    const half_bits* __restrict__ q,  // [heads, N, D], heads of all sequences together
    const half_bits* __restrict__ k,  // [heads / group, N, D]
    const half_bits* __restrict__ v,  // [heads / group, N, D]
    half_bits* out,                   // [heads, N, D]
    float* lse,                       // [heads, N]
    int group, int n, float scale, int causal
) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int first = blockIdx.x * BLOCK_M;
    const long long head = blockIdx.y;
    q += head * n * D;
    out += head * n * D;
    lse += head * n;
    k += head / group * n * D;
    v += head / group * n * D;

    half_bits* stages = tiles + BLOCK_M * D;  // [2][2][BLOCK_N, D]: stage, then K or V
    start_copy<BLOCK_M>(tiles, q, first, n);
    start_copy<BLOCK_N>(stages, k, 0, n);
    start_copy<BLOCK_N>(stages + BLOCK_N * D, v, 0, n);

    unsigned q_part[D / 16][4];  // [16, D] for each warp, as A of D / 16 products
    float acc[D / 8][4];         // [16, D] for each warp
#pragma unroll
    for (int c = 0; c < D / 8; c++)
        for (int e = 0; e < 4; e++) acc[c][e] = 0.0f;
    float m[2] = {MINUS_INFINITY, MINUS_INFINITY}, l[2] = {0.0f, 0.0f};  // of the rows g and g + 8; l: this lane's part
    const int row[2] = {first + 16 * warp + lane / 4, first + 16 * warp + lane / 4 + 8};
    const float scale_log2 = scale * LOG2_E;

    const int end = causal ? min(first + BLOCK_M, n) : n;
    for (int start = 0; start < end; start += BLOCK_N) {
        half_bits* k_tile = stages + start / BLOCK_N % 2 * 2 * BLOCK_N * D;
        half_bits* v_tile = k_tile + BLOCK_N * D;
        wait_for_copies();
        __syncthreads();  // this tile is there for all threads, and no thread reads the last one any more
        if (start == 0) {
#pragma unroll
            for (int c = 0; c < D / 16; c++)
                load_matrices(q_part[c], tiles + swizzled(16 * warp + lane % 16, 16 * c + lane / 16 * 8));
        }
        if (start + BLOCK_N < end) {  // to the buffers of the last tile: they travel as long as this one is multiplied
            half_bits* next = stages + (start / BLOCK_N + 1) % 2 * 2 * BLOCK_N * D;
            start_copy<BLOCK_N>(next, k, start + BLOCK_N, n);
            start_copy<BLOCK_N>(next + BLOCK_N * D, v, start + BLOCK_N, n);
        }

        float s[BLOCK_N / 8][4];  // S = Q Kᵀ, [16, BLOCK_N] for each warp
#pragma unroll
        for (int j = 0; j < BLOCK_N / 8; j++)
            for (int e = 0; e < 4; e++) s[j][e] = 0.0f;
#pragma unroll
        for (int c = 0; c < D / 16; c++) {
#pragma unroll
            for (int j = 0; j < BLOCK_N / 16; j++) {  // 16 keys: two products side by side
                unsigned k_part[4];
                load_matrices(k_part, k_tile + swizzled(16 * j + lane / 16 * 8 + lane % 8, 16 * c + lane / 8 % 2 * 8));
                multiply_add(s[2 * j], q_part[c], k_part[0], k_part[1]);
                multiply_add(s[2 * j + 1], q_part[c], k_part[2], k_part[3]);
            }
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
            for (int j = 0; j < BLOCK_N / 8; j++)
                for (int e = 2 * r; e < 2 * r + 2; e++) m_new = fmaxf(m_new, s[j][e]);
            m_new = row_max(m_new);  // finite: the first tile has key 0, which all rows see
            const float alpha = exp2f(m[r] - m_new);
            m[r] = m_new;
            l[r] *= alpha;
#pragma unroll
            for (int j = 0; j < BLOCK_N / 8; j++)
                for (int e = 2 * r; e < 2 * r + 2; e++) l[r] += s[j][e] = exp2f(s[j][e] - m_new);
#pragma unroll
            for (int c = 0; c < D / 8; c++)
                for (int e = 2 * r; e < 2 * r + 2; e++) acc[c][e] *= alpha;
        }

#pragma unroll
        for (int j = 0; j < BLOCK_N / 16; j++) {
            const unsigned p[4] = {
                pack(s[2 * j][0], s[2 * j][1]),
                pack(s[2 * j][2], s[2 * j][3]),
                pack(s[2 * j + 1][0], s[2 * j + 1][1]),
                pack(s[2 * j + 1][2], s[2 * j + 1][3]),
            };
#pragma unroll
            for (int c = 0; c < D / 16; c++) {
                unsigned v_part[4];
                load_transposed_matrices(v_part, v_tile + swizzled(16 * j + lane % 16, 16 * c + lane / 16 * 8));
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
        for (int c = 0; c < D / 8; c++) {
            half_bits* pair = out + (long long)row[r] * D + 8 * c + lane % 4 * 2;
            *reinterpret_cast<unsigned*>(pair) = pack(acc[c][2 * r] / sum, acc[c][2 * r + 1] / sum);
        }
        if (lane % 4 == 0) lse[row[r]] = m[r] / LOG2_E + logf(sum);
    }
}
