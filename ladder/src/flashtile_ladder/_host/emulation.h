// CUDA C++ for one block at a time on a CPU: step 9's kernels compiled as ordinary C++, to check their arithmetic of
// indices, their barriers and their use of tensor-core instructions where there is no GPU. Included before a kernel.
//
// Each thread of a block is a fiber, which runs until it waits for others. A missing barrier shows in one of the orders,
// forward and backward, where a warp gets as far ahead of the others as barriers let it, and shuffled, where threads
// take turns at random. Shared memory is NaN when a block starts. What cp.async copies arrives as late as it may, when
// the thread waits for it; going backward, at once. Instructions of a warp follow the PTX manual's description of which
// lane holds what, written anew here: nothing is taken from the header that kernels use.
#pragma once
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#define STEP09_INSTRUCTIONS  // in place of step09_instructions.cuh
#define __global__
#define __device__ static inline
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))
#define __shared__ static __attribute__((section("emulated_shared")))

using std::max;
using std::min;

struct Index { int x = 0, y = 0, z = 0; };

constexpr size_t STACK = 64 * 1024;

struct Copy { void* to; const void* from; bool there; };

struct Fiber {
    ucontext_t context;
    std::unique_ptr<char[]> stack{new char[STACK]};
    Index index;
    int number = 0;           // within the block
    long long waits_for = -1;  // a barrier's generation that has to pass; -1: it can run
    int barrier = 0;          // which one: 0 for the block, 1 + warp for a warp
    bool finished = false;
    std::vector<Copy> copies;
};

struct Barrier { int size = 0, arrived = 0; long long generation = 0; };

struct Lane { unsigned words[4]; unsigned b[2]; const void* row; float value; };

namespace emulated {
std::vector<Fiber> fibers;
std::vector<Barrier> barriers;
std::vector<Lane> exchange;  // [2, threads]: what lanes show each other, in turns
std::vector<int> turn;       // of each thread
Fiber* current;
ucontext_t scheduler;
Index block_index, block_size, grid_size;
struct Body {
    virtual void run() = 0;
};
Body* body;
enum Order { FORWARD, BACKWARD, SHUFFLED } order;

const char* problem;  // what is wrong with the kernel, if anything

// In a fiber, which is never resumed after this.
void fail(const char* words) {
    problem = words;
    swapcontext(&current->context, &scheduler);
}

void wait(int which) {
    Barrier& barrier = barriers[which];
    if (++barrier.arrived == barrier.size) {
        barrier.arrived = 0;
        barrier.generation++;
    } else {
        current->barrier = which;
        current->waits_for = barrier.generation + 1;
        swapcontext(&current->context, &scheduler);
    }
}

// Each lane's contribution becomes visible to all of its warp. Two sets in turns: nobody can be two exchanges ahead.
Lane* show(const Lane& mine) {
    const int set = turn[current->number]++ % 2, threads = fibers.size();
    exchange[set * threads + current->number] = mine;
    wait(1 + current->number / 32);
    return &exchange[set * threads + current->number / 32 * 32];
}

int lane() { return current->number % 32; }

void run_fiber() {
    body->run();
    current->finished = true;
    swapcontext(&current->context, &scheduler);
}

}  // namespace emulated

#define threadIdx (emulated::current->index)
#define blockIdx (emulated::block_index)
#define blockDim (emulated::block_size)
#define gridDim (emulated::grid_size)

static inline void __syncthreads() { emulated::wait(0); }
static inline void __syncwarp() { emulated::wait(1 + emulated::current->number / 32); }
static inline float __int_as_float(unsigned bits) { float x; std::memcpy(&x, &bits, 4); return x; }
struct float4 { float x, y, z, w; };
template <typename T>
static inline T __ldcg(const T* address) { return *address; }
static inline long long clock64() { static long long time; return time += 100; }
static inline float __shfl_xor_sync(unsigned, float x, int distance) {
    Lane mine{};
    mine.value = x;
    return emulated::show(mine)[emulated::lane() ^ distance].value;
}

// 16-bit numbers ------------------------------------------------------------------------------------------------------

#define HALF_IS_f16 1
#define HALF_IS_bf16 2
#define JOINED_(a, b) a##b
#define JOINED(a, b) JOINED_(a, b)
#ifndef EMULATED_HALF  // a kernel without 16-bit numbers has no HALF
#define EMULATED_HALF HALF
#endif

