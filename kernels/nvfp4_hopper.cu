// y[rows, n] = x[rows, k] . w[expert(row), n, k]^T with NVFP4 weights on Hopper (sm_90a), which has no four-bit products.
//
// The weight is the left operand (out^T = W x^T): each thread reads its own codes from shared memory, 16 bytes at a time,
// widens them to fp16 in registers and hands them to wgmma; activations, fp16, come from shared memory. A code times its
// block scale is exact in fp16 when 2^7 is taken out: codes are multiples of 1/2 up to 6, scales of 2^-9 up to 448.
//
// rows     x as the second operand wants it, made by `hr_nvfp4_rows`: fp16, each row divided by a scale of its own (kept in
//          row_scale), in tiles of 64 of k: [k / 64][x_rows][64], lines of 128 bytes with the 128-byte swizzle, and within
//          each 128 of k the columns in the order in which threads hold the codes: pair of columns 8 b + j of block b goes
//          to pair 8 j + 4 (b % 2) + b / 2.
// weight   [experts][n / 64][k / 128][4608 bytes], made by `nvfp4_hopper.prepare`: strips of 64 rows times 128 of k, as
//          two halves of k of 128 threads x 16 bytes of codes and then 128 threads x 4 block scales. Thread 32 w + 4 g + t
//          holds rows 16 w + g and 16 w + g + 8, blocks 2 t and 2 t + 1. A word holds 4 pairs of columns of one row and
//          block; the two columns of a pair are in its two halves; see `widen` for the place of each bit.
//
// One block of threads per multiprocessor takes a run of strips, four at a time. A producer thread keeps a ring of stages
// full through the bulk copy engine; four warpgroups multiply a strip each, or two warpgroups two strips where there are
// many rows. Two blocks may share their rows of x: each reads half of them for both.

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>
#include <stdint.h>

#include <type_traits>

