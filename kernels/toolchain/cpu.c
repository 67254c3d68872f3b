/* The CPU's own kernels: matrix products on packed weights, experts, norms, rope and attention over paged rows.
 *
 * One promise above all: every output row is computed from its own input by one fixed sequence of operations, whatever
 * the number of rows, their neighbours, or the number of threads. Sums run over k (or over a context's rows) from left
 * to right in one accumulator per output value. So a request has the same bits alone and in a crowd.
 *
 * Plain C with GCC/clang vector extensions, no headers of torch: built in three seconds by kernels/cpu_library.py, called
 * through ctypes. Shapes are row-major; strides are in elements. Callers guarantee that sizes fit; nothing is checked.
 */

#include <math.h>
#ifdef _OPENMP
#include <omp.h>
#endif
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define LANES 8
#define PANEL 16  /* output columns per packed panel */
#define ROWS_AT_ONCE 6
#define ROW_BLOCK 96
#define INLINE static inline __attribute__((always_inline))

typedef float vec __attribute__((vector_size(32)));
typedef float vec_u __attribute__((vector_size(32), aligned(4)));
typedef int32_t ivec __attribute__((vector_size(32)));
typedef uint32_t uvec __attribute__((vector_size(32)));
typedef uint32_t uvec_u __attribute__((vector_size(32), aligned(2), may_alias));
typedef uint16_t half_u __attribute__((vector_size(16), aligned(2)));

typedef int64_t i64;

INLINE vec load(const float *p) { return *(const vec_u *)p; }
INLINE void store(float *p, vec v) { *(vec_u *)p = v; }
INLINE vec splat(float x) { return (vec){x, x, x, x, x, x, x, x}; }
/* One packed row of a panel: columns 0-7, columns 8-15. */
INLINE void load_panel_f32(const float *p, vec *low, vec *high) { *low = load(p), *high = load(p + LANES); }
/* In bf16, columns c and c + 8 are neighbours: one load, one shift, one mask. */
INLINE void load_panel_bf16(const uint16_t *p, vec *low, vec *high) {
    uvec pairs = *(const uvec_u *)p;
    *low = (vec)(pairs << 16), *high = (vec)(pairs & 0xffff0000u);
}
INLINE vec load_bf16(const uint16_t *p) {
    uvec wide = __builtin_convertvector(*(const half_u *)p, uvec) << 16;
    return (vec)wide;
}

INLINE vec exp_vec(vec x) {
    /* 2^n * e^r with |r| <= ln 2 / 2; below -87 the result is 0. Error under 2 ulp. */
    vec low = splat(-87.0f), high = splat(88.0f);
    ivec small = x < low, big = x > high;
    x = (vec)(((ivec)x & ~small) | ((ivec)low & small));
    x = (vec)(((ivec)x & ~big) | ((ivec)high & big));
    vec t = x * splat(1.44269504088896341f) + splat(12582912.0f); /* adding 1.5 * 2^23 rounds to the nearest integer */
    ivec n = (ivec)t - (ivec)splat(12582912.0f);
    vec whole = t - splat(12582912.0f);
    vec r = x - whole * splat(0.693359375f);
    r = r - whole * splat(-2.12194440e-4f);
    vec p = splat(1.9875691500e-4f);
    p = p * r + splat(1.3981999507e-3f);
    p = p * r + splat(8.3334519073e-3f);
    p = p * r + splat(4.1665795894e-2f);
    p = p * r + splat(1.6666665459e-1f);
    p = p * r + splat(5.0000001201e-1f);
    p = p * (r * r) + r + splat(1.0f);
    vec scaled = (vec)((ivec)p + (n << 23));
    return (vec)((ivec)scaled & ~small);
}

/* ---- matrix product: y[m, n] (+)= sum_k x[m, k] * w[n, k] ------------------------------------------------------- */

/* Packed weight: ceil(N / PANEL) panels of [K][PANEL], zero-padded columns; fp32, or bf16 in load_panel_bf16's order. */

