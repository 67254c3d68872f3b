// y[rows, n] = x[rows, k] . w[expert(row), n, k]^T with NVFP4 weights on Hopper (sm_90a), which has no four-bit products.
//
// The weight is the left operand (out^T = W x^T): each thread reads its own codes from shared memory, 16 bytes at a time,
// widens them to fp16 in registers and hands them to wgmma; activations, fp16, come from shared memory. A code times its
// block scale is exact in fp16 when 2^7 is taken out: codes are multiples of 1/2 up to 6, scales of 2^-9 up to 448.
//
// rows     fp16 of the row's value over a scale of its own, in tiles of 64 of k: lines of 128 bytes with the 128-byte swizzle,
//          and within each 128 of k the columns in the order in which threads hold the codes: pair of columns j of block b
//          is pair 8 j + b. e4m3 rows come as they are and two warps widen them here, over the largest of the row's scales.
//          For bf16 rows `hr_nvfp4_rows` writes [k / 64][x_rows][64] first, over a power of two.
// weight   [experts][n / 64][k / 128][4608 bytes], made by `nvfp4_hopper.prepare`: strips of 64 rows times 128 of k, as
//          two halves of 128 threads x 16 bytes of codes and then 128 threads x 4 block scales. Thread 32 w + 4 g + t holds
//          rows 16 w + g and 16 w + g + 8 of blocks t and t + 4. Half h has a word for block t of the upper row, of the
//          lower, and then block t + 4 of both; a word has the pairs of columns 4 h .. 4 h + 3; `widen` says how.
//
// One block of threads per multiprocessor takes a run of strips, four at a time. A producer thread keeps a ring of stages
// full through the bulk copy engine; four warpgroups multiply a strip each, or two warpgroups two strips where there are
// many rows. (Two blocks sharing their rows of x by multicast took half as long again: seen on an H200.)

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>
#include <dlfcn.h>
#include <stdint.h>

namespace {

constexpr int kStep = 128;                      // of k, in one stage
constexpr int kStrip = 64;                      // rows of the weight in one wgmma
constexpr int kStripBytes = kStrip * kStep / 2 + kStrip * kStep / 16;
constexpr int kStripsTogether = 4;              // of one stage
constexpr int kMaxStages = 16;
constexpr int kTiles = 3;                       // of fp16 rows, where they are widened here
constexpr int kConverters = 64;                 // threads that widen
constexpr int kBoxRows = 16;                    // rows of one copy of e4m3
constexpr int kScaleSlots = 4;                  // of the scales of a tile's rows; more than kTiles
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
    const float* x_scale;                       // of e4m3 rows: [chunks] by [rows]
    long long scale_step, scale_expert;         // floats from chunk to chunk, and from expert to expert where masked
    float* all_row_scales;                      // row_scale again, to be written where k is cut
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

// kBoxRows rows by kStep of e4m3.
__device__ __forceinline__ void copy_box(uint32_t to, const CUtensorMap* map, int k, int row, uint32_t barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(to),
        "l"(map), "r"(barrier), "r"(k), "r"(row)
        : "memory");
}

// Waits until the launch before this one has ended and its memory is seen; at once where launches do not overlap.
__device__ __forceinline__ void wait_for_previous_launch() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
__device__ __forceinline__ void let_next_launch_begin() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

struct Ring {
    uint32_t full = 0, empty = 0, data = 0;     // shared addresses
    int stage_bytes = 0, stages = 0;
    int stage = 0;
    uint32_t parity = 0;

    __device__ __forceinline__ uint32_t full_barrier() const { return full + 8 * stage; }
    __device__ __forceinline__ uint32_t empty_barrier() const { return empty + 8 * stage; }
    __device__ __forceinline__ uint32_t here() const { return data + stage * stage_bytes; }
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

// Two e4m3 to fp16: of the low and of the high half of the word.
__device__ __forceinline__ uint32_t as_halves(uint32_t four) {
    uint32_t made;
    asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %1;\ncvt.rn.f16x2.e4m3x2 %0, low;\n}" : "=r"(made) : "r"(four));
    return made;
}