namespace {

constexpr int kStep = 128;                      // of k, in one stage
constexpr int kStrip = 64;                      // rows of the weight in one wgmma
constexpr int kStripBytes = kStrip * kStep / 2 + kStrip * kStep / 16;
constexpr int kStripsTogether = 4;              // of one stage
constexpr int kMaxStages = 16;
constexpr int kRowThreads = 256;
constexpr int kRowsAhead = 4;                   // 16-byte units of its row that a thread reads before it knows the scale
constexpr float kTakenOut = 128.0f;             // 2^7, see above

enum Mode { kDense = 0, kContiguous = 1, kMasked = 2 };

struct Problem {
    const uint8_t* weight;
    const uint8_t* x;
    const float* row_scale;                     // [x_rows]
    const float* global_scale;                  // [experts]
    const int* bounds;                          // contiguous: starts[experts + 1]; masked: counts[experts]; dense: unused
    __nv_bfloat16* out;
    float* partial;                             // [parts][rows][n] sums without their scales, where parts > 1
    long long out_stride;
    int mode, rows, x_rows;                     // rows: of one expert where masked
    int experts, strips, chunks, n;             // strips and chunks of one expert
    int strips_each, chunks_each;               // of one block of threads
    int stages;                                 // of the ring
};

struct Span {
    int x_begin, out_begin, count;
};

__device__ __forceinline__ Span span_of(const Problem& p, int expert) {
    if (p.mode == kMasked) {
        int padded = (p.rows + 7) / 8 * 8;
        return {expert * padded, expert * p.rows, min(p.bounds[expert], p.rows)};
    }
    if (p.mode == kContiguous) {
        int begin = p.bounds[expert];
        return {begin, begin, min(p.bounds[expert + 1], p.rows) - begin};
    }
    return {0, 0, p.rows};
}

// Strips of the next pass out of those left: few passes, of about the same size, none across experts.
__device__ __forceinline__ int next_pass(int left, int in_expert) {
    left = min(left, in_expert);
    int passes = (left + kStripsTogether - 1) / kStripsTogether;
    return (left + passes - 1) / passes;
}

// A block's share of k.
struct Part {
    int begin, chunks;
};

__device__ __forceinline__ Part part_of(const Problem& p) {
    int begin = blockIdx.y * p.chunks_each;
    return {begin, min(p.chunks_each, p.chunks - begin)};
}

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// ---- mbarriers and copies ----

__device__ __forceinline__ void barrier_init(uint32_t barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

__device__ __forceinline__ void barrier_expect(uint32_t barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ void barrier_arrive(uint32_t barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// The same barrier of another block of the cluster.
__device__ __forceinline__ void barrier_arrive_at(uint32_t barrier, uint32_t rank) {
    asm volatile(
        "{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %0, %1;\n"
        "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [there];\n}\n" ::"r"(barrier),
        "r"(rank)
        : "memory");
}

__device__ __forceinline__ uint32_t cluster_rank() {
    uint32_t rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

__device__ __forceinline__ void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

__device__ __forceinline__ void barrier_wait(uint32_t barrier, uint32_t parity) {
    uint32_t done = 0;
    do {
        asm volatile(
            "{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}\n"
            : "=r"(done)
            : "r"(barrier), "r"(parity)
            : "memory");
    } while (!done);
}

__device__ __forceinline__ void copy_in(uint32_t to, const void* from, int bytes, uint32_t barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
                 "l"(from), "r"(bytes), "r"(barrier)
                 : "memory");
}

// To the same place of both blocks of a pair; each one's barrier hears of it.
__device__ __forceinline__ void copy_in_both(uint32_t to, const void* from, int bytes, uint32_t barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1], %2, [%3], %4;" ::"r"(to),
        "l"(from), "r"(bytes), "r"(barrier), "h"(static_cast<uint16_t>(3))
        : "memory");
}

// Waits until the launch before this one has ended and its memory is seen; at once where launches do not overlap.
__device__ __forceinline__ void wait_for_previous_launch() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
__device__ __forceinline__ void let_next_launch_begin() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

struct Ring {
    uint32_t full, empty, data;                 // shared addresses
    uint32_t peer;                              // the other block's rank, where two share their rows
    int stage_bytes, stages;
    int stage = 0;
    uint32_t parity = 0;

    __device__ __forceinline__ uint32_t full_barrier() const { return full + 8 * stage; }
    __device__ __forceinline__ uint32_t empty_barrier() const { return empty + 8 * stage; }
    __device__ __forceinline__ uint32_t here() const { return data + stage * stage_bytes; }
    template <bool PAIR>
    __device__ __forceinline__ void release(uint32_t barrier) const {
        barrier_arrive(barrier);
        if (PAIR) barrier_arrive_at(barrier, peer);
    }
    __device__ __forceinline__ void next() {
        if (++stage == stages) {
            stage = 0;
            parity ^= 1;
        }
    }
};

// ---- wgmma ----

// 128-byte swizzle, lines of 128 bytes along k, eight lines (1024 bytes) to the next group.
__device__ __forceinline__ uint64_t descriptor(uint32_t address) {
    return ((address & 0x3FFFF) >> 4) | (uint64_t(1) << 16) | (uint64_t(1024 >> 4) << 32) | (uint64_t(1) << 62);
}

__device__ __forceinline__ void products_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void products_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int Left>
__device__ __forceinline__ void products_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Left) : "memory");
}