#define TILE(NAME, TYPE, LOAD)                                                                                        \
    INLINE void NAME(const int mr, const int np, const float *const *x, const TYPE *w, i64 k_size, float *const *y,  \
                     i64 column, i64 n_size, int add) {                                                              \
        vec acc[ROWS_AT_ONCE][8];                                                                                     \
        _Pragma("GCC unroll 8") for (int m = 0; m < mr; m++)                                                          \
            _Pragma("GCC unroll 8") for (int v = 0; v < 2 * np; v++) acc[m][v] = splat(0.0f);                         \
        for (i64 k = 0; k < k_size; k++) {                                                                            \
            vec b[8];                                                                                                 \
            _Pragma("GCC unroll 8") for (int p = 0; p < np; p++)                                                      \
                LOAD(w + (p * k_size + k) * PANEL, &b[2 * p], &b[2 * p + 1]);                                         \
            _Pragma("GCC unroll 8") for (int m = 0; m < mr; m++) {                                                    \
                vec a = splat(x[m][k]);                                                                               \
                _Pragma("GCC unroll 8") for (int v = 0; v < 2 * np; v++) acc[m][v] += a * b[v];                       \
            }                                                                                                         \
        }                                                                                                             \
        _Pragma("GCC unroll 8") for (int m = 0; m < mr; m++)                                                          \
            _Pragma("GCC unroll 8") for (int v = 0; v < 2 * np; v++) {                                                \
                i64 at = column + v * LANES;                                                                          \
                if (at + LANES <= n_size) {                                                                           \
                    store(y[m] + at, add ? load(y[m] + at) + acc[m][v] : acc[m][v]);                                  \
                } else {                                                                                              \
                    for (i64 n = at; n < n_size; n++) y[m][n] = (add ? y[m][n] : 0.0f) + acc[m][v][n - at];           \
                }                                                                                                     \
            }                                                                                                         \
    }                                                                                                                 \
    static void NAME##_rows(int mr, const float *const *x, const TYPE *w, i64 k_size, float *const *y, i64 n_size,    \
                            i64 first_panel, i64 last_panel, int add) {                                              \
        i64 p = first_panel;                                                                                          \
        if (mr == 1)                                                                                                  \
            for (; p + 4 <= last_panel; p += 4) NAME(1, 4, x, w + p * k_size * PANEL, k_size, y, p * PANEL, n_size, add); \
        if (mr <= 3)                                                                                                  \
            for (; p + 2 <= last_panel; p += 2) {                                                                     \
                const TYPE *at = w + p * k_size * PANEL;                                                              \
                if (mr == 1) NAME(1, 2, x, at, k_size, y, p * PANEL, n_size, add);                                    \
                else if (mr == 2) NAME(2, 2, x, at, k_size, y, p * PANEL, n_size, add);                               \
                else NAME(3, 2, x, at, k_size, y, p * PANEL, n_size, add);                                            \
            }                                                                                                         \
        for (; p < last_panel; p++) {                                                                                 \
            const TYPE *at = w + p * k_size * PANEL;                                                                  \
            switch (mr) {                                                                                             \
                case 1: NAME(1, 1, x, at, k_size, y, p * PANEL, n_size, add); break;                                  \
                case 2: NAME(2, 1, x, at, k_size, y, p * PANEL, n_size, add); break;                                  \
                case 3: NAME(3, 1, x, at, k_size, y, p * PANEL, n_size, add); break;                                  \
                case 4: NAME(4, 1, x, at, k_size, y, p * PANEL, n_size, add); break;                                  \
                case 5: NAME(5, 1, x, at, k_size, y, p * PANEL, n_size, add); break;                                  \
                default: NAME(6, 1, x, at, k_size, y, p * PANEL, n_size, add);                                        \
            }                                                                                                         \
        }                                                                                                             \
    }

TILE(tile_f32, float, load_panel_f32)
TILE(tile_bf16, uint16_t, load_panel_bf16)