static inline float widened(unsigned bits) {
#if JOINED(HALF_IS_, EMULATED_HALF) == 2
    return __int_as_float(bits << 16);
#else
    const float sign = bits & 0x8000 ? -1.0f : 1.0f;
    const int exponent = bits >> 10 & 31, fraction = bits & 1023;
    if (exponent == 31) return fraction ? NAN : sign * INFINITY;
    return sign * (exponent ? std::ldexp(1024.0f + fraction, exponent - 25) : std::ldexp((float)fraction, -24));
#endif
}

// To the nearest of the two neighbours, ties to the even one; found by trying.
static inline unsigned narrowed(float x) {
    const unsigned sign = std::signbit(x) ? 0x8000 : 0;
    const unsigned infinity = JOINED(HALF_IS_, EMULATED_HALF) == 2 ? 0x7f80 : 0x7c00;
    if (std::isnan(x)) return infinity + 1;
    const double size = std::fabs((double)x);
    unsigned low = 0, high = infinity;  // low <= size < high, by bisection: the bits of positive numbers are ordered
    while (high - low > 1) {
        const unsigned middle = (low + high) / 2;
        (size >= widened(middle) ? low : high) = middle;
    }
    const double here = widened(low);
    const double step = high == infinity ? here - widened(low - 1) : widened(high) - here;
    const double above = size - here;
    const bool up = above > step / 2 || (above == step / 2 && low % 2 == 1);
    return sign | (up ? high : low);
}

// Instructions --------------------------------------------------------------------------------------------------------

static inline void copy_now(const Copy& copy) {
    if (copy.there) std::memcpy(copy.to, copy.from, 16);
    else std::memset(copy.to, 0, 16);
}

static inline void copy_16_bytes(void* to, const void* from, bool there) {
    if ((uintptr_t)to % 16 || (uintptr_t)from % 16) emulated::fail("cp.async: an address is not a multiple of 16");
    if (emulated::order == emulated::BACKWARD) copy_now({to, from, there});
    else emulated::current->copies.push_back({to, from, there});
}

static inline void wait_for_copies() {
    for (const Copy& copy : emulated::current->copies) copy_now(copy);
    emulated::current->copies.clear();
}

static inline void load_four(unsigned (&x)[4], const void* row, bool transposed) {
    if ((uintptr_t)row % 16) emulated::fail("ldmatrix: a row's address is not a multiple of 16");
    Lane mine{};
    mine.row = row;
    const Lane* lanes = emulated::show(mine);
    const int t = emulated::lane();
    for (int i = 0; i < 4; i++) {
        unsigned pair[2];
        for (int e = 0; e < 2; e++) {
            int r = t / 4, c = 2 * (t % 4) + e;
            if (transposed) std::swap(r, c);
            uint16_t bits;
            std::memcpy(&bits, (const char*)lanes[8 * i + r].row + 2 * c, 2);
            pair[e] = bits;
        }
        x[i] = pair[0] | pair[1] << 16;
    }
    // All have read before any goes on: what lies at the rows may change after the instruction.
    __syncwarp();
}

static inline void load_matrices(unsigned (&x)[4], const void* row) { load_four(x, row, false); }
static inline void load_transposed_matrices(unsigned (&x)[4], const void* row) { load_four(x, row, true); }

static inline void multiply_add(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    Lane mine{};
    std::copy(a, a + 4, mine.words);
    mine.b[0] = b0;
    mine.b[1] = b1;
    const Lane* lanes = emulated::show(mine);
    const int t = emulated::lane();
    for (int e = 0; e < 4; e++) {
        const int row = t / 4 + 8 * (e / 2), column = 2 * (t % 4) + e % 2;
        for (int inner = 0; inner < 16; inner++) {
            // A at [row, inner]: lane 4 (row % 8) + inner % 8 / 2, word row / 8 + 2 (inner / 8), half inner % 2.
            const unsigned word = lanes[row % 8 * 4 + inner % 8 / 2].words[row / 8 + inner / 8 * 2];
            // B at [inner, column]: lane 4 column + inner % 8 / 2, word inner / 8, half inner % 2.
            const unsigned other = lanes[column * 4 + inner % 8 / 2].b[inner / 8];
            const int shift = inner % 2 * 16;
            c[e] += widened(word >> shift & 0xffff) * widened(other >> shift & 0xffff);
        }
    }
}

static inline unsigned pack(float low, float high) { return narrowed(low) | narrowed(high) << 16; }
static inline float widen(unsigned short bits) { return widened(bits); }

