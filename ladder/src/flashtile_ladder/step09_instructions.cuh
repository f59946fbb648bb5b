// The instructions of step 9's two kernels for tensor cores, and of split_keys.cu, that C++ has no words for.
// Those for matrices are executed by a warp's 32 lanes together.
// HALF is the name of the 16-bit type in PTX, f16 or bf16, and set when this is compiled.
#ifndef STEP09_INSTRUCTIONS
#define STEP09_INSTRUCTIONS

#define PTX_NAME_(x) #x
#define PTX_NAME(x) PTX_NAME_(x)

// Shared memory has 32-bit addresses of its own.
__device__ unsigned shared_address(const void* pointer) {
    unsigned address;
    asm("{ .reg .u64 wide; cvta.to.shared.u64 wide, %1; cvt.u32.u64 %0, wide; }" : "=r"(address) : "l"(pointer));
    return address;
}

// 16 bytes from HBM to shared memory, past the registers, while the thread goes on; zeros if not `there`.
__device__ void copy_16_bytes(void* to, const void* from, bool there) {
    const int bytes = there ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from), "r"(bytes)
                 : "memory");
}

// Until this thread's copies are there. Other threads' copies: after a barrier.
__device__ void wait_for_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// Four 8 x 8 matrices of 16-bit numbers from shared memory. Lane t gives the address of row t % 8 of matrix t / 8, and
// gets of matrix i, in x[i], the two numbers at row t / 4, columns 2 (t % 4) and 2 (t % 4) + 1.
__device__ void load_matrices(unsigned (&x)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(shared_address(row))
                 : "memory");
}

// The same of the transposed matrices: rows 2 (t % 4) and 2 (t % 4) + 1 of column t / 4.
__device__ void load_transposed_matrices(unsigned (&x)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(shared_address(row))
                 : "memory");
}

// C += A B on tensor cores: A [16, 16] and B [16, 8] in 16 bits, C [16, 8] in float32. With g = lane / 4, t = lane % 4
// a lane has
//     a[0], a[1], a[2], a[3]   A at columns 2t, 2t + 1 of the rows g, g + 8; at columns 2t + 8, 2t + 9 of g, g + 8
//     b0, b1                   B at column g: rows 2t, 2t + 1; rows 2t + 8, 2t + 9
//     c[0], c[1]; c[2], c[3]   C at columns 2t, 2t + 1 of row g; of row g + 8
__device__ void multiply_add(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." PTX_NAME(HALF) "." PTX_NAME(HALF) ".f32 "
                 "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Two numbers rounded to 16 bits, `low` in the lower half: the one with the lower column.
__device__ unsigned pack(float low, float high) {
    unsigned both;
    asm("cvt.rn." PTX_NAME(HALF) "x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}

// A 16-bit number as float32. A bfloat16 is the upper half of a float32; an instruction for it exists from sm_90 on.
#define WIDEN_f16 "cvt.f32.f16 %0, %1;"
#define WIDEN_bf16 "{ .reg .b16 zero; mov.b16 zero, 0; mov.b32 %0, {zero, %1}; }"
#define WIDEN_NAME_(x) WIDEN_##x
#define WIDEN_NAME(x) WIDEN_NAME_(x)
__device__ float widen(unsigned short bits) {
    float x;
    asm(WIDEN_NAME(HALF) : "=f"(x) : "h"(bits));
    return x;
}

#endif

// What kernels of 16-bit numbers share beside instructions.
#ifndef STEP09_ROWS
#define STEP09_ROWS

typedef unsigned short half_bits;
constexpr float LOG2_E = 1.4426950408889634f;  // exp(x) = 2^(x log2 e), and there is an instruction for 2^x

// Over the four lanes that share a row of the accumulator.
__device__ float row_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
    return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}

__device__ float row_sum(float x) {
    x += __shfl_xor_sync(0xffffffffu, x, 1);
    return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

#endif