#define D4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define D8(i) D4(i), D4(i + 4)
#define D16(i) D8(i), D8(i + 8)
#define S8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define S16 S8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define S32 S16 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define S64 S32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define MULTIPLY(N, REGISTERS, NAMES, OPERANDS, A, B)                                                             \
    __device__ __forceinline__ void multiply(float (&d)[REGISTERS], const uint32_t* a, uint64_t b) {              \
        asm volatile("wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.f16.f16 {" NAMES "}, {" A "}, " B            \
                     ", 1, 1, 1, 0;\n"                                                                            \
                     : OPERANDS                                                                                   \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                                       \
    }
#define COMMA ,
MULTIPLY(16, 8, S8, D8(0), "%8, %9, %10, %11", "%12")
MULTIPLY(32, 16, S16, D16(0), "%16, %17, %18, %19", "%20")
MULTIPLY(64, 32, S32, D16(0) COMMA D16(16), "%32, %33, %34, %35", "%36")
MULTIPLY(128, 64, S64, D16(0) COMMA D16(16) COMMA D16(32) COMMA D16(48), "%64, %65, %66, %67", "%68")

// ---- codes to fp16 ----

__device__ __forceinline__ uint32_t scaled(uint32_t pair, __half2 scale) {
    __half2 made = __hmul2(*reinterpret_cast<__half2*>(&pair), scale);
    return *reinterpret_cast<uint32_t*>(&made);
}

// Four pairs of codes. In fp16 a code's sign is bit 15, its other three bits are bits 11 to 9 (its value times 2^-14). In
// each half of the word: pair 0 lies so already, pair 1 three bits lower; pair 2 has its sign at 14 and the rest at 5 to 3,
// pair 3 at 13 and 2 to 0.
__device__ __forceinline__ void widen(uint32_t word, __half2 scale, uint32_t* a) {
    constexpr uint32_t kSign = 0x80008000u, kRest = 0x0E000E00u;
    a[0] = scaled(word & (kSign | kRest), scale);
    a[4] = scaled((word << 3) & (kSign | kRest), scale);
    a[8] = scaled(((word << 1) & kSign) | ((word << 6) & kRest), scale);
    a[12] = scaled(((word << 2) & kSign) | ((word << 9) & kRest), scale);
}

// Four e4m3 scales -> 2^14 / kTakenOut times each of them, twice.
__device__ __forceinline__ void spread(uint32_t word, __half2 (&scale)[4]) {
    __half2 times = __float2half2_rn(16384.0f / kTakenOut);
    __half2 low = __hmul2(__half2(__nv_cvt_fp8x2_to_halfraw2(word & 0xFFFF, __NV_E4M3)), times);
    __half2 high = __hmul2(__half2(__nv_cvt_fp8x2_to_halfraw2(word >> 16, __NV_E4M3)), times);
    scale[0] = __low2half2(low);
    scale[1] = __high2half2(low);
    scale[2] = __low2half2(high);
    scale[3] = __high2half2(high);
}

__device__ __forceinline__ uint4 load16(uint32_t address) {
    uint4 made;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(made.x), "=r"(made.y), "=r"(made.z), "=r"(made.w)
                 : "r"(address));
    return made;
}

__device__ __forceinline__ uint32_t load4(uint32_t address) {
    uint32_t made;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(made) : "r"(address));
    return made;
}

// ---- one tile: STRIPS strips times N rows of x, a part of k ----