__device__ __forceinline__ uint32_t as_halves_high(uint32_t four) {
    uint32_t made;
    asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %1;\ncvt.rn.f16x2.e4m3x2 %0, high;\n}" : "=r"(made) : "r"(four));
    return made;
}

// Four pairs of codes. Read as e4m3 with its sign in bit 7 and the rest in bits 4 to 2, a code is its value times 2^-6. The
// first two pairs lie so in the four bytes; the other two come out of the exclusive or of two shifts, which leaves no bit
// of the word without a use; `prepare` solves for it.
__device__ __forceinline__ void widen(uint32_t word, __half2 scale, uint32_t* a) {
    constexpr uint32_t kCode = 0x9C9C9C9Cu;
    uint32_t first = word & kCode, second = ((word << 2) ^ (word >> 2)) & kCode;
    a[0] = scaled(as_halves(first), scale);
    a[4] = scaled(as_halves_high(first), scale);
    a[8] = scaled(as_halves(second), scale);
    a[12] = scaled(as_halves_high(second), scale);
}

// Four e4m3 scales -> 2^6 / kTakenOut times each of them, twice.
__device__ __forceinline__ void spread(uint32_t word, __half2 (&scale)[4]) {
    __half2 times = __float2half2_rn(64.0f / kTakenOut);
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

__device__ __forceinline__ void store16(uint32_t address, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}

__device__ __forceinline__ uint32_t load4(uint32_t address) {
    uint32_t made;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(made) : "r"(address));
    return made;
}

// ---- one tile: STRIPS strips times N rows of x, a part of k ----

// With one strip a warpgroup, four of them hide each other's waits; with two, products run while the next are made ready.
// X8: the fp16 rows come in a ring of their own, `tiles`.
template <int STRIPS, int MOST, int N, bool X8>
__device__ __forceinline__ void multiply_tile(float (&sum)[STRIPS][N / 2], Ring& ring, Ring& tiles, int chunks,
                                              uint32_t strips_at, int thread) {
    constexpr int kInFlight = STRIPS - 1;
#pragma unroll
    for (int s = 0; s < STRIPS; ++s)
#pragma unroll
        for (int i = 0; i < N / 2; ++i) sum[s][i] = 0.0f;
    bool first_lane = thread % 32 == 0;
    uint32_t released = 0, released_tile = 0;   // barriers of what products in flight still read
    for (int chunk = 0; chunk < chunks; ++chunk) {
        barrier_wait(ring.full_barrier(), ring.parity);
        uint32_t here = ring.here(), rows = __shfl_sync(0xFFFFFFFFu, X8 ? tiles.here() : here, 0);  // of the warp, not of a thread
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
                if (X8 && s == 0 && half == 0) barrier_wait(tiles.full_barrier(), tiles.parity);
                uint64_t x = descriptor(rows + half * MOST * 128);
                products_fence();
#pragma unroll
                for (int j = 0; j < 4; ++j) multiply(sum[s], a + 4 * j, x + 2 * j);
                products_commit();
                products_wait<kInFlight>();
                if (kInFlight && s == 0 && half == 0 && released && first_lane) {
                    barrier_arrive(released);
                    if (X8) barrier_arrive(released_tile);
                }
            }
        }
        released = ring.empty_barrier();
        released_tile = tiles.empty_barrier();
        if (!kInFlight && first_lane) {
            barrier_arrive(released);
            if (X8) barrier_arrive(released_tile);
        }
        ring.next();
        if (X8) tiles.next();
    }
    if (kInFlight) products_wait<0>();
    if (kInFlight && released && first_lane) {
        barrier_arrive(released);
        if (X8) barrier_arrive(released_tile);
    }
}

