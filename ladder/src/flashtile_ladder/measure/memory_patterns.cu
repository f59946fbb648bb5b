// Two questions about memory, asked by kernels that do nothing else. memory_patterns.py says what is measured.

// Every number of x is read once, whatever the stride: x is a matrix [rows, stride], and it is read column by column.
// With a stride of 1 the 32 lanes of a warp read 32 neighbours. rows = 2^log2_rows; sums has one for each thread.
extern "C" __global__ void read_columns(const float* __restrict__ x, float* sums, int log2_rows, int stride) {
    const long long count = (long long)stride << log2_rows, threads = (long long)gridDim.x * blockDim.x;
    const long long thread = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    const long long last_row = (1LL << log2_rows) - 1;
    float sum = 0.0f;
    for (long long i = thread; i < count; i += threads) sum += x[(i & last_row) * stride + (i >> log2_rows)];
    sums[thread] = sum;
}

#ifdef PADDING
// Lane t reads row t of a tile in shared memory, a column at a time, as a thread does with its key. Number i lies in
// bank i % 32, and a bank serves one address at a time: rows of 32 numbers put a whole column into one bank, rows of 33
// put it into 32 of them. blockDim.x is 32.
extern "C" __global__ void read_shared_columns(const float* __restrict__ x, float* sums, int repeats) {
    __shared__ float tile[32][32 + PADDING];
    const int lane = threadIdx.x;
    for (int row = 0; row < 32; row++) tile[row][lane] = x[row * 32 + lane];
    __syncthreads();
    const volatile float* mine = tile[lane];  // volatile: each read takes place, also where the value is known
    float sum = 0.0f;
    for (int i = 0; i < repeats; i++) {
#pragma unroll
        for (int column = 0; column < 32; column++) sum += mine[column];
    }
    sums[blockIdx.x * 32 + lane] = sum;
}
#endif
