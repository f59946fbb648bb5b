// Step 9, third of four. CUDA C++: 32 x 32 threads, tiles of 64 rows and 32 keys, arrays of registers.
//
// The change. A block takes 64 rows at a time, as FlashAttention-2 does (step 6), so K and V are read N / 64 times and
// not N times. Thread (x, y) has the rows y and y + 32 of the tile, and of each of them one score and d / 32 columns of
// the accumulator, in small arrays of registers:
//
//     S[y + 32 i, x] = q[y + 32 i] . k[x]              i = 0, 1
//     acc[y + 32 i, x + 32 c] += sum_j P[y + 32 i, j] v[j, x + 32 c]
//
// Why it is faster. Each tile of 64 rows is a block: 16 heads of 4,096 rows are 1,024 blocks, where the first kernel
// has 16 for 132 multiprocessors. A row of S lies across a warp, so its maximum and its sum take five exchanges for 32
// keys. What two rows of registers do not give is fewer reads of shared memory: a product of R rows by C columns of
// registers takes R + C reads for R C products, which is 3 for 2 here, and 1 for 1 in the first kernel, whose row of q
// is in registers. Tiles of registers pay when they are larger: 16 reads for 64 products at 8 x 8.
//
// Why it is easy to get wrong. Every index has three parts: which tile, which thread, which register. `BUGS` of
// _host/cuda_steps.py has three mix-ups of these parts; each computes right results for some problems, and the page
// shows which test sees it.
//
// HEAD_DIM (d) and ROWS, the rows of a thread, are set when this is compiled. float32, d 16, 32 or 64: more does not fit
// 48 KB.
//
// Run it: python -m flashtile_ladder step09_cuda_registers

constexpr int D = HEAD_DIM;
constexpr int BLOCK = 32;
constexpr int BLOCK_M = BLOCK * ROWS;
constexpr int COLUMNS = (D + BLOCK - 1) / BLOCK;

// The 32 threads with one y are a warp: a row of S lies in a warp, and its maximum and sum take five exchanges.
__device__ float row_max(float x) {
    for (int distance = 1; distance < 32; distance *= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, distance));
    return x;
}

__device__ float row_sum(float x) {
    for (int distance = 1; distance < 32; distance *= 2) x += __shfl_xor_sync(0xffffffffu, x, distance);
    return x;
}

extern "C" __global__ void __launch_bounds__(BLOCK * BLOCK) attention_registers(
    const float* __restrict__ q,  // [heads, N, D], heads of all sequences together
    const float* __restrict__ k,  // [heads / group, N, D]
    const float* __restrict__ v,  // [heads / group, N, D]
    float* out,                   // [heads, N, D]
    float* lse,                   // [heads, N]
    int group, int n, float scale, int causal
) {
    __shared__ float q_tile[BLOCK_M][D];
    __shared__ float k_tile[BLOCK][D + 1];  // thread x reads row x: without the 1, all 32 would want the same bank
    __shared__ float v_tile[BLOCK][D];
    __shared__ float p_tile[BLOCK_M][BLOCK];

    const int x = threadIdx.x, y = threadIdx.y;
    const int first = blockIdx.x * BLOCK_M;
    const long long head = blockIdx.y;
    q += head * n * D;
    out += head * n * D;
    lse += head * n;
    k += head / group * n * D;
    v += head / group * n * D;

    float acc[ROWS][COLUMNS], m[ROWS], l[ROWS];  // each of the 32 threads of a row has its m and l
    for (int i = 0; i < ROWS; i++) {
        const int row = first + y + BLOCK * i;
        for (int c = x; c < D; c += BLOCK) {
            q_tile[y + BLOCK * i][c] = row < n ? scale * q[(long long)row * D + c] : 0.0f;
        }
        for (int c = 0; c < COLUMNS; c++) acc[i][c] = 0.0f;
        m[i] = MINUS_INFINITY;
        l[i] = 0.0f;
    }

    const int end = causal ? min(first + BLOCK_M, n) : n;
    for (int start = 0; start < end; start += BLOCK) {
        for (int c = x; c < D; c += BLOCK) {  // row y of the tile, neighbouring threads neighbouring columns
            const bool there = start + y < n;
            k_tile[y][c] = there ? k[(long long)(start + y) * D + c] : 0.0f;
            v_tile[y][c] = there ? v[(long long)(start + y) * D + c] : 0.0f;
        }
        __syncthreads();  // the tiles are there

        float s[ROWS];  // column x of S
        for (int i = 0; i < ROWS; i++) s[i] = 0.0f;
        for (int c = 0; c < D; c++) {
            const float k_c = k_tile[x][c];  // one read for ROWS products
            for (int i = 0; i < ROWS; i++) s[i] += q_tile[y + BLOCK * i][c] * k_c;
        }
        for (int i = 0; i < ROWS; i++) {
            const int row = first + y + BLOCK * i, key = start + x;
            if (key >= n || (causal && key > row)) s[i] = MINUS_INFINITY;
            const float m_new = fmaxf(m[i], row_max(s[i]));  // finite: the first tile has key 0, which all rows see
            const float alpha = expf(m[i] - m_new);
            const float p = expf(s[i] - m_new);
            l[i] = alpha * l[i] + row_sum(p);
            m[i] = m_new;
            for (int c = 0; c < COLUMNS; c++) acc[i][c] *= alpha;
            p_tile[y + BLOCK * i][x] = p;
        }
        __syncwarp();  // a row of P is written and read by one warp
        for (int j = 0; j < BLOCK; j++) {
            for (int c = 0; c < COLUMNS; c++) {
                if (x + BLOCK * c >= D) continue;
                const float v_c = v_tile[j][x + BLOCK * c];
                for (int i = 0; i < ROWS; i++) acc[i][c] += p_tile[y + BLOCK * i][j] * v_c;
            }
        }
        __syncthreads();  // no thread reads the tiles any more
    }

    for (int i = 0; i < ROWS; i++) {
        const int row = first + y + BLOCK * i;
        if (row >= n) continue;
        for (int c = 0; c < COLUMNS; c++) {
            if (x + BLOCK * c < D) out[(long long)row * D + x + BLOCK * c] = acc[i][c] / l[i];
        }
        if (x == 0) lse[row] = m[i] + logf(l[i]);
    }
}