// With one strip a warpgroup, four of them hide each other's waits; with two, products run while the next are made ready.
template <int STRIPS, int MOST, int N, bool PAIR>
__device__ __forceinline__ void multiply_tile(float (&sum)[STRIPS][N / 2], Ring& ring, int chunks, uint32_t strips_at,
                                              int thread) {
    constexpr int kInFlight = STRIPS - 1;
#pragma unroll
    for (int s = 0; s < STRIPS; ++s)
#pragma unroll
        for (int i = 0; i < N / 2; ++i) sum[s][i] = 0.0f;
    uint32_t released = 0;                      // the barrier of the stage that products in flight still read
    for (int chunk = 0; chunk < chunks; ++chunk) {
        barrier_wait(ring.full_barrier(), ring.parity);
        uint32_t here = __shfl_sync(0xFFFFFFFFu, ring.here(), 0);  // of the warp, not of a thread
#pragma unroll
        for (int s = 0; s < STRIPS; ++s) {
            uint32_t codes = here + strips_at + s * kStripBytes;
            uint32_t scales = load4(codes + 4096 + 4 * thread);
            uint4 words[2] = {load16(codes + 16 * thread), load16(codes + 2048 + 16 * thread)};
            __half2 scale[4];
            spread(scales, scale);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                uint32_t a[16];
                widen(words[half].x, scale[0], a);
                widen(words[half].y, scale[1], a + 1);
                widen(words[half].z, scale[2], a + 2);
                widen(words[half].w, scale[3], a + 3);
                uint64_t x = descriptor(here + half * MOST * 128);
                products_fence();
#pragma unroll
                for (int j = 0; j < 4; ++j) multiply(sum[s], a + 4 * j, x + 2 * j);
                products_commit();
                products_wait<kInFlight>();
                if (kInFlight && s == 0 && half == 0 && released && thread % 32 == 0) ring.release<PAIR>(released);
            }
        }
        if (kInFlight) released = ring.empty_barrier();
        else if (thread % 32 == 0) ring.release<PAIR>(ring.empty_barrier());
        ring.next();
    }
    if (kInFlight) products_wait<0>();
    if (kInFlight && released && thread % 32 == 0) ring.release<PAIR>(released);
}

// Neighbouring lanes of a column of sums trade, so that each stores two neighbouring columns of one row of y.
template <int N>
__device__ __forceinline__ void store_tile(const Problem& p, float (&sum)[N / 2], int expert, int strip, Span span,
                                           int first_row, int thread) {
    int lane = thread % 32, g = lane / 4, t = lane % 4;
    bool odd = g & 1;
    float factor = p.global_scale[expert] * kTakenOut;
    int column = strip * kStrip + thread / 32 * 16 + (g & ~1);
#pragma unroll
    for (int i = 0; i < N / 8; ++i) {
        int row = first_row + 8 * i + 2 * t + odd;
        bool real = row < span.count;
        float scale = real && !p.partial ? p.row_scale[span.x_begin + row] * factor : 1.0f;
        __nv_bfloat16* to = p.out + (long long)(span.out_begin + row) * p.out_stride + column;
        float* partial = p.partial + ((long long)blockIdx.y * p.rows + row) * p.n + column;
#pragma unroll
        for (int low = 0; low < 2; ++low) {
            float even_row = sum[4 * i + 2 * low], odd_row = sum[4 * i + 2 * low + 1];
            float got = __shfl_xor_sync(0xFFFFFFFFu, odd ? even_row : odd_row, 4);
            float left = odd ? got : even_row, right = odd ? odd_row : got;
            if (!real || column + 8 * low >= p.n) continue;
            if (p.partial) *reinterpret_cast<float2*>(partial + 8 * low) = make_float2(left, right);
            else *reinterpret_cast<__nv_bfloat162*>(to + 8 * low) = __floats2bfloat162_rn(left * scale, right * scale);
        }
    }
}

template <int STRIPS, int MOST, int N, bool PAIR>
__device__ __forceinline__ void consume(const Problem& p, Ring& ring, int expert, int strip, uint32_t strips_at, Span span,
                                        int first_row, int thread) {
    float sum[STRIPS][N / 2];
    multiply_tile<STRIPS, MOST, N, PAIR>(sum, ring, part_of(p).chunks, strips_at, thread);
    wait_for_previous_launch();
#pragma unroll
    for (int s = 0; s < STRIPS; ++s) store_tile<N>(p, sum[s], expert, strip + s, span, first_row, thread);
}

template <bool PAIR>
__device__ __forceinline__ void skip_tile(Ring& ring, int chunks, int thread) {
    for (int chunk = 0; chunk < chunks; ++chunk) {
        barrier_wait(ring.full_barrier(), ring.parity);
        if (thread % 32 == 0) ring.release<PAIR>(ring.empty_barrier());
        ring.next();
    }
}

