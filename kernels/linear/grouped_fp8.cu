// y[rows, n] = x[rows, k] . w[expert(row), n, k]^T for block-scaled FP8 on Hopper (sm_90a).
//
// x         [rows, k]                    e4m3, one fp32 scale for each row and 128 of k; neighbours in memory are rows
// w         [experts, n, k]              e4m3, one fp32 scale for each 128 x 128 block
// y         [rows, n]                    bf16
//
// One block of threads per multiprocessor walks over tiles of at most 256 rows by N columns; two of them may form a cluster
// on neighbouring columns and share their rows: each loads half, which the copy engine delivers to both. A producer thread
// keeps a ring of shared-memory stages filled through the bulk copy engine; two warpgroups multiply. An instruction covers
// 64 rows; each group of 64 rows ("slab") that a tile really has costs a load and its products, absent ones cost nothing:
// 16 rows of an expert and 60000 take the same road. Tensor cores keep about 14 bits while they sum, hence the sum over
// each 128 of k is added to fp32 registers with its scales; while one warpgroup does that, the other multiplies.

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <dlfcn.h>
#include <stdint.h>

#include "hopper.cuh"

namespace {

constexpr int kStep = 128;               // of k, in one stage: one scale, and one 128-byte swizzled line
constexpr int kSlab = 64;                // rows of one wgmma
constexpr int kSlabBytes = kSlab * kStep;
constexpr int kMaxSlabs = 4;
constexpr int kScaleBytes = kMaxSlabs * kSlab * 4;  // of a stage's rows, at its end
constexpr int kMaxExperts = 128;
constexpr int kMaxStages = 16;
constexpr int kConsumers = 2;            // warpgroups
constexpr int kPieceBytes = 16 * 64 * 2; // of the staging memory: one warp's 16 rows of 64 columns
constexpr int kThreads = (kConsumers + 1) * 128;

enum Mode { kDense = 0, kContiguous = 1, kMasked = 2 };

struct Problem {
    const float* x_scale;
    const float* w_scale;
    __nv_bfloat16* out;
    const int* bounds;                   // contiguous: starts[experts + 1]; masked: counts[experts]; dense: unused
    long long x_scale_step;              // floats between one row's neighbouring scales
    long long x_scale_expert;            // what a masked expert's scales are further away than its rows
    long long out_stride;
    int rows, experts, n, k, mode;
    int slabs;                           // of a tile, at most
    int ring_bytes, group;
};

constexpr int kMaxSegments = 2 * kMaxExperts;

// A segment is row tiles of one height of one expert: all of its tiles, or all but the last and the last.
struct Tables {
    int begin[kMaxExperts], end[kMaxExperts];  // rows of an expert
    int first_tile[kMaxSegments + 1], first_row[kMaxSegments], row_end[kMaxSegments], expert[kMaxSegments];
    int slabs[kMaxSegments];             // of each of its tiles
    int tiles, stage_bytes, stages;
    uint64_t full[kMaxStages], empty[kMaxStages];
    float w_scale[kMaxStages];
};

struct Tile {
    int expert, row, row_end, column;
};

template <int R>
__device__ __forceinline__ void add_scaled(float (&sum)[R], const float (&part)[R], float upper, float lower) {
#pragma unroll
    for (int i = 0; i < R; i += 4) {
        sum[i] = fmaf(part[i], upper, sum[i]);
        sum[i + 1] = fmaf(part[i + 1], upper, sum[i + 1]);
        sum[i + 2] = fmaf(part[i + 2], lower, sum[i + 2]);
        sum[i + 3] = fmaf(part[i + 3], lower, sum[i + 3]);
    }
}

// The same warp of both warpgroups.
__device__ __forceinline__ void pair_sync(int warp) { asm volatile("bar.sync %0, 64;" ::"r"(4 + warp) : "memory"); }

// Adds the second warpgroup's sums to the first's, thread by thread, through the pair's two pieces of `staging`.
template <int N>
__device__ __forceinline__ void add_other_group(float (&sum)[N / 2], char* staging, int group, int warp, int lane) {
    float* upper = reinterpret_cast<float*>(staging + warp * kPieceBytes) + lane;
    float* lower = reinterpret_cast<float*>(staging + (4 + warp) * kPieceBytes) + lane;
#pragma unroll
    for (int first = 0; first < N / 2; first += 32) {
        pair_sync(warp);                 // nobody reads what was there any more
        if (group == 1) {
#pragma unroll
            for (int i = 0; i < 16; ++i) upper[32 * i] = sum[first + i], lower[32 * i] = sum[first + 16 + i];
        }
        pair_sync(warp);
        if (group == 0) {
#pragma unroll
            for (int i = 0; i < 16; ++i) sum[first + i] += upper[32 * i], sum[first + 16 + i] += lower[32 * i];
        }
    }
    pair_sync(warp);
}

// ---- tiles ----

// How an expert's rows are cut: `tiles` row tiles of `slabs` each, then `last` slabs in one more when they are fewer. As few
// tiles as `most` slabs allow, and those of one height as far as that goes.
struct Cut {
    int tiles, slabs, last;
};

__host__ __device__ __forceinline__ Cut cut_of(int rows, int most) {
    int all = (rows + kSlab - 1) / kSlab, tiles = (all + most - 1) / most;
    if (tiles == 0) return {0, 0, 0};
    int slabs = (all + tiles - 1) / tiles, last = all - (tiles - 1) * slabs;
    return last == slabs ? Cut{tiles, slabs, 0} : Cut{tiles - 1, slabs, last};
}

// Segments in the order in which they are worked off: the highest tiles first, so that small ones fill the last round;
// among equals whole experts before remainders, then by number. Fills what expert `e` has.
__host__ __device__ __forceinline__ void place_segments(Tables& tables, int e, int experts, int most, int column_tiles) {
    Cut own = cut_of(tables.end[e] - tables.begin[e], most);
    int before[2] = {0, 0}, tiles[2] = {0, 0};  // segments and row tiles before the whole part, before the remainder
    for (int other = 0; other < experts; ++other) {
        Cut its = cut_of(tables.end[other] - tables.begin[other], most);
        if (its.tiles > 0 && (its.slabs > own.slabs || (its.slabs == own.slabs && other < e)))
            ++before[0], tiles[0] += its.tiles;
        if (its.last > own.slabs) ++before[0], tiles[0] += 1;
        if (its.tiles > 0 && its.slabs >= own.last) ++before[1], tiles[1] += its.tiles;
        if (its.last > own.last || (its.last == own.last && other < e)) ++before[1], tiles[1] += 1;
    }
    int middle = tables.begin[e] + own.tiles * own.slabs * kSlab;
    if (own.tiles > 0) {
        tables.first_tile[before[0]] = tiles[0] * column_tiles;
        tables.first_row[before[0]] = tables.begin[e];
        tables.row_end[before[0]] = own.last ? middle : tables.end[e];
        tables.expert[before[0]] = e;
        tables.slabs[before[0]] = own.slabs;
    }
    if (own.last > 0) {
        tables.first_tile[before[1]] = tiles[1] * column_tiles;
        tables.first_row[before[1]] = middle;
        tables.row_end[before[1]] = tables.end[e];
        tables.expert[before[1]] = e;
        tables.slabs[before[1]] = own.last;
    }
}

// Totals. Stages are as large as the highest tile needs and as many as fit: a decode step's few rows leave room for more
// weights in flight.
__host__ __device__ __forceinline__ void finish_tables(Tables& tables, int experts, int most, int column_tiles, int w_bytes,
                                                       int ring_bytes) {
    int segments = 0, tiles = 0, highest = 1;
    for (int e = 0; e < experts; ++e) {
        Cut cut = cut_of(tables.end[e] - tables.begin[e], most);
        segments += (cut.tiles > 0) + (cut.last > 0);
        tiles += cut.tiles + (cut.last > 0);
        highest = cut.slabs > highest ? cut.slabs : highest;
    }
    tables.first_tile[segments] = tables.tiles = tiles * column_tiles;
    tables.stage_bytes = highest * kSlabBytes + w_bytes + kScaleBytes;
    int fit = ring_bytes / tables.stage_bytes;
    tables.stages = fit < kMaxStages ? fit : kMaxStages;
}

__device__ void fill_tables(Tables& tables, const Problem& problem, int column_tiles, int w_bytes) {
    for (int e = threadIdx.x; e < problem.experts; e += blockDim.x) {
        int begin = 0, end = problem.rows;
        if (problem.mode == kContiguous) {
            begin = problem.bounds[e];
            end = min(problem.bounds[e + 1], problem.rows);
        } else if (problem.mode == kMasked) {
            begin = e * problem.rows;
            end = begin + min(problem.bounds[e], problem.rows);
        }
        tables.begin[e] = begin;
        tables.end[e] = max(begin, end);
    }
    __syncthreads();
    for (int e = threadIdx.x; e < problem.experts; e += blockDim.x)
        place_segments(tables, e, problem.experts, problem.slabs, column_tiles);
    if (threadIdx.x == blockDim.x - 1)
        finish_tables(tables, problem.experts, problem.slabs, column_tiles, w_bytes, problem.ring_bytes);
    __syncthreads();
}

// Every other round goes backwards: neighbouring tiles often differ in height, and nobody should get all the high ones.
__device__ __forceinline__ int tile_of(int round, int cluster) {
    int workers = gridDim.x / cluster, worker = blockIdx.x / cluster;
    return round * workers + (round % 2 ? workers - 1 - worker : worker);
}

// Tiles of a segment go in groups of `group` row tiles, all columns of a group before the next: what runs at one time
// shares its rows and its weights in the L2 cache. `segment` only grows, so the search goes on where it stopped.
__host__ __device__ __forceinline__ Tile locate(int tile, int& segment, const Tables& tables, int group, int tile_columns,
                                                int column_tiles) {
    while (tile >= tables.first_tile[segment + 1]) ++segment;
    int local = tile - tables.first_tile[segment], tile_rows = tables.slabs[segment] * kSlab;
    int row_tiles = (tables.first_tile[segment + 1] - tables.first_tile[segment]) / column_tiles;
    int first = local / (group * column_tiles) * group;
    int height = row_tiles - first < group ? row_tiles - first : group;
    local -= first * column_tiles;
    Tile found;
    found.expert = tables.expert[segment];
    found.row = tables.first_row[segment] + (first + local % height) * tile_rows;
    found.row_end = found.row + tile_rows < tables.row_end[segment] ? found.row + tile_rows : tables.row_end[segment];
    found.column = local / height * tile_columns;
    return found;
}

// 16 rows x N columns of one warp, 64 columns at a time through its own piece of shared memory, so that each row leaves in
// whole lines.
template <int N>
__device__ __forceinline__ void store_slab(const float (&sum)[N / 2], char* piece, const Problem& problem, int row,
                                           int row_end, int column, int lane) {
    int matrix_row = (lane & 7) + (lane & 8), chunk = lane & 7;
#pragma unroll
    for (int half = 0; half < N / 64; ++half) {
#pragma unroll
        for (int j = 0; j < 8; j += 2) {
            uint32_t packed[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                int at = 32 * half + 4 * j + 2 * i;
                __nv_bfloat162 two = __floats2bfloat162_rn(sum[at], sum[at + 1]);
                packed[i] = *reinterpret_cast<uint32_t*>(&two);
            }
            int place = (j + (lane >> 4)) ^ (matrix_row & 7);
            asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                             shared_address(piece + matrix_row * 128 + place * 16)),
                         "r"(packed[0]), "r"(packed[1]), "r"(packed[2]), "r"(packed[3])
                         : "memory");
        }
        __syncwarp();
        int its_column = column + half * 64 + chunk * 8;
#pragma unroll
        for (int i = 0; i < 16; i += 4) {
            int r = i + (lane >> 3);
            uint4 line = *reinterpret_cast<const uint4*>(piece + r * 128 + (chunk ^ (r & 7)) * 16);
            if (row + r < row_end && its_column < problem.n)
                *reinterpret_cast<uint4*>(problem.out + (row + r) * problem.out_stride + its_column) = line;
        }
        __syncwarp();
    }
}