// Neighbouring lanes of a column of sums trade, so that each stores two neighbouring columns of one row of y.
template <int N>
__device__ __forceinline__ void store_tile(const Problem& p, float (&sum)[N / 2], int expert, int strip, Span span,
                                           int first_row, const float* scales, int thread) {
    int lane = thread % 32, g = lane / 4, t = lane % 4;
    bool odd = g & 1;
    float factor = p.global_scale[expert] * kTakenOut;
    int column = strip * kStrip + thread / 32 * 16 + (g & ~1);
#pragma unroll
    for (int i = 0; i < N / 8; ++i) {
        int row = first_row + 8 * i + 2 * t + odd;
        bool real = row < span.count;
        float scale = real && !p.partial ? scales[row - first_row] * factor : 1.0f;
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

// `scales`: of e4m3 rows, in shared memory.
template <int STRIPS, int MOST, int N, bool X8>
__device__ __forceinline__ void consume(const Problem& p, Ring& ring, Ring& tiles, int expert, int strip,
                                        uint32_t strips_at, Span span, int first_row, const float* scales, int thread) {
    float sum[STRIPS][N / 2];
    multiply_tile<STRIPS, MOST, N, X8>(sum, ring, tiles, part_of(p).chunks, strips_at, thread);
    if (!X8) {
        wait_for_previous_launch();
        scales = p.row_scale + span.x_begin + first_row;
    }
#pragma unroll
    for (int s = 0; s < STRIPS; ++s) store_tile<N>(p, sum[s], expert, strip + s, span, first_row, scales, thread);
}

template <bool X8>
__device__ __forceinline__ void skip_tile(Ring& ring, Ring& tiles, int chunks, int thread) {
    for (int chunk = 0; chunk < chunks; ++chunk) {
        barrier_wait(ring.full_barrier(), ring.parity);
        if (thread % 32 == 0) barrier_arrive(ring.empty_barrier());
        ring.next();
        if (!X8) continue;
        barrier_wait(tiles.full_barrier(), tiles.parity);
        if (thread % 32 == 0) barrier_arrive(tiles.empty_barrier());
        tiles.next();
    }
}

// ---- e4m3 rows to fp16 ----

// 64 of k of one row: four blocks of 16. In the products' order the pairs j of the four are neighbours.
template <int N>
__device__ __forceinline__ void convert(uint32_t from, uint32_t to, int row, int half, __half2 ratio) {
    uint32_t made[4][8];
#pragma unroll
    for (int t = 0; t < 4; ++t) {
        uint4 bytes = load16(from + row * 128 + ((4 * half + t) ^ (row & 7)) * 16);
        uint32_t word[4] = {bytes.x, bytes.y, bytes.z, bytes.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            made[t][2 * i] = scaled(as_halves(word[i]), ratio);
            made[t][2 * i + 1] = scaled(as_halves_high(word[i]), ratio);
        }
    }
#pragma unroll
    for (int j = 0; j < 8; ++j)
        store16(to + j / 4 * N * 128 + row * 128 + (((2 * j + half) & 7) ^ (row & 7)) * 16, made[0][j], made[1][j],
                made[2][j], made[3][j]);
}

// The largest of a row's scales: many loads at a time, for nothing is under way yet.
__device__ __forceinline__ float largest(const float* scale, long long step, int chunks) {
    constexpr int kAtOnce = 28;
    float most = 0.0f;
    for (int first = 0; first < chunks; first += kAtOnce) {
        float found[kAtOnce];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) found[i] = first + i < chunks ? scale[(first + i) * step] : 0.0f;
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) most = fmaxf(most, found[i]);
    }
    return most;
}