template <int N, bool PAIR>
__device__ __forceinline__ void produce(const Problem& p, Ring& ring, int first, int last) {
    bool waited = false;
    Part part = part_of(p);
    ring.parity = 1;                            // every stage begins empty
    for (int strip = first, together; strip < last; strip += together) {
        int expert = strip / p.strips;
        together = next_pass(last - strip, p.strips - strip % p.strips);
        Span span = span_of(p, expert);
        const uint8_t* weight = p.weight + (long long)strip * p.chunks * kStripBytes;
        for (int row = 0; row < span.count; row += N) {
            int x_bytes = min(N, (span.count - row + 7) / 8 * 8) * 128;
            const uint8_t* x = p.x + (long long)(span.x_begin + row) * 128;
            for (int chunk = part.begin; chunk < part.begin + part.chunks; ++chunk) {
                barrier_wait(ring.empty_barrier(), ring.parity);
                uint32_t full = ring.full_barrier(), here = ring.here();
                barrier_expect(full, together * kStripBytes + 2 * x_bytes);
                for (int s = 0; s < together; ++s)
                    copy_in(here + 2 * N * 128 + s * kStripBytes,
                            weight + ((long long)s * p.chunks + chunk) * kStripBytes, kStripBytes, full);
                if (!waited) wait_for_previous_launch();
                waited = true;
                if (PAIR) {
                    int half = 1 - ring.peer;
                    copy_in_both(here + half * N * 128, x + (2ll * chunk + half) * p.x_rows * 128, x_bytes, full);
                } else {
                    for (int half = 0; half < 2; ++half)
                        copy_in(here + half * N * 128, x + (2ll * chunk + half) * p.x_rows * 128, x_bytes, full);
                }
                ring.next();
            }
        }
    }
}

template <int GROUPS, int N, bool PAIR>
__device__ __forceinline__ void consume_all(const Problem& p, Ring& ring, int first, int last) {
    constexpr int kEach = kStripsTogether / GROUPS;
    int group = threadIdx.x / 128, thread = threadIdx.x % 128;
    for (int strip = first, together; strip < last; strip += together) {
        int expert = strip / p.strips, in_expert = strip % p.strips;
        together = next_pass(last - strip, p.strips - in_expert);
        int before = GROUPS == 4 || together > 2 ? group * kEach : group, mine = min(kEach, together - before);
        if (GROUPS == 2 && together <= 2) mine = min(mine, 1);
        uint32_t strips_at = 2 * N * 128 + before * kStripBytes;
        int at = in_expert + before;
        Span span = span_of(p, expert);
        for (int row = 0; row < span.count; row += N) {
            bool few = span.count - row <= N / 2;
            if (mine <= 0) skip_tile<PAIR>(ring, part_of(p).chunks, thread);
            else if (mine == 1 && few) consume<1, N, N / 2, PAIR>(p, ring, expert, at, strips_at, span, row, thread);
            else if (mine == 1) consume<1, N, N, PAIR>(p, ring, expert, at, strips_at, span, row, thread);
            else if (few) consume<kEach, N, N / 2, PAIR>(p, ring, expert, at, strips_at, span, row, thread);
            else consume<kEach, N, N, PAIR>(p, ring, expert, at, strips_at, span, row, thread);
        }
    }
}