template <int N, int kCluster>
__device__ void produce(const CUtensorMap* x_map, const CUtensorMap* w_map, char* ring, Tables& tables,
                        const Problem& problem, int rank) {
    constexpr int kShare = kSlab / kCluster;  // rows of a slab that this block loads
    int column_tiles = (problem.n + N * kCluster - 1) / (N * kCluster), steps = (problem.k + kStep - 1) / kStep;
    int stage_bytes = tables.stage_bytes, stages = tables.stages;
    int stage = 0, segment = 0;
    uint32_t parity = 1;                 // a fresh barrier counts as one whose phase before this one is over
    for (int round = 0, t; (t = tile_of(round, kCluster)) < tables.tiles; ++round) {
        Tile tile = locate(t, segment, tables, problem.group, N * kCluster, column_tiles);
        int slabs = (tile.row_end - tile.row + kSlab - 1) / kSlab;
        int w_row = tile.expert * problem.n + tile.column + rank * N;
        for (int step = 0; step < steps; ++step) {
            uint64_t* full = &tables.full[stage];
            char* to = ring + stage * stage_bytes;
            char* x_to = to + N * kStep + rank * kShare * kStep;
            int row = tile.row + rank * kShare;
            barrier_wait(shared_address(&tables.empty[stage]), parity);
            barrier_expect(full, slabs * kSlabBytes + N * kStep);
            load_box(w_map, to, full, step * kStep, w_row);
            for (int slab = 0; slab < slabs; ++slab) {
                if (kCluster == 1)
                    load_box(x_map, x_to + slab * kSlabBytes, full, step * kStep, row + slab * kSlab);
                else
                    load_box_to_all<kCluster>(x_map, x_to + slab * kSlabBytes, full, step * kStep, row + slab * kSlab);
            }
            if (++stage == stages) stage = 0, parity ^= 1;
        }
    }
}