// A thread widens both halves of one or more rows, or one half where there are few rows.
template <int N>
__device__ __forceinline__ void convert_all(const Problem& p, Ring& ring, Ring& tiles, float* scales, int first, int last,
                                            int thread) {
    constexpr int kRowsEach = N > kConverters ? N / kConverters : 1, kHalves = N < kConverters ? 1 : 2;
    Part part = part_of(p);
    tiles.parity = 1;                           // every tile begins empty
    int own = N < kConverters ? thread % N : thread, own_half = N < kConverters ? thread / N : 0, slot = 0;
    for (int strip = first, together; strip < last; strip += together) {
        int expert = strip / p.strips;
        together = next_pass(last - strip, p.strips - strip % p.strips);
        Span span = span_of(p, expert);
        const float* all_scales = p.x_scale + (p.mode == kMasked ? expert * p.scale_expert : span.out_begin);
        for (int first_row = 0; first_row < span.count; first_row += N, slot = (slot + 1) % kScaleSlots) {
            const float* scale[kRowsEach];
            float inverse[kRowsEach], next[kRowsEach];
#pragma unroll
            for (int i = 0; i < kRowsEach; ++i) {
                int row = own + i * kConverters;
                scale[i] = all_scales + min(first_row + row, span.count - 1);
                float most = largest(scale[i], p.scale_step, p.chunks);
                scales[slot * N + row] = most;
                if (p.all_row_scales && blockIdx.x == 0 && blockIdx.y == 0 && first_row + row < span.count)
                    p.all_row_scales[first_row + row] = most;
                inverse[i] = 1.0f / most;
                next[i] = scale[i][part.begin * p.scale_step];
            }
            for (int chunk = 0; chunk < part.chunks; ++chunk) {
                __half2 ratio[kRowsEach];
#pragma unroll
                for (int i = 0; i < kRowsEach; ++i) {
                    ratio[i] = __float2half2_rn(next[i] * inverse[i]);
                    if (chunk + 1 < part.chunks) next[i] = scale[i][(part.begin + chunk + 1) * p.scale_step];
                }
                barrier_wait(ring.full_barrier(), ring.parity);
                barrier_wait(tiles.empty_barrier(), tiles.parity);
#pragma unroll
                for (int i = 0; i < kRowsEach; ++i)
#pragma unroll
                    for (int half = 0; half < kHalves; ++half)
                        if (first_row + own + i * kConverters < span.count)
                            convert<N>(ring.here(), tiles.here(), own + i * kConverters, half + own_half, ratio[i]);
                asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
                __syncwarp();
                if (thread % 32 == 0) {
                    barrier_arrive(tiles.full_barrier());
                    barrier_arrive(ring.empty_barrier());
                }
                ring.next();
                tiles.next();
            }
        }
    }
}

template <int N, bool X8>
__device__ __forceinline__ void produce(const Problem& p, const CUtensorMap* map, Ring& ring, int first, int last) {
    constexpr int kRowBytes = X8 ? N * 128 : N * 256;
    bool waited = X8;
    Part part = part_of(p);
    ring.parity = 1;                            // every stage begins empty
    for (int strip = first, together; strip < last; strip += together) {
        int expert = strip / p.strips;
        together = next_pass(last - strip, p.strips - strip % p.strips);
        Span span = span_of(p, expert);
        const uint8_t* weight = p.weight + (long long)strip * p.chunks * kStripBytes;
        for (int row = 0; row < span.count; row += N) {
            int boxes = (min(N, span.count - row) + kBoxRows - 1) / kBoxRows;
            int x_bytes = X8 ? boxes * kBoxRows * 128 : 2 * min(N, (span.count - row + 7) / 8 * 8) * 128;
            const uint8_t* x = p.x + (long long)(span.x_begin + row) * 128;
            for (int chunk = part.begin; chunk < part.begin + part.chunks; ++chunk) {
                barrier_wait(ring.empty_barrier(), ring.parity);
                uint32_t full = ring.full_barrier(), here = ring.here();
                barrier_expect(full, together * kStripBytes + x_bytes);
                for (int s = 0; s < together; ++s)
                    copy_in(here + kRowBytes + s * kStripBytes,
                            weight + ((long long)s * p.chunks + chunk) * kStripBytes, kStripBytes, full);
                if (!waited) wait_for_previous_launch();
                waited = true;
                if (X8) {
                    for (int i = 0; i < boxes; ++i)
                        copy_box(here + i * kBoxRows * 128, map, chunk * kStep, span.out_begin + row + i * kBoxRows, full);
                } else {
                    for (int half = 0; half < 2; ++half)
                        copy_in(here + half * N * 128, x + (2ll * chunk + half) * p.x_rows * 128, x_bytes / 2, full);
                }
                ring.next();
            }
        }
    }
}