// GROUPS warpgroups multiply, and one thread of another fills the ring.
template <int GROUPS, int N, bool PAIR>
__global__ void __launch_bounds__(128 * GROUPS + 128, 1) multiply_kernel(const Problem p) {
    extern __shared__ uint8_t memory[];
    __shared__ uint64_t barriers[2 * kMaxStages];
    Ring ring;
    ring.full = shared_address(barriers);
    ring.empty = ring.full + 8 * kMaxStages;
    ring.data = (shared_address(memory) + 1023) / 1024 * 1024;
    ring.stage_bytes = 2 * N * 128 + kStripsTogether * kStripBytes;
    ring.stages = p.stages;
    if (threadIdx.x == 0) {
        for (int i = 0; i < p.stages; ++i) {
            barrier_init(ring.full + 8 * i, 1);
            barrier_init(ring.empty + 8 * i, (PAIR ? 2 : 1) * GROUPS * 4);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    }
    ring.peer = PAIR ? cluster_rank() ^ 1 : 0;
    if (PAIR) cluster_sync();
    else __syncthreads();
    int first = blockIdx.x * p.strips_each, last = min(first + p.strips_each, p.experts * p.strips);
    if (threadIdx.x >= 128 * GROUPS) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(GROUPS == 2 ? 40 : PAIR ? 64 : 32));
        if (threadIdx.x == 128 * GROUPS) produce<N, PAIR>(p, ring, first, last);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(GROUPS == 2 ? 232 : PAIR ? 104 : 112));
        consume_all<GROUPS, N, PAIR>(p, ring, first, last);
    }
    if (PAIR) cluster_sync();                   // the other may still copy to here, and arrive
}

// ---- rows ----

struct Rows {
    const uint8_t* x;                           // e4m3 or bf16
    const float* x_scale;                       // e4m3: [chunks] by [rows]
    long long x_stride, scale_step, scale_expert;  // bytes from row to row; floats from chunk to chunk, from expert to expert
    const int* bounds;
    uint8_t* to;
    float* row_scale;
    int mode, rows, x_rows, experts, chunks;
};

__device__ __forceinline__ float block_max(float value) {
    __shared__ float parts[kRowThreads / 32];
    for (int step = 16; step; step /= 2) value = fmaxf(value, __shfl_xor_sync(0xFFFFFFFFu, value, step));
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = value;
    __syncthreads();
    for (int i = 0; i < kRowThreads / 32; ++i) value = fmaxf(value, parts[i]);
    return value;
}

// The power of two that brings `amax` to [128, 256).
__device__ __forceinline__ float power_below(float amax) {
    int exponent = (__float_as_int(amax) >> 23) - 7;
    return __int_as_float(max(exponent, 1) << 23);
}

__device__ __forceinline__ float2 as_floats(uint16_t pair) {
    return __half22float2(__half2(__nv_cvt_fp8x2_to_halfraw2(pair, __NV_E4M3)));
}

__device__ __forceinline__ float2 as_floats(__nv_bfloat162 pair) { return __bfloat1622float2(pair); }

template <bool FP8>
struct Unit {
    using Pair = std::conditional_t<FP8, uint16_t, __nv_bfloat162>;
    Pair pair[4];
};

// Four pairs of columns that are neighbours in the products' order: pair j of every other block of 16 columns. Unit i of a
// row: 8 units to each 64 of k.
template <bool FP8>
__device__ __forceinline__ Unit<FP8> read_unit(const uint8_t* x, int i) {
    Unit<FP8> unit;
    int chunk = i / 16, j = i / 2 % 8, block = i % 2, pair = chunk * kStep / 2 + 8 * block + j;
#pragma unroll
    for (int t = 0; t < 4; ++t) unit.pair[t] = reinterpret_cast<const typename Unit<FP8>::Pair*>(x)[pair + 16 * t];
    return unit;
}