// The scales of the same stages, by one warp, as copies that report to the stage's barrier when they land: like this they
// may come from far away, and need no alignment.
template <int N, int kCluster>
__device__ void fetch_scales(char* ring, Tables& tables, const Problem& problem, int rank, int lane) {
    int column_tiles = (problem.n + N * kCluster - 1) / (N * kCluster), steps = (problem.k + kStep - 1) / kStep;
    int stage_bytes = tables.stage_bytes, stages = tables.stages, scale_columns = (problem.n + 127) / 128;
    uint32_t scales = shared_address(ring) + stage_bytes - kScaleBytes + lane * 4;
    int stage = 0, segment = 0;
    uint32_t parity = 1;
    for (int round = 0, t; (t = tile_of(round, kCluster)) < tables.tiles; ++round) {
        Tile tile = locate(t, segment, tables, problem.group, N * kCluster, column_tiles);
        int last = tile.row_end - tile.row - 1, groups = last / 32 + 1;
        int column = min((tile.column + rank * N) / 128, scale_columns - 1);
        const float* w_from = problem.w_scale + (long long)(tile.expert * scale_columns + column) * steps;
        const float* x_from = problem.x_scale + tile.expert * problem.x_scale_expert + tile.row;
        for (int step = 0; step < steps; ++step, x_from += problem.x_scale_step) {
            barrier_wait(shared_address(&tables.empty[stage]), parity);
            uint32_t to = scales + stage * stage_bytes;
            for (int i = 0; i < groups; ++i) copy_float(to + i * 128, x_from + min(lane + i * 32, last));
            if (lane == 0) copy_float(shared_address(&tables.w_scale[stage]), w_from + step);
            barrier_arrive_after_copies(&tables.full[stage]);
            if (++stage == stages) stage = 0, parity ^= 1;
        }
    }
}