template <int GROUPS, int N, bool X8>
__device__ __forceinline__ void consume_all(const Problem& p, Ring& ring, Ring& tiles, const float* scales, int first,
                                            int last) {
    constexpr int kEach = kStripsTogether / GROUPS;
    int group = threadIdx.x / 128, thread = threadIdx.x % 128, slot = 0;
    for (int strip = first, together; strip < last; strip += together) {
        int expert = strip / p.strips, in_expert = strip % p.strips;
        together = next_pass(last - strip, p.strips - in_expert);
        int before = GROUPS == 4 || together <= 2 ? group : group * kEach, mine = min(kEach, together - before);
        if (together <= 2) mine = min(mine, 1);
        uint32_t strips_at = (X8 ? N * 128 : N * 256) + before * kStripBytes;
        int at = in_expert + before;
        Span span = span_of(p, expert);
        for (int row = 0; row < span.count; row += N, slot = (slot + 1) % kScaleSlots) {
            bool few = span.count - row <= N / 2;
            const float* its = scales + slot * N;
            if (mine <= 0) skip_tile<X8>(ring, tiles, part_of(p).chunks, thread);
            else if (mine == 1 && few)
                consume<1, N, N / 2, X8>(p, ring, tiles, expert, at, strips_at, span, row, its, thread);
            else if (mine == 1) consume<1, N, N, X8>(p, ring, tiles, expert, at, strips_at, span, row, its, thread);
            else if (few)
                consume<kEach, N, N / 2, X8>(p, ring, tiles, expert, at, strips_at, span, row, its, thread);
            else consume<kEach, N, N, X8>(p, ring, tiles, expert, at, strips_at, span, row, its, thread);
        }
    }
}

// GROUPS warpgroups multiply; of another one thread fills the ring and, for e4m3 rows, two warps widen them.
template <int GROUPS, int N, bool X8>
__global__ void __launch_bounds__(128 * GROUPS + 128, 1)
    multiply_kernel(const Problem p, const __grid_constant__ CUtensorMap map) {
    extern __shared__ uint8_t memory[];
    __shared__ uint64_t barriers[2 * kMaxStages + 2 * kTiles];
    __shared__ float scales[X8 ? kScaleSlots * N : 1];
    constexpr int kWarps = 4 * GROUPS;
    Ring ring, tiles;
    ring.full = shared_address(barriers);
    ring.empty = ring.full + 8 * kMaxStages;
    ring.data = (shared_address(memory) + 1023) / 1024 * 1024;
    ring.stage_bytes = (X8 ? N * 128 : N * 256) + kStripsTogether * kStripBytes;
    ring.stages = p.stages;
    tiles.full = ring.empty + 8 * kMaxStages;
    tiles.empty = tiles.full + 8 * kTiles;
    tiles.data = ring.data + ring.stages * ring.stage_bytes;
    tiles.stage_bytes = N * 256;
    tiles.stages = kTiles;
    if (threadIdx.x == 0) {
        for (int i = 0; i < p.stages; ++i) {
            barrier_init(ring.full + 8 * i, 1);
            barrier_init(ring.empty + 8 * i, kWarps + (X8 ? kConverters / 32 : 0));
        }
        for (int i = 0; i < kTiles; ++i) {
            barrier_init(tiles.full + 8 * i, kConverters / 32);
            barrier_init(tiles.empty + 8 * i, kWarps);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    }
    __syncthreads();
    let_next_launch_begin();
    if (X8) wait_for_previous_launch();
    int first = blockIdx.x * p.strips_each, last = min(first + p.strips_each, p.experts * p.strips);
    if (threadIdx.x >= 128 * GROUPS) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(GROUPS == 4 ? 64 : X8 ? 72 : 24));
        int thread = threadIdx.x - 128 * GROUPS;
        if (thread == 0) produce<N, X8>(p, &map, ring, first, last);
        else if (X8 && thread >= 128 - kConverters)
            convert_all<N>(p, ring, tiles, scales, first, last, thread - (128 - kConverters));
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(GROUPS == 4 ? 104 : X8 ? 216 : 240));
        consume_all<GROUPS, N, X8>(p, ring, tiles, scales, first, last);
    }
}

// ---- bf16 rows to fp16 ----

