// A block of 128 threads for each query; q, 64 scores and the output in shared memory. The maximum and the sum over a
// tile are reductions over the block: by a tree in shared memory (TREE = 1), or by warp shuffles (TREE = 0).
// HEAD_DIM (d) and TREE are set when this is compiled, and for 16-bit numbers HALF, f16 or bf16.

#ifdef HALF
#include "step09_instructions.cuh"
typedef unsigned short number;  // of q, k, v and out; all that is computed is float32
__device__ float load(const number* x) { return widen(*x); }
__device__ void store(number* x, float value) { *x = pack(value, 0.0f) & 0xffff; }
#else
typedef float number;
__device__ float load(const number* x) { return *x; }
__device__ void store(number* x, float value) { *x = value; }
#endif

constexpr int D = HEAD_DIM, THREADS = 128, KEYS = 64;

template <bool MAXIMUM>
__device__ float combine(float x, float y) {
    return MAXIMUM ? fmaxf(x, y) : x + y;
}

// One number of each thread to one for all of them. `buffer` has THREADS numbers of shared memory.
template <bool MAXIMUM>
__device__ float reduce(float x, float* buffer) {
    const int t = threadIdx.x;
#if TREE
    buffer[t] = x;
    __syncthreads();  // all numbers are there
    for (int half = THREADS / 2; half > 0; half /= 2) {  // seven halvings, a barrier after each
        if (t < half) buffer[t] = combine<MAXIMUM>(buffer[t], buffer[t + half]);
        __syncthreads();  // this level is complete
    }
    const float result = buffer[0];
#else
    for (int distance = 16; distance > 0; distance /= 2)  // five exchanges between registers, no barrier
        x = combine<MAXIMUM>(x, __shfl_xor_sync(0xffffffffu, x, distance));
    if (t % 32 == 0) buffer[t / 32] = x;
    __syncthreads();  // one number of each warp is there
    float result = buffer[0];
    for (int warp = 1; warp < THREADS / 32; warp++) result = combine<MAXIMUM>(result, buffer[warp]);
#endif
    __syncthreads();  // all threads have read the result: the next reduction may write
    return result;
}

extern "C" __global__ void attention_block_query(
    const number* __restrict__ q,  // [rows, D]
    const number* __restrict__ k,  // [keys, D]
    const number* __restrict__ v,  // [keys, D]
    number* out,                   // [rows, D]
    float* lse,                    // [rows]
    int keys, float scale, int causal
) {
    __shared__ float q_row[D], acc[D], s[KEYS], buffer[THREADS];
    const int row = blockIdx.x, t = threadIdx.x;
    for (int c = t; c < D; c += THREADS) {
        q_row[c] = scale * load(&q[(long long)row * D + c]);
        acc[c] = 0.0f;
    }
    float m = MINUS_INFINITY, l = 0.0f;  // every thread has the same
    __syncthreads();  // q is there

    const int end = causal ? row + 1 : keys;
    for (int start = 0; start < end; start += KEYS) {
        float x = MINUS_INFINITY;  // half of the threads have a key; the others wait
        if (t < KEYS && start + t < end) {
            x = 0.0f;
            for (int c = 0; c < D; c++) x += q_row[c] * load(&k[(long long)(start + t) * D + c]);
        }
        const float m_new = fmaxf(m, reduce<true>(x, buffer));
        const float p = expf(x - m_new), alpha = expf(m - m_new);  // p is 0 without a key
        if (t < KEYS) s[t] = p;
        l = alpha * l + reduce<false>(p, buffer);  // its barriers make s visible to all threads
        for (int c = t; c < D; c += THREADS) {
            float sum = 0.0f;
            for (int j = 0; j < min(KEYS, end - start); j++) sum += s[j] * load(&v[(long long)(start + j) * D + c]);
            acc[c] = alpha * acc[c] + sum;
        }
        m = m_new;  // the next tile's first reduction has barriers too: s is read before it is written again
    }
    for (int c = t; c < D; c += THREADS) store(&out[(long long)row * D + c], acc[c] / l);
    if (t == 0) lse[row] = m + logf(l);
}
