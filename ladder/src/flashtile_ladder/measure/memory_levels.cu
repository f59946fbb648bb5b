// Four levels of memory, each asked in two ways: one thread that waits for every access (latency), and all threads with
// accesses that do not wait for one another (rate). memory_levels.py says what is measured.

constexpr int RING = 1024;  // numbers in shared memory

// A walk of one thread through a ring in global memory: each load's address is the result of the one before. `__ldcg`
// goes past L1. The walk goes on where the last one ended.
extern "C" __global__ void walk_global(const unsigned* next, unsigned* place, long long* cycles, int steps) {
    unsigned i = *place;
    const long long start = clock64();
    for (int step = 0; step < steps; step++) i = __ldcg(&next[i]);
    *place = i;
    *cycles = clock64() - start;
}

// The same in shared memory, through the first RING numbers of `next`.
extern "C" __global__ void walk_shared(const unsigned* next, unsigned* place, long long* cycles, int steps) {
    __shared__ unsigned ring[RING];
    for (int i = 0; i < RING; i++) ring[i] = next[i];
    unsigned i = *place;
    const long long start = clock64();
    for (int step = 0; step < steps; step++) i = ring[i];
    *place = i;
    *cycles = clock64() - start;
}

// And in registers: each multiply-add needs the result of the one before.
extern "C" __global__ void walk_registers(float* x, float factor, long long* cycles, int steps) {
    float sum = *x;
    const long long start = clock64();
#pragma unroll 16
    for (int step = 0; step < steps; step++) sum = sum * factor + 1.0f;
    *x = sum;
    *cycles = clock64() - start;
}

// Every number of x `repeats` times, 16 bytes for each thread and turn, past L1. Two sums for each thread, so that
// the compiler cannot leave a load out.
extern "C" __global__ void read_global(const float4* x, float* sums, int count, int repeats) {
    const long long threads = (long long)gridDim.x * blockDim.x;
    const long long thread = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    float a = 0.0f, b = 0.0f;
    for (int repeat = 0; repeat < repeats; repeat++) {
#pragma unroll 4
        for (long long i = thread; i < count; i += threads) {
            const float4 four = __ldcg(&x[i]);
            a += four.x + four.y;
            b += four.z + four.w;
        }
    }
    sums[thread] = a + b;
}

// Each warp reads 32 neighbours in shared memory, RING / 32 times in a repeat: no two lanes in one bank.
extern "C" __global__ void read_shared(const float* x, float* sums, int repeats) {
    __shared__ float tile[RING];
    for (int i = threadIdx.x; i < RING; i += blockDim.x) tile[i] = x[i];
    __syncthreads();
    const volatile float* mine = tile + threadIdx.x % 32;  // volatile: each read takes place
    float sum = 0.0f;
    for (int repeat = 0; repeat < repeats; repeat++) {
#pragma unroll
        for (int i = 0; i < RING; i += 32) sum += mine[i];
    }
    sums[(long long)blockIdx.x * blockDim.x + threadIdx.x] = sum;
}

// Eight chains of multiply-adds for each thread, of three numbers read and one written each.
extern "C" __global__ void use_registers(float* sums, float factor, int repeats) {
    float x[8];
#pragma unroll
    for (int i = 0; i < 8; i++) x[i] = (float)i;
#pragma unroll 16
    for (int repeat = 0; repeat < repeats; repeat++) {
#pragma unroll
        for (int i = 0; i < 8; i++) x[i] = x[i] * factor + 1.0f;
    }
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; i++) sum += x[i];
    sums[(long long)blockIdx.x * blockDim.x + threadIdx.x] = sum;
}