/* Rows m0..m1 against panels p0..p1. Panels outside, rows inside: a panel stays in L1 while the block's rows pass. */
static void product(const float *x, i64 x_stride, const void *w, int bf16, i64 k_size, float *y, i64 y_stride,
                    i64 n_size, i64 m0, i64 m1, i64 p0, i64 p1, int add) {
    i64 tiles = (m1 - m0 + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE;
    i64 group = m1 - m0 <= 3 ? p1 - p0 : 1;
    for (i64 p = p0; p < p1; p += group)
        for (i64 t = 0, m = m0; t < tiles; t++) {
            int mr = (int)((m1 - m) / (tiles - t));
            const float *xs[ROWS_AT_ONCE];
            float *ys[ROWS_AT_ONCE];
            for (int i = 0; i < ROWS_AT_ONCE; i++) {
                xs[i] = x + (m + (i < mr ? i : 0)) * x_stride;
                ys[i] = y + (m + (i < mr ? i : 0)) * y_stride;
            }
            if (bf16) tile_bf16_rows(mr, xs, w, k_size, ys, n_size, p, p + group, add);
            else tile_f32_rows(mr, xs, w, k_size, ys, n_size, p, p + group, add);
            m += mr;
        }
}

void hr_pack(const float *w, i64 n_size, i64 k_size, void *packed, int bf16) {
    i64 panels = (n_size + PANEL - 1) / PANEL;
    for (i64 p = 0; p < panels; p++)
        for (i64 k = 0; k < k_size; k++)
            for (i64 c = 0; c < PANEL; c++) {
                i64 n = p * PANEL + c, at = (p * k_size + k) * PANEL + c;
                float value = n < n_size ? w[n * k_size + k] : 0.0f;
                if (bf16) {
                    uint32_t bits;
                    memcpy(&bits, &value, 4);
                    at += c < LANES ? c : c - PANEL + 1; /* c -> 2 c, c + 8 -> 2 c + 1 */
                    ((uint16_t *)packed)[at] = (uint16_t)(bits >> 16); /* the caller saw that nothing is lost */
                } else {
                    ((float *)packed)[at] = value;
                }
            }
}

/* Waking a second thread costs as much as about two million multiplications, far more on a busy host. */
static int worth(int threads, double multiplications) { return multiplications < 2e6 ? 1 : threads; }

/* `batch` independent products with their own x, w and y; panels of one weight are shared out between threads. */
void hr_linear(const float *x, i64 x_batch, i64 x_stride, const void *w, int bf16, i64 batch, i64 m_size, i64 n_size,
               i64 k_size, float *y, i64 y_batch, i64 y_stride, int add, int threads) {
    i64 panels = (n_size + PANEL - 1) / PANEL, blocks = (m_size + ROW_BLOCK - 1) / ROW_BLOCK;
    i64 element = bf16 ? 2 : 4, weight = panels * k_size * PANEL * element;
    threads = worth(threads, (double)batch * m_size * n_size * k_size);
    i64 wanted = threads > 1 ? (4 * threads + batch * blocks - 1) / (batch * blocks) : 1;
    i64 shares = wanted < 1 ? 1 : wanted > panels ? panels : wanted;
    i64 tasks = batch * blocks * shares;
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (threads > 1)
    for (i64 task = 0; task < tasks; task++) {
        i64 b = task / (blocks * shares), block = task / shares % blocks, share = task % shares;
        i64 m0 = block * ROW_BLOCK, m1 = m0 + ROW_BLOCK < m_size ? m0 + ROW_BLOCK : m_size;
        product(x + b * x_batch, x_stride, (const char *)w + b * weight, bf16, k_size, y + b * y_batch, y_stride,
                n_size, m0, m1, panels * share / shares, panels * (share + 1) / shares, add);
    }
}

/* ---- feed-forward ------------------------------------------------------------------------------------------------ */

INLINE vec silu_mul_vec(vec g, vec u) { return g / (splat(1.0f) + exp_vec(-g)) * u; }

/* gate_up [m, 2 * inner] -> act [m, inner], inner a multiple of LANES */
static void silu_mul(const float *gate_up, i64 stride, i64 m_size, i64 inner, float *act) {
    for (i64 m = 0; m < m_size; m++)
        for (i64 i = 0; i < inner; i += LANES)
            store(act + m * inner + i, silu_mul_vec(load(gate_up + m * stride + i), load(gate_up + m * stride + inner + i)));
}

static i64 panels_of(i64 n) { return (n + PANEL - 1) / PANEL; }

/* SwiGLU of rows m0..m1 of x into y (+)=; scratch holds ROW_BLOCK * 3 * inner floats. */
static void ffn_block(const float *x, i64 x_stride, const void *gate_up, const void *down, int bf16, i64 hidden,
                      i64 inner, float *y, i64 y_stride, i64 m_size, int add, float *scratch) {
    float *act = scratch + ROW_BLOCK * 2 * inner;
    product(x, x_stride, gate_up, bf16, hidden, scratch, 2 * inner, 2 * inner, 0, m_size, 0, panels_of(2 * inner), 0);
    silu_mul(scratch, 2 * inner, m_size, inner, act);
    product(act, inner, down, bf16, inner, y, y_stride, hidden, 0, m_size, 0, panels_of(hidden), add);
}

/* One SwiGLU for all rows. scratch: m_size * 3 * inner floats. */
void hr_ffn(const float *x, i64 x_stride, i64 m_size, i64 hidden, i64 inner, const void *gate_up, const void *down,
            int bf16, float *y, i64 y_stride, int add, float *scratch, int threads) {
    float *act = scratch + m_size * 2 * inner;
    hr_linear(x, 0, x_stride, gate_up, bf16, 1, m_size, 2 * inner, hidden, scratch, 0, 2 * inner, 0, threads);
    silu_mul(scratch, 2 * inner, m_size, inner, act);
    hr_linear(act, 0, inner, down, bf16, 1, m_size, hidden, inner, y, 0, y_stride, add, threads);
}

/* y[t] (+)= sum over k of weights[t, k] * expert[ids[t, k]](x[t]), k = 0 first.
 * rows: m_size * top_k * hidden floats; order: 2 * m_size * top_k + experts + 1 integers;
 * scratch: threads * ROW_BLOCK * (hidden + 3 * inner) floats. */
void hr_experts(const float *x, i64 x_stride, i64 m_size, i64 hidden, i64 inner, i64 experts, i64 top_k,
                const float *weights, const i64 *ids, const void *gate_up, const void *down, int bf16, float *y,
                i64 y_stride, int add, float *rows, i64 *order, float *scratch, int threads) {
    i64 pairs = m_size * top_k, *ends = order + pairs;
    for (i64 e = 0; e <= experts; e++) ends[e] = 0;
    for (i64 i = 0; i < pairs; i++) ends[ids[i] + 1]++;
    for (i64 e = 0; e < experts; e++) ends[e + 1] += ends[e];
    for (i64 i = 0; i < pairs; i++) order[ends[ids[i]]++] = i; /* now ends[e] is one past expert e's last pair */
    i64 element = bf16 ? 2 : 4;
    i64 up_bytes = panels_of(2 * inner) * PANEL * hidden * element, down_bytes = panels_of(hidden) * PANEL * inner * element;
    i64 per_expert = (pairs + ROW_BLOCK - 1) / ROW_BLOCK;
    threads = worth(threads, 3.0 * pairs * hidden * inner);
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
#ifdef _OPENMP
        float *mine = scratch + omp_get_thread_num() * ROW_BLOCK * (hidden + 3 * inner);
#else
        float *mine = scratch;
#endif
#pragma omp for schedule(dynamic)
        for (i64 task = 0; task < experts * per_expert; task++) {
            i64 e = task / per_expert, first = (e ? ends[e - 1] : 0) + task % per_expert * ROW_BLOCK;
            i64 count = ends[e] - first < ROW_BLOCK ? ends[e] - first : ROW_BLOCK;
            if (count <= 0) continue;
            float *read = mine, *act = mine + ROW_BLOCK * hidden;
            for (i64 i = 0; i < count; i++)
                memcpy(read + i * hidden, x + order[first + i] / top_k * x_stride, hidden * sizeof(float));
            ffn_block(read, hidden, (const char *)gate_up + e * up_bytes, (const char *)down + e * down_bytes, bf16,
                      hidden, inner, rows + first * hidden, hidden, count, 0, act);
        }
    }
    i64 *place = ends + experts + 1; /* pair -> the row that holds its result */
    for (i64 i = 0; i < pairs; i++) place[order[i]] = i;
#pragma omp parallel for num_threads(threads) if (threads > 1 && m_size >= 64)
    for (i64 t = 0; t < m_size; t++)
        for (i64 h = 0; h < hidden; h += LANES) {
            vec sum = splat(0.0f);
            for (i64 k = 0; k < top_k; k++)
                sum += splat(weights[t * top_k + k]) * load(rows + place[t * top_k + k] * hidden + h);
            float *at = y + t * y_stride + h;
            store(at, add ? load(at) + sum : sum);
        }
}