// A launch ------------------------------------------------------------------------------------------------------------

extern char __start_emulated_shared[] __attribute__((weak));
extern char __stop_emulated_shared[] __attribute__((weak));

namespace emulated {

void prepare_block() {
    const int threads = fibers.size();
    const size_t shared_bytes = __stop_emulated_shared - __start_emulated_shared;
    if (shared_bytes) std::memset(__start_emulated_shared, 0xff, shared_bytes);
    barriers.assign(1 + (threads + 31) / 32, Barrier());
    barriers[0].size = threads;
    for (int i = 0; i < threads; i++) barriers[1 + i / 32].size++;
    turn.assign(threads, 0);
    exchange.assign(2 * threads, Lane());
    for (int i = 0; i < threads; i++) {
        Fiber& fiber = fibers[i];
        fiber.number = i;
        fiber.index = {i % block_size.x, i / block_size.x, 0};
        fiber.finished = false;
        fiber.waits_for = -1;
        fiber.copies.clear();
        getcontext(&fiber.context);
        fiber.context.uc_stack.ss_sp = fiber.stack.get();
        fiber.context.uc_stack.ss_size = STACK;
        fiber.context.uc_link = nullptr;
        makecontext(&fiber.context, run_fiber, 0);
    }
}

// Until it waits or ends; whether it could go on at all.
bool resume(Fiber& fiber) {
    if (fiber.finished || (fiber.waits_for >= 0 && barriers[fiber.barrier].generation < fiber.waits_for)) return false;
    fiber.waits_for = -1;
    current = &fiber;
    swapcontext(&scheduler, &fiber.context);
    if (fiber.finished && !fiber.copies.empty()) problem = "a thread ends with copies that it has not waited for";
    return true;
}

// A linear congruential generator is random enough for taking turns. Each launch begins with the same state.
uint64_t state;

void shuffle(std::vector<int>& sequence) {
    for (size_t i = sequence.size(); i > 1; i--) {
        state = state * 6364136223846793005u + 1442695040888963407u;
        std::swap(sequence[i - 1], sequence[(state >> 33) % i]);
    }
}

void run_block() {
    prepare_block();
    const int threads = fibers.size(), warps = (threads + 31) / 32;
    std::vector<int> sequence(threads);
    for (int i = 0; i < threads; i++) sequence[i] = order == BACKWARD ? threads - 1 - i : i;
    auto all_finished = [] { return std::all_of(fibers.begin(), fibers.end(), [](Fiber& f) { return f.finished; }); };
    while (!problem && !all_finished()) {
        bool progress = false;
        if (order == SHUFFLED) {
            shuffle(sequence);
            for (int i : sequence) progress |= !problem && resume(fibers[i]);
        } else {
            for (int w = 0; w < warps; w++) {
                for (bool further = true; further;) {
                    further = false;
                    for (int i = 32 * w; i < min(32 * w + 32, threads); i++) {
                        further |= !problem && resume(fibers[sequence[i]]);
                    }
                    progress |= further;
                }
            }
        }
        if (!progress && !problem) problem = "threads wait at a barrier that others do not reach";
    }
}

template <typename... Arguments>
struct Launch : Body {
    void (*kernel)(Arguments...);
    void** arguments;

    template <size_t... I>
    void call(std::index_sequence<I...>) {
        kernel(*(std::remove_reference_t<Arguments>*)arguments[I]...);
    }
    void run() override { call(std::index_sequence_for<Arguments...>()); }
};

// Block by block; what is wrong, or null.
template <typename... Arguments>
const char* launch(void (*kernel)(Arguments...), void** arguments, const int* sizes, int which) {
    Launch<Arguments...> launched;
    launched.kernel = kernel;
    launched.arguments = arguments;
    body = &launched;
    problem = nullptr;
    state = 1;
    order = Order(which);
    grid_size = {sizes[0], sizes[1], 1};
    block_size = {sizes[2], sizes[3], 1};
    const size_t threads = sizes[2] * sizes[3];
    if (fibers.size() != threads) fibers = std::vector<Fiber>(threads);  // else the last launch's, and their stacks
    for (int y = 0; y < grid_size.y && !problem; y++) {
        for (int x = 0; x < grid_size.x && !problem; x++) {
            block_index = {x, y, 0};
            run_block();
        }
    }
    return problem;
}

}  // namespace emulated