template <bool FP8>
__global__ void __launch_bounds__(kRowThreads) rows_kernel(const Rows p) {
    let_next_launch_begin();
    int row = blockIdx.x, expert = p.mode == kMasked ? row / p.rows : 0;
    int inside = row - expert * p.rows;
    if (p.mode == kMasked && inside >= p.bounds[expert]) return;
    if (p.mode == kContiguous && row >= p.bounds[p.experts]) return;
    int x_row = p.mode == kMasked ? expert * ((p.rows + 7) / 8 * 8) + inside : row;
    const uint8_t* x = p.x + row * p.x_stride;
    const float* scales = FP8 ? p.x_scale + expert * p.scale_expert + inside : nullptr;
    int units = p.chunks * 16;
    Unit<FP8> ahead[kRowsAhead];
#pragma unroll
    for (int i = 0; i < kRowsAhead; ++i)
        if (threadIdx.x + i * kRowThreads < units) ahead[i] = read_unit<FP8>(x, threadIdx.x + i * kRowThreads);
    float most = 0.0f;
    if (FP8) {
        for (int i = threadIdx.x; i < p.chunks; i += kRowThreads) most = fmaxf(most, scales[i * p.scale_step]);
    } else {
        for (int i = threadIdx.x; i < p.chunks * 64; i += kRowThreads) {
            float2 pair = __bfloat1622float2(reinterpret_cast<const __nv_bfloat162*>(x)[i]);
            most = fmaxf(most, fmaxf(fabsf(pair.x), fabsf(pair.y)));
        }
    }
    most = block_max(most);
    float scale = FP8 ? most : power_below(most), inverse = 1.0f / scale;
    if (threadIdx.x == 0) p.row_scale[x_row] = scale;
    auto write = [&](int i, const Unit<FP8>& unit) {
        float ratio = FP8 ? scales[i / 16 * p.scale_step] * inverse : inverse;
        __half2 made[4];
#pragma unroll
        for (int t = 0; t < 4; ++t) {
            float2 value = as_floats(unit.pair[t]);
            made[t] = __floats2half2_rn(value.x * ratio, value.y * ratio);
        }
        uint8_t* line = p.to + ((long long)(i / 8) * p.x_rows + x_row) * 128;
        *reinterpret_cast<uint4*>(line + (i % 8 ^ (x_row & 7)) * 16) = *reinterpret_cast<uint4*>(made);
    };
#pragma unroll
    for (int i = 0; i < kRowsAhead; ++i)
        if (threadIdx.x + i * kRowThreads < units) write(threadIdx.x + i * kRowThreads, ahead[i]);
    for (int i = threadIdx.x + kRowsAhead * kRowThreads; i < units; i += kRowThreads) write(i, read_unit<FP8>(x, i));
}

// ---- sums over the parts of k ----

__global__ void __launch_bounds__(256) add_kernel(const Problem p, int parts) {
    long long pairs = (long long)p.rows * p.n / 2, pair = blockIdx.x * 256ll + threadIdx.x;
    if (pair >= pairs) return;
    float2 total = make_float2(0.0f, 0.0f);
    for (int part = 0; part < parts; ++part) {
        float2 one = reinterpret_cast<const float2*>(p.partial)[part * pairs + pair];
        total.x += one.x;
        total.y += one.y;
    }
    long long row = pair / (p.n / 2), column = pair % (p.n / 2) * 2;
    float scale = p.row_scale[row] * p.global_scale[0] * kTakenOut;
    *reinterpret_cast<__nv_bfloat162*>(p.out + row * p.out_stride + column) = __floats2bfloat162_rn(total.x * scale, total.y * scale);
}

}  // namespace

// 0, or a CUDA error.
extern "C" int hr_nvfp4_rows(const void* x, const void* x_scale, long long x_stride, long long scale_step,
                             long long scale_expert, int fp8, const void* bounds, int mode, int rows, int x_rows,
                             int experts, int k, void* to, void* row_scale, void* stream) {
    Rows p{static_cast<const uint8_t*>(x), static_cast<const float*>(x_scale), x_stride, scale_step, scale_expert,
           static_cast<const int*>(bounds), static_cast<uint8_t*>(to), static_cast<float*>(row_scale), mode, rows, x_rows,
           experts, k / kStep};
    int blocks = mode == kMasked ? experts * rows : rows;
    if (fp8) rows_kernel<true><<<blocks, kRowThreads, 0, static_cast<cudaStream_t>(stream)>>>(p);
    else rows_kernel<false><<<blocks, kRowThreads, 0, static_cast<cudaStream_t>(stream)>>>(p);
    return cudaGetLastError();
}