// A stage may be written again once all warps of all blocks that get its rows have read it.
template <int kCluster>
__device__ __forceinline__ void release(uint32_t empty, uint32_t lane) {
    if (kCluster == 1) {
        if (lane == 0) barrier_arrive(empty);
    } else if (lane < kCluster) {
        barrier_arrive_at(empty, lane);
    }
}

// Where a consumer is in the ring. All but `scales` is the same for a whole warp.
struct Reader {
    uint32_t tiles, scales;              // of the ring's first stage: descriptor of the weights, address of this thread's scales
    uint32_t full, empty, w_scale;       // addresses of the first stage's
    uint32_t parity;
    int stage, stages, stage_bytes;
};

// All steps of a tile for one warpgroup that has one or two slabs of it, the first of them `first_slab`. With kHalf it
// takes only the even or the odd steps. Straight code on purpose: branches here cost as much as the scaling.
template <int N, int kCluster, int kOwn, bool kHalf>
__device__ __forceinline__ void add_steps(float (&sums)[2][N / 2], Reader& at, int steps, int first_slab, int group,
                                          uint32_t lane) {
    float part[N / 2];
    uint32_t x_part = (N * kStep + first_slab * kSlabBytes) >> 4, scale_part = first_slab * kSlab * 4;
    for (int step = 0; step < steps; ++step) {
        uint32_t w_tile = at.tiles + ((at.stage * at.stage_bytes) >> 4), x_tile = w_tile + x_part;
        uint32_t from = at.scales + at.stage * at.stage_bytes + scale_part, empty = at.empty + 8 * at.stage;
        barrier_wait(at.full + 8 * at.stage, at.parity);
        if (kHalf && (step & 1) != group) {
            release<kCluster>(empty, lane);
        } else {
            float w_scale = load_shared(at.w_scale + 4 * at.stage), s0 = load_shared(from), s1 = load_shared(from + 32);
            float s2 = 0.0f, s3 = 0.0f;
            if (kOwn == 2) s2 = load_shared(from + 8 * kSlab), s3 = load_shared(from + 8 * kSlab + 32);
            multiply_stage(part, x_tile, w_tile);
            if (kOwn == 1) release<kCluster>(empty, lane);
            add_scaled(sums[0], part, s0 * w_scale, s1 * w_scale);
            if (kOwn == 2) {
                multiply_stage(part, x_tile + (2 * kSlabBytes >> 4), w_tile);
                release<kCluster>(empty, lane);
                add_scaled(sums[1], part, s2 * w_scale, s3 * w_scale);
            }
        }
        if (++at.stage == at.stages) at.stage = 0, at.parity ^= 1;
    }
}