struct Rows {
    const uint8_t* x;
    long long x_stride;                         // bytes from row to row
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

// Four pairs of columns that are neighbours in the products' order: pair j of four blocks of 16 columns. Unit i of a row:
// 8 units to each 64 of k.
struct Unit {
    __nv_bfloat162 pair[4];
};

__device__ __forceinline__ Unit read_unit(const uint8_t* x, int i) {
    Unit unit;
    int chunk = i / 16, j = i / 2 % 8, block = i % 2, pair = chunk * kStep / 2 + 32 * block + j;
#pragma unroll
    for (int t = 0; t < 4; ++t) unit.pair[t] = reinterpret_cast<const __nv_bfloat162*>(x)[pair + 8 * t];
    return unit;
}

__global__ void __launch_bounds__(kRowThreads) rows_kernel(const Rows p) {
    let_next_launch_begin();
    int row = blockIdx.x, expert = p.mode == kMasked ? row / p.rows : 0;
    int inside = row - expert * p.rows;
    if (p.mode == kMasked && inside >= p.bounds[expert]) return;
    if (p.mode == kContiguous && row >= p.bounds[p.experts]) return;
    int x_row = p.mode == kMasked ? expert * ((p.rows + 7) / 8 * 8) + inside : row;
    const uint8_t* x = p.x + row * p.x_stride;
    int units = p.chunks * 16;
    Unit ahead[kRowsAhead];
#pragma unroll
    for (int i = 0; i < kRowsAhead; ++i)
        if (threadIdx.x + i * kRowThreads < units) ahead[i] = read_unit(x, threadIdx.x + i * kRowThreads);
    float most = 0.0f;
    for (int i = threadIdx.x; i < p.chunks * 64; i += kRowThreads) {
        float2 pair = __bfloat1622float2(reinterpret_cast<const __nv_bfloat162*>(x)[i]);
        most = fmaxf(most, fmaxf(fabsf(pair.x), fabsf(pair.y)));
    }
    float scale = power_below(block_max(most)), inverse = 1.0f / scale;
    if (threadIdx.x == 0) p.row_scale[x_row] = scale;
    auto write = [&](int i, const Unit& unit) {
        __half2 made[4];
#pragma unroll
        for (int t = 0; t < 4; ++t) {
            float2 value = __bfloat1622float2(unit.pair[t]);
            made[t] = __floats2half2_rn(value.x * inverse, value.y * inverse);
        }
        uint8_t* line = p.to + ((long long)(i / 8) * p.x_rows + x_row) * 128;
        *reinterpret_cast<uint4*>(line + (i % 8 ^ (x_row & 7)) * 16) = *reinterpret_cast<uint4*>(made);
    };
#pragma unroll
    for (int i = 0; i < kRowsAhead; ++i)
        if (threadIdx.x + i * kRowThreads < units) write(threadIdx.x + i * kRowThreads, ahead[i]);
    for (int i = threadIdx.x + kRowsAhead * kRowThreads; i < units; i += kRowThreads) write(i, read_unit(x, i));
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
extern "C" int hr_nvfp4_rows(const void* x, long long x_stride, const void* bounds, int mode, int rows, int x_rows,
                             int experts, int k, void* to, void* row_scale, void* stream) {
    Rows p{static_cast<const uint8_t*>(x), x_stride, static_cast<const int*>(bounds), static_cast<uint8_t*>(to),
           static_cast<float*>(row_scale), mode, rows, x_rows, experts, k / kStep};
    rows_kernel<<<mode == kMasked ? experts * rows : rows, kRowThreads, 0, static_cast<cudaStream_t>(stream)>>>(p);
    return cudaGetLastError();
}

namespace {

using Encode = decltype(&cuTensorMapEncodeTiled);

Encode encoder() {
    static Encode found = [] {
        void* driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
        return driver ? reinterpret_cast<Encode>(dlsym(driver, "cuTensorMapEncodeTiled")) : nullptr;
    }();
    return found;
}

template <int GROUPS, int N, bool X8>
int launch(Problem& p, const CUtensorMap& map, int parts, bool overlap, cudaStream_t stream) {
    int stage_bytes = (X8 ? N * 128 : N * 256) + kStripsTogether * kStripBytes, tile_bytes = X8 ? kTiles * N * 256 : 0;
    int room = 227 * 1024 - 1024 - 512 - (X8 ? kScaleSlots * N * 4 : 0) - tile_bytes;
    p.stages = room / stage_bytes < kMaxStages ? room / stage_bytes : kMaxStages;
    int bytes = p.stages * stage_bytes + tile_bytes + 1024, strips = p.experts * p.strips;
    auto kernel = multiply_kernel<GROUPS, N, X8>;
    cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    if (error != cudaSuccess) return error;
    cudaLaunchAttribute attribute{};
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = dim3((strips + p.strips_each - 1) / p.strips_each, parts);
    config.blockDim = dim3(128 * GROUPS + 128);
    config.dynamicSmemBytes = bytes;
    config.stream = stream;
    config.attrs = &attribute;
    config.numAttrs = overlap ? 1 : 0;
    error = cudaLaunchKernelEx(&config, kernel, p, map);
    if (error == cudaSuccess && parts > 1)
        add_kernel<<<((long long)p.rows * p.n / 2 + 255) / 256, 256, 0, stream>>>(p, parts);
    return error != cudaSuccess ? error : cudaGetLastError();
}

int launch_prepared(Problem& p, int tile, int parts, bool overlap, cudaStream_t stream) {
    CUtensorMap none{};
    switch (tile) {
        case 32: return launch<4, 32, false>(p, none, parts, overlap, stream);
        case 64: return launch<4, 64, false>(p, none, parts, overlap, stream);
        case 128: return launch<2, 128, false>(p, none, parts, overlap, stream);
        default: return -2;
    }
}

int launch_fp8(Problem& p, const CUtensorMap& map, int tile, int parts, bool overlap, cudaStream_t stream) {
    switch (tile) {
        case 32: return launch<4, 32, true>(p, map, parts, overlap, stream);
        case 64: return launch<4, 64, true>(p, map, parts, overlap, stream);
        case 128: return launch<2, 128, true>(p, map, parts, overlap, stream);
        default: return -2;
    }
}

}  // namespace

// x: what hr_nvfp4_rows made or, with x_scale, e4m3 rows x_stride bytes apart. tile: most rows of x multiplied at once: 32,
// 64 or 128. strips_each: of one block of threads. parts: of k, for as many blocks; more than one only where dense, with
// `partial` of parts * rows * n floats. overlap: begin while the launch before still runs; allowed right after hr_nvfp4_rows. 0, a CUDA error,
// a driver's error + 100000, -1 without tensor maps, or -2 for sizes that it does not take.
extern "C" int hr_nvfp4_multiply(const void* weight, const void* x, void* row_scale, const void* x_scale,
                                 long long x_stride, long long scale_step, long long scale_expert,
                                 const void* global_scale, const void* bounds, void* out, void* partial,
                                 long long out_stride, int mode, int rows, int x_rows, int experts, int n, int k, int tile,
                                 int strips_each, int parts, int overlap, void* stream) {
    int strips = (n + kStrip - 1) / kStrip;
    if (k % kStep || n % 2 || strips_each < 1 || parts < 1 || (parts > 1 && (mode != kDense || !partial))) return -2;
    if ((parts - 1) * ((k / kStep + parts - 1) / parts) >= k / kStep) return -2;
    Problem p{static_cast<const uint8_t*>(weight), static_cast<const uint8_t*>(x), static_cast<const float*>(row_scale),
              static_cast<const float*>(global_scale), static_cast<const int*>(bounds), static_cast<__nv_bfloat16*>(out),
              parts > 1 ? static_cast<float*>(partial) : nullptr, out_stride, static_cast<const float*>(x_scale), scale_step,
              scale_expert, parts > 1 ? static_cast<float*>(row_scale) : nullptr, mode, rows, x_rows, experts, strips,
              k / kStep, n, strips_each, (k / kStep + parts - 1) / parts, 0};
    cudaStream_t on = static_cast<cudaStream_t>(stream);
    if (!x_scale) return launch_prepared(p, tile, parts, overlap, on);
    if (!encoder()) return -1;
    CUtensorMap map;
    cuuint64_t sizes[2] = {(cuuint64_t)k, (cuuint64_t)(mode == kMasked ? (long long)experts * rows : rows)};
    cuuint64_t strides[1] = {(cuuint64_t)x_stride};
    cuuint32_t box[2] = {kStep, kBoxRows}, steps[2] = {1, 1};
    CUresult made = encoder()(&map, CU_TENSOR_MAP_DATA_TYPE_UINT8, 2, const_cast<void*>(x), sizes, strides, box, steps,
                              CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                              CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (made != CUDA_SUCCESS) return 100000 + made;
    return launch_fp8(p, map, tile, parts, overlap, on);
}