/* ---- norm, rope, gate -------------------------------------------------------------------------------------------- */

INLINE void norm_row(const float *row, const float *gain, float *out, i64 width, float eps) {
    vec sum = splat(0.0f);
    for (i64 i = 0; i < width; i += LANES) sum += load(row + i) * load(row + i);
    float total = ((sum[0] + sum[1]) + (sum[2] + sum[3])) + ((sum[4] + sum[5]) + (sum[6] + sum[7]));
    vec scale = splat(1.0f / sqrtf(total / (float)width + eps));
    for (i64 i = 0; i < width; i += LANES) store(out + i, load(row + i) * scale * load(gain + i));
}

/* y = x / sqrt(mean(x^2) + eps) * gain; width a multiple of LANES. In place is fine. */
void hr_rms_norm(const float *x, i64 x_stride, const float *gain, float *y, i64 y_stride, i64 m_size, i64 width,
                 float eps) {
    for (i64 m = 0; m < m_size; m++) norm_row(x + m * x_stride, gain, y + m * y_stride, width, eps);
}

static void rotate(float *row, i64 dim, const float *c, const float *s) {
    for (i64 i = 0; i < dim / 2; i++) {
        float even = row[2 * i], odd = row[2 * i + 1];
        row[2 * i] = even * c[i] - odd * s[i];
        row[2 * i + 1] = even * s[i] + odd * c[i];
    }
}