template <int N, int kCluster>
__device__ void consume(char* ring, char* staging, Tables& tables, const Problem& problem, int rank) {
    // The shuffles tell the compiler that a whole warp agrees on the number, so that addresses stay in uniform registers.
    uint32_t lane = threadIdx.x & 31;
    int which = __shfl_sync(0xffffffff, threadIdx.x >> 5, 0);
    int warp = which & 3, group = (which >> 2) - 1;
    int column_tiles = (problem.n + N * kCluster - 1) / (N * kCluster), steps = (problem.k + kStep - 1) / kStep;
    char* own = staging + (group * 4 + warp) * kPieceBytes;
    int segment = 0;
    Reader at{};
    at.stages = tables.stages, at.stage_bytes = tables.stage_bytes;
    at.tiles = __shfl_sync(0xffffffff, place(ring), 0);
    at.scales = shared_address(ring) + at.stage_bytes - kScaleBytes + (warp * 16 + lane / 4) * 4;
    at.full = shared_address(tables.full), at.empty = shared_address(tables.empty);
    at.w_scale = shared_address(tables.w_scale);
    keep(lane), keep(at.scales);
    for (int round = 0, t; (t = tile_of(round, kCluster)) < tables.tiles; ++round) {
        Tile tile = locate(t, segment, tables, problem.group, N * kCluster, column_tiles);
        tile.column += rank * N;             // may lie past n where the cluster's other block does not
        int slabs = (tile.row_end - tile.row + kSlab - 1) / kSlab;
        bool alone = slabs == 1;             // then the groups take every second step of the same rows
        float sums[2][N / 2];
#pragma unroll
        for (int i = 0; i < N / 2; ++i) sums[0][i] = sums[1][i] = 0.0f;
        if (group + 2 < slabs) add_steps<N, kCluster, 2, false>(sums, at, steps, group, group, lane);
        else if (alone) add_steps<N, kCluster, 1, true>(sums, at, steps, 0, group, lane);
        else add_steps<N, kCluster, 1, false>(sums, at, steps, group, group, lane);
        int store_row = tile.row + (alone ? 0 : group) * kSlab + warp * 16;
        if (alone) add_other_group<N>(sums[0], staging, group, warp, lane);
        if (group < slabs) store_slab<N>(sums[0], own, problem, store_row, tile.row_end, tile.column, lane);
        if (group + 2 < slabs) store_slab<N>(sums[1], own, problem, store_row + 128, tile.row_end, tile.column, lane);
    }
}

template <int N, int kCluster>
__global__ void __launch_bounds__(kThreads, 1)
    grouped(const __grid_constant__ CUtensorMap x_map, const __grid_constant__ CUtensorMap w_map,
            const __grid_constant__ Problem problem) {
    extern __shared__ char raw[];
    __shared__ Tables tables;
    char* ring = raw + (1024 - (shared_address(raw) & 1023)) % 1024;
    char* staging = ring + problem.ring_bytes;
    int rank = kCluster == 1 ? 0 : cluster_rank();
    if (threadIdx.x < 2)
        asm volatile("prefetch.tensormap [%0];" ::"l"(threadIdx.x ? &x_map : &w_map) : "memory");
    if (threadIdx.x < kMaxStages) {
        barrier_init(&tables.full[threadIdx.x], 1 + 32);  // the rows' and weights' thread, the scales' warp
        barrier_init(&tables.empty[threadIdx.x], kConsumers * 4 * kCluster);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    fill_tables(tables, problem, (problem.n + N * kCluster - 1) / (N * kCluster), N * kStep);
    if (kCluster > 1) cluster_sync();
    if (threadIdx.x < 128) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        if (threadIdx.x == 0) produce<N, kCluster>(&x_map, &w_map, ring, tables, problem, rank);
        if (threadIdx.x >= 32 && threadIdx.x < 64)
            fetch_scales<N, kCluster>(ring, tables, problem, rank, threadIdx.x - 32);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
        consume<N, kCluster>(ring, staging, tables, problem, rank);
    }
    __syncwarp();
    if (kCluster > 1) cluster_sync();    // nothing may still be on its way to a block that has left
}