namespace {

template <int GROUPS, int N, bool PAIR>
int launch(Problem& p, int parts, bool overlap, cudaStream_t stream) {
    int stage_bytes = 2 * N * 128 + kStripsTogether * kStripBytes, room = 227 * 1024 - 1024 - 2 * 8 * kMaxStages;
    p.stages = room / stage_bytes < kMaxStages ? room / stage_bytes : kMaxStages;
    int bytes = p.stages * stage_bytes + 1024, strips = p.experts * p.strips;
    cudaError_t error = cudaFuncSetAttribute(multiply_kernel<GROUPS, N, PAIR>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    if (error != cudaSuccess) return error;
    cudaLaunchAttribute attributes[2] = {};
    attributes[0].id = cudaLaunchAttributeClusterDimension;
    attributes[0].val.clusterDim = {PAIR ? 2u : 1u, 1, 1};
    attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[1].val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = dim3((strips + p.strips_each - 1) / p.strips_each, parts);
    config.blockDim = dim3(128 * GROUPS + 128);
    config.dynamicSmemBytes = bytes;
    config.stream = stream;
    config.attrs = attributes;
    config.numAttrs = overlap ? 2 : 1;
    error = cudaLaunchKernelEx(&config, multiply_kernel<GROUPS, N, PAIR>, p);
    if (error == cudaSuccess && parts > 1)
        add_kernel<<<((long long)p.rows * p.n / 2 + 255) / 256, 256, 0, stream>>>(p, parts);
    return error != cudaSuccess ? error : cudaGetLastError();
}

}  // namespace

// tile: most rows of x multiplied at once: 32, 64 or 128. strips_each: of one block of threads. parts: of k, for as many
// blocks; more than one only where dense, with `partial` of parts * rows * n floats. pair: two blocks share their
// rows of x; only where an expert's strips are a multiple of 2 * strips_each. overlap: begin while the launch
// before still runs; allowed only right after hr_nvfp4_rows. 0, a CUDA error, or -2 for sizes that it does not take.
extern "C" int hr_nvfp4_multiply(const void* weight, const void* x, const void* row_scale, const void* global_scale,
                                 const void* bounds, void* out, void* partial, long long out_stride, int mode, int rows,
                                 int x_rows, int experts, int n, int k, int tile, int strips_each, int parts, int pair,
                                 int overlap,
                                 void* stream) {
    if (k % kStep || n % 2 || strips_each < 1 || parts < 1 || (parts > 1 && (mode != kDense || !partial))) return -2;
    if (pair && (n + kStrip - 1) / kStrip % (2 * strips_each)) return -2;
    Problem p{static_cast<const uint8_t*>(weight), static_cast<const uint8_t*>(x), static_cast<const float*>(row_scale),
              static_cast<const float*>(global_scale), static_cast<const int*>(bounds), static_cast<__nv_bfloat16*>(out),
              parts > 1 ? static_cast<float*>(partial) : nullptr, out_stride, mode, rows, x_rows, experts,
              (n + kStrip - 1) / kStrip, k / kStep, n, strips_each, (k / kStep + parts - 1) / parts, 0};
    cudaStream_t on = static_cast<cudaStream_t>(stream);
    switch (tile) {
        case 32: return pair ? launch<4, 32, true>(p, parts, overlap, on) : launch<4, 32, false>(p, parts, overlap, on);
        case 64: return pair ? launch<4, 64, true>(p, parts, overlap, on) : launch<4, 64, false>(p, parts, overlap, on);
        case 128: return pair ? launch<2, 128, true>(p, parts, overlap, on) : launch<2, 128, false>(p, parts, overlap, on);
        default: return -2;
    }
}