/* Interleaved pairs, in place. x [tokens, heads, dim] with strides; cos, sin [tokens, dim / 2]. */
void hr_rope(float *x, i64 token_stride, i64 head_stride, i64 tokens, i64 heads, i64 dim, const float *cosine,
             const float *sine) {
    for (i64 t = 0; t < tokens; t++)
        for (i64 h = 0; h < heads; h++)
            rotate(x + t * token_stride + h * head_stride, dim, cosine + t * (dim / 2), sine + t * (dim / 2));
}

INLINE uint16_t to_bf16(float x) { /* nearest, ties to even; NaN stays NaN */
    uint32_t bits;
    memcpy(&bits, &x, 4);
    if (x != x) return (uint16_t)(bits >> 16 | 0x40);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

/* Norm each row's latent, rotate its rope part and those of its token's queries, all in place; then store the row in
 * its slot (< 0: padding, not stored). q [tokens, heads, head_dim], rows [tokens, latent + rope], pool slots of row. */
void hr_store_rows(float *q, i64 q_token, i64 heads, i64 head_dim, float *rows, i64 row_stride, i64 tokens, i64 latent,
                   i64 rope, const float *gain, float eps, const float *cosine, const float *sine, void *pool, int bf16,
                   const i64 *slots) {
    i64 dim = latent + rope;
    for (i64 t = 0; t < tokens; t++) {
        const float *c = cosine + t * (rope / 2), *s = sine + t * (rope / 2);
        float *row = rows + t * row_stride;
        for (i64 h = 0; h < heads; h++) rotate(q + t * q_token + (h + 1) * head_dim - rope, rope, c, s);
        norm_row(row, gain, row, latent, eps);
        rotate(row + latent, rope, c, s);
        if (slots[t] < 0) continue;
        if (bf16) {
            uint16_t *to = (uint16_t *)pool + slots[t] * dim;
            for (i64 d = 0; d < dim; d++) to[d] = to_bf16(row[d]);
        } else {
            memcpy((float *)pool + slots[t] * dim, row, dim * sizeof(float));
        }
    }
}

/* logits [tokens, stride], stride a multiple of LANES >= experts, overwritten with scores. bias [experts].
 * choice: stride floats of scratch. Ties go to the lower id. */
void hr_gate(float *logits, i64 stride, i64 tokens, i64 experts, const float *bias, i64 groups, i64 kept_groups,
             i64 top_k, int normalise, float scaling, float *weights, i64 *ids, float *choice) {
    i64 size = experts / groups;
    for (i64 t = 0; t < tokens; t++) {
        float *score = logits + t * stride;
        for (i64 e = 0; e < stride; e += LANES) store(score + e, splat(1.0f) / (splat(1.0f) + exp_vec(-load(score + e))));
        for (i64 e = 0; e < experts; e++) choice[e] = score[e] + bias[e];
        if (kept_groups < groups) {
            float group_score[groups];
            for (i64 g = 0; g < groups; g++) {
                float best = -INFINITY, second = -INFINITY;
                for (i64 e = g * size; e < (g + 1) * size; e++) {
                    if (choice[e] > best) second = best, best = choice[e];
                    else if (choice[e] > second) second = choice[e];
                }
                group_score[g] = best + second;
            }
            for (i64 g = 0; g < groups; g++) {
                i64 rank = 0;
                for (i64 o = 0; o < groups; o++)
                    rank += group_score[o] > group_score[g] || (group_score[o] == group_score[g] && o < g);
                if (rank >= kept_groups)
                    for (i64 e = g * size; e < (g + 1) * size; e++) choice[e] = -INFINITY;
            }
        }
        float sum = 0.0f;
        for (i64 k = 0; k < top_k; k++) {
            i64 best = 0;
            for (i64 e = 1; e < experts; e++)
                if (choice[e] > choice[best]) best = e;
            choice[best] = -INFINITY;
            ids[t * top_k + k] = best;
            weights[t * top_k + k] = score[best];
            sum += score[best];
        }
        float factor = normalise ? scaling / (sum + 1e-20f) : scaling;
        for (i64 k = 0; k < top_k; k++) weights[t * top_k + k] *= factor;
    }
}

/* ---- absorbed attention over paged rows -------------------------------------------------------------------------- */

#define KEY_BLOCK 16

/* Copy rows first..first + count of a sequence, as fp32, to out [count, dim]. */
static void read_rows(const void *pool, int bf16, i64 dim, const int32_t *table, i64 block_size, i64 first, i64 count,
                      float *out) {
    for (i64 i = 0; i < count; i++) {
        i64 slot = (i64)table[(first + i) / block_size] * block_size + (first + i) % block_size;
        if (!bf16) {
            memcpy(out + i * dim, (const float *)pool + slot * dim, dim * sizeof(float));
        } else {
            const uint16_t *row = (const uint16_t *)pool + slot * dim;
            for (i64 d = 0; d < dim; d += LANES) store(out + i * dim + d, load_bf16(row + d));
        }
    }
}

/* scores[s][lane] for KEY_BLOCK rows against LANES heads; q_t [dim][LANES] */
INLINE void score_block(const float *q_t, const float *rows, i64 dim, float scale, float *scores, i64 scores_stride) {
    for (int half = 0; half < KEY_BLOCK; half += 8) {
        vec acc[8];
        _Pragma("GCC unroll 8") for (int s = 0; s < 8; s++) acc[s] = splat(0.0f);
        const float *base = rows + half * dim;
        for (i64 d = 0; d < dim; d++) {
            vec q = load(q_t + d * LANES);
            _Pragma("GCC unroll 8") for (int s = 0; s < 8; s++) acc[s] += splat(base[s * dim + d]) * q;
        }
        _Pragma("GCC unroll 8") for (int s = 0; s < 8; s++) store(scores + (half + s) * scores_stride, acc[s] * splat(scale));
    }
}

/* out[h][c] += sum over s of p[s][h] * rows[s][c], s from left to right; out_t is [LANES][latent] */
INLINE void value_block(const float *p, i64 p_stride, const float *rows, i64 dim, i64 count, i64 latent, float *out) {
    for (i64 c = 0; c < latent; c += LANES) {
        vec acc[LANES];
        _Pragma("GCC unroll 8") for (int h = 0; h < LANES; h++) acc[h] = load(out + h * latent + c);
        for (i64 s = 0; s < count; s++) {
            vec value = load(rows + s * dim + c);
            _Pragma("GCC unroll 8") for (int h = 0; h < LANES; h++) acc[h] += splat(p[s * p_stride + h]) * value;
        }
        _Pragma("GCC unroll 8") for (int h = 0; h < LANES; h++) store(out + h * latent + c, acc[h]);
    }
}

/* One task: `count` consecutive queries of one sequence, all heads. The first query sees `seen` rows, the next one more. */
static void attend(const float *q, i64 q_token, i64 heads, i64 dim, i64 latent, const void *pool, int bf16,
                   const int32_t *table, i64 block_size, i64 seen, i64 count, float scale, float *out, i64 out_token,
                   float *scratch) {
    i64 groups = (heads + LANES - 1) / LANES, lines = groups * count, longest = seen + count - 1;
    i64 width = (longest + KEY_BLOCK - 1) / KEY_BLOCK * KEY_BLOCK;
    float *rows = scratch, *q_t = rows + KEY_BLOCK * dim, *sums = q_t + lines * dim * LANES;
    float *made = sums + lines * LANES, *scores = made + lines * LANES * latent;
    for (i64 line = 0; line < lines; line++) {
        const float *from = q + line / groups * q_token;
        for (i64 d = 0; d < dim; d++)
            for (i64 h = 0; h < LANES; h++) {
                i64 head = line % groups * LANES + h;
                q_t[(line * dim + d) * LANES + h] = head < heads ? from[head * dim + d] : 0.0f;
            }
    }
    for (i64 s = 0; s < width; s += KEY_BLOCK) {
        i64 valid = longest - s < KEY_BLOCK ? longest - s : KEY_BLOCK;
        read_rows(pool, bf16, dim, table, block_size, s, valid, rows);
        if (valid < KEY_BLOCK) memset(rows + valid * dim, 0, (KEY_BLOCK - valid) * dim * sizeof(float));
        for (i64 line = 0; line < lines; line++)
            score_block(q_t + line * dim * LANES, rows, dim, scale, scores + (line * width + s) * LANES, LANES);
    }
    for (i64 line = 0; line < lines; line++) {
        i64 end = seen + line / groups;
        float *score = scores + line * width * LANES;
        vec top = load(score);
        for (i64 s = 1; s < end; s++) {
            vec v = load(score + s * LANES);
            ivec above = v > top;
            top = (vec)(((ivec)v & above) | ((ivec)top & ~above));
        }
        vec sum = splat(0.0f);
        for (i64 s = 0; s < end; s++) {
            vec p = exp_vec(load(score + s * LANES) - top);
            store(score + s * LANES, p);
            sum += p;
        }
        store(sums + line * LANES, sum);
    }
    memset(made, 0, lines * LANES * latent * sizeof(float));
    for (i64 s = 0; s < longest; s += KEY_BLOCK) {
        i64 valid = longest - s < KEY_BLOCK ? longest - s : KEY_BLOCK;
        read_rows(pool, bf16, dim, table, block_size, s, valid, rows);
        for (i64 line = 0; line < lines; line++) {
            i64 end = seen + line / groups, use = end - s < valid ? end - s : valid;
            if (use > 0)
                value_block(scores + (line * width + s) * LANES, LANES, rows, dim, use, latent, made + line * LANES * latent);
        }
    }
    for (i64 line = 0; line < lines; line++)
        for (i64 h = 0; h < LANES; h++) {
            i64 head = line % groups * LANES + h;
            if (head >= heads) break;
            float *to = out + line / groups * out_token + head * latent;
            vec total = splat(sums[line * LANES + h]);
            for (i64 c = 0; c < latent; c += LANES) store(to + c, load(made + (line * LANES + h) * latent + c) / total);
        }
}

static i64 attend_scratch(i64 heads, i64 dim, i64 latent, i64 count, i64 longest) {
    i64 lines = (heads + LANES - 1) / LANES * count, width = (longest + KEY_BLOCK - 1) / KEY_BLOCK * KEY_BLOCK;
    return KEY_BLOCK * dim + lines * LANES * (dim + 1 + latent + width);
}

/* Sequences packed in q [tokens, heads, dim]; starts [sequences + 1]; tables [sequences, table_stride] int32.
 * Query j of a sequence sees its first context - length + j + 1 rows. dim and latent are multiples of LANES.
 * Returns 0, or 1 when memory ran out. */
int hr_attend(const float *q, i64 q_token, i64 heads, i64 dim, i64 latent, const void *pool, int bf16, i64 block_size,
              const int32_t *tables, i64 table_stride, const i64 *starts, const i64 *contexts, i64 sequences,
              i64 at_once, float scale, float *out, i64 out_token, int threads) {
    i64 tasks = 0, longest = 1, *first = malloc((sequences + 1) * sizeof(i64));
    if (!first) return 1;
    for (i64 i = 0; i < sequences; i++) {
        first[i] = tasks;
        tasks += (starts[i + 1] - starts[i] + at_once - 1) / at_once;
        if (contexts[i] > longest) longest = contexts[i];
    }
    first[sequences] = tasks;
    double rows_read = 0;
    for (i64 i = 0; i < sequences; i++) rows_read += (double)(starts[i + 1] - starts[i]) * contexts[i];
    threads = worth(threads, rows_read * heads * (dim + latent));
    int failed = 0;
#pragma omp parallel num_threads(threads) if (threads > 1 && tasks > 1)
    {
        float *scratch = malloc(attend_scratch(heads, dim, latent, at_once, longest) * sizeof(float));
        if (!scratch) {
#pragma omp atomic write
            failed = 1;
        }
#pragma omp for schedule(dynamic)
        for (i64 task = 0; task < tasks; task++) {
            if (!scratch) continue;
            i64 low = 0, high = sequences;
            while (high - low > 1) {
                i64 middle = (low + high) / 2;
                if (first[middle] <= task) low = middle;
                else high = middle;
            }
            while (first[low + 1] <= task) low++;
            i64 offset = (task - first[low]) * at_once, length = starts[low + 1] - starts[low];
            i64 count = length - offset < at_once ? length - offset : at_once;
            i64 token = starts[low] + offset;
            attend(q + token * q_token, q_token, heads, dim, latent, pool, bf16, tables + low * table_stride, block_size,
                   contexts[low] - length + offset + 1, count, scale, out + token * out_token, out_token, scratch);
        }
        free(scratch);
    }
    free(first);
    return failed;
}

/* ---- between the kernels, and many of them in one call ------------------------------------------------------------ */

/* x[m] += y[m] */
void hr_add_rows(float *x, i64 x_stride, const float *y, i64 y_stride, i64 m_size, i64 width) {
    for (i64 m = 0; m < m_size; m++)
        for (i64 i = 0; i < width; i++) x[m * x_stride + i] += y[m * y_stride + i];
}

/* to[t][h] = from[t][h], `width` values each */
void hr_copy_heads(const float *from, i64 from_token, i64 from_head, float *to, i64 to_token, i64 to_head, i64 tokens,
                   i64 heads, i64 width) {
    for (i64 t = 0; t < tokens; t++)
        for (i64 h = 0; h < heads; h++)
            memcpy(to + t * to_token + h * to_head, from + t * from_token + h * from_head, width * sizeof(float));
}

#define CALL_WORDS 20
#define P(i) ((void *)(intptr_t)a[i])
#define I(i) ((int)a[i])

static float as_float(i64 word) {
    uint32_t bits = (uint32_t)word;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

/* One call after another. Each is CALL_WORDS words: its number in cpu_library.RECORDED, then its arguments in order,
 * floats as their bits. Returns 0, or 1 when memory ran out; then nothing after that call has happened. */
int hr_replay(const i64 *calls, i64 count) {
    for (i64 call = 0; call < count; call++) {
        const i64 *a = calls + call * CALL_WORDS + 1;
        switch (a[-1]) {
            case 0:
                hr_linear(P(0), a[1], a[2], P(3), I(4), a[5], a[6], a[7], a[8], P(9), a[10], a[11], I(12), I(13));
                break;
            case 1:
                hr_ffn(P(0), a[1], a[2], a[3], a[4], P(5), P(6), I(7), P(8), a[9], I(10), P(11), I(12));
                break;
            case 2:
                hr_experts(P(0), a[1], a[2], a[3], a[4], a[5], a[6], P(7), P(8), P(9), P(10), I(11), P(12), a[13],
                           I(14), P(15), P(16), P(17), I(18));
                break;
            case 3: hr_rms_norm(P(0), a[1], P(2), P(3), a[4], a[5], a[6], as_float(a[7])); break;
            case 4:
                hr_store_rows(P(0), a[1], a[2], a[3], P(4), a[5], a[6], a[7], a[8], P(9), as_float(a[10]), P(11), P(12),
                              P(13), I(14), P(15));
                break;
            case 5:
                hr_gate(P(0), a[1], a[2], a[3], P(4), a[5], a[6], a[7], I(8), as_float(a[9]), P(10), P(11), P(12));
                break;
            case 6:
                if (hr_attend(P(0), a[1], a[2], a[3], a[4], P(5), I(6), a[7], P(8), a[9], P(10), P(11), a[12], a[13],
                              as_float(a[14]), P(15), a[16], I(17)))
                    return 1;
                break;
            case 7: hr_add_rows(P(0), a[1], P(2), a[3], a[4], a[5]); break;
            case 8: hr_copy_heads(P(0), a[1], a[2], P(3), a[4], a[5], a[6], a[7], a[8]); break;
        }
    }
    return 0;
}