// ---- host ----

using Encode = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*, const cuuint64_t*,
                            const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle,
                            CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

Encode encoder() {
    static Encode found = [] {
        void* driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
        return driver ? reinterpret_cast<Encode>(dlsym(driver, "cuTensorMapEncodeTiled")) : nullptr;
    }();
    return found;
}

int encode(CUtensorMap* map, const void* data, long long rows, int k, int box_rows) {
    cuuint64_t sizes[2] = {cuuint64_t(k), cuuint64_t(rows)}, strides[1] = {cuuint64_t(k)};
    cuuint32_t box[2] = {kStep, cuuint32_t(box_rows)}, steps[2] = {1, 1};
    return encoder()(map, CU_TENSOR_MAP_DATA_TYPE_UINT8, 2, const_cast<void*>(data), sizes, strides, box, steps,
                     CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                     CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
}

constexpr int kSharedLimit = 227 * 1024;
static_assert(kSharedLimit - int(sizeof(Tables)) - 1024 - 8 * kPieceBytes >=
              4 * (kMaxSlabs * kSlabBytes + 128 * kStep + kScaleBytes));

template <int N, int kCluster>
int launch(const CUtensorMap& x_map, const CUtensorMap& w_map, Problem problem, int blocks, cudaStream_t stream) {
    int staging = kConsumers * 4 * kPieceBytes;
    problem.ring_bytes = (kSharedLimit - int(sizeof(Tables)) - 1024 - staging) / 1024 * 1024;
    int shared = problem.ring_bytes + staging + 1024;
    auto kernel = grouped<N, kCluster>;
    cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
    if (error != cudaSuccess) return error;
    cudaLaunchAttribute attribute;
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim.x = kCluster;
    attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(blocks / kCluster * kCluster);
    config.blockDim = dim3(kThreads);
    config.dynamicSmemBytes = shared;
    config.stream = stream;
    config.attrs = &attribute;
    config.numAttrs = 1;
    return cudaLaunchKernelEx(&config, kernel, x_map, w_map, problem);
}

}  // namespace

// 0, or a CUDA error (runtime errors as they are, driver errors plus 100000, -1 for no encoder, -2 for bad sizes).
extern "C" int hr_grouped_fp8(const void* x, const float* x_scale, long long x_scale_step, long long x_scale_expert,
                              const void* w, const float* w_scale, void* out, long long out_stride, const int* bounds,
                              int mode, int rows, int experts, int n, int k, int slabs, int columns, int group,
                              int cluster, int blocks, void* stream) {
    if (rows == 0 || n == 0) return 0;
    if (experts < 1 || experts > kMaxExperts || slabs < 1 || slabs > kMaxSlabs || k % 16 || n % 8) return -2;
    if (encoder() == nullptr) return -1;
    CUtensorMap x_map, w_map;
    long long all_rows = mode == kMasked ? (long long)rows * experts : rows;
    if (int error = encode(&x_map, x, all_rows, k, kSlab / cluster)) return 100000 + error;
    if (int error = encode(&w_map, w, (long long)experts * n, k, columns)) return 100000 + error;
    Problem problem{x_scale, w_scale, static_cast<__nv_bfloat16*>(out), bounds, x_scale_step, x_scale_expert, out_stride,
                    rows,    experts, n, k, mode, slabs, 0, group};
    cudaStream_t on = static_cast<cudaStream_t>(stream);
    switch (columns * 10 + cluster) {
        case 641: return launch<64, 1>(x_map, w_map, problem, blocks, on);
        case 1281: return launch<128, 1>(x_map, w_map, problem, blocks, on);
        case 1282: return launch<128, 2>(x_map, w_map, problem, blocks, on);
        default: return -2;
    }
}
