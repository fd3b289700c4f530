/* Shared by the CPU kernels. Same bits as kernels/reference.py: one rounding an operation (-ffp-contract=off),
 * integer maxima instead of ordered float ones. Loops are plain C that gcc vectorizes, in one clone for each
 * instruction set, picked at run time. */
#ifndef GEOTRAIN_COMMON_H
#define GEOTRAIN_COMMON_H
#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(GEOTRAIN_NO_CLONES)
#define CLONES
#elif defined(__x86_64__) && defined(__gnu_linux__) && !defined(__clang__) && __GNUC__ >= 12
#define CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#elif defined(__x86_64__) && defined(__gnu_linux__) && !defined(__clang__)
#define CLONES __attribute__((target_clones("avx2", "default")))
#else
#define CLONES
#endif
#define INLINE static inline __attribute__((always_inline))
#define API __attribute__((visibility("default")))
/* Calls an inlined function with the condition as its last argument, which is constant in either call: what it says
 * costs nothing inside a loop, and lets the compiler vectorize. */
#define EITHER(condition, function, ...) ((condition) ? function(__VA_ARGS__, 1) : function(__VA_ARGS__, 0))

/* Elements. A thread takes a chunk at a time: it holds whole blocks, and is what one sum of squares covers. Below
 * WORTH_THREADS waking the other threads takes longer than the work. */
enum { MAX_BLOCK = 4096, CHUNK = 4096, WORTH_THREADS = 1 << 15, STATE_BLOCK = 256 };
#define SECOND_STREAM(seed) ((seed) ^ 1ull << 63) /* SECOND_STREAM in kernels/reference.py */
enum format { FP32 = 0, BF16 = 1, INT8 = 2, INT4 = 3, E3M0 = 4, TOPK2 = 5 };
enum { SCALE_SHIFT = 16, SCALE_BYTES = 2 }; /* a stored scale is bf16, the upper half of fp32's bits */
enum { TINY_BITS = 27 << 23, NAN_BITS = 0x7FC00000, INFINITY_BITS = 0x7F800000 };

INLINE int32_t bits_of(float x) {
    int32_t b;
    memcpy(&b, &x, 4);
    return b;
}
INLINE float float_of(int32_t b) {
    float x;
    memcpy(&x, &b, 4);
    return x;
}
INLINE int32_t magnitude_bits(float x) { return bits_of(x) & 0x7FFFFFFF; }
INLINE float from_bf16(uint16_t b) { return float_of((int32_t)((uint32_t)b << 16)); }

/* To the nearest, half to even, or with `random` up or down by chance; not beyond the largest finite value. */
INLINE void round_bf16(uint16_t *restrict codes, const float *restrict v, const uint32_t *restrict random, int n,
                       const int stochastic) {
    for (int i = 0; i < n; i++) {
        uint32_t bits = (uint32_t)bits_of(v[i]), magnitude = bits & 0x7FFFFFFF;
        uint32_t rounded = (magnitude + (stochastic ? random[i] >> 16 : 0x7FFF + ((bits >> 16) & 1))) >> 16;
        rounded = rounded < 0x7F7F ? rounded : 0x7F7F;
        rounded = magnitude < INFINITY_BITS ? rounded : NAN_BITS >> 16;
        codes[i] = (uint16_t)(rounded | ((bits >> 16) & 0x8000));
    }
}

/* Nearest, half to even; NaN stays NaN. As torch rounds. */
INLINE uint16_t to_bf16(float x) {
    uint32_t b = (uint32_t)bits_of(x);
    uint32_t rounded = (b + 0x7FFF + ((b >> 16) & 1)) >> 16;
    return (uint16_t)((b & 0x7FFFFFFF) > INFINITY_BITS ? 0x7FC0 : rounded);
}

/* The jobs are filled in by kernels/cpu.py, which lists the same fields in the same order.
 * What is coded: v = (anchor −) values + residual, of `numel` elements; decoded: `out`, of as many. */
typedef struct {
    float *anchor;       /* or NULL; becomes the values, which are fp32 then, if moves_anchor */
    const void *values;  /* fp32, or bf16 if values_are_bf16 */
    void *residual;      /* or NULL; becomes v − decoded. fp32, or bf16 if residual_is_bf16 */
    float *out;          /* with `accumulate` it gets weight · decoded added */
    double *squares;     /* or NULL; the sum of squares of each chunk of `out` */
    uint8_t *payload;    /* written by encoders, read by decoders */
    int64_t numel, codes_offset;
    int64_t residual_begin; /* the element that `residual` begins with */
    uint64_t seed; /* of a residual in bf16 */
    float inverse_level, weight; /* inverse_level: 1 / the grid's largest magnitude */
    int32_t values_are_bf16, residual_is_bf16, moves_anchor, accumulate;
    int32_t format, block, max_scale_bits, threads;
    /* topk2 only: the record of a full block (0) and of the last, shorter one (1) */
    struct record {
        int32_t length, kept, low_bits, lows_at, highs_at, values_at, bytes;
    } record[2];
} codec_job;

/* The residual, which is fp32 by now, from that element on. */
INLINE float *residual_at(const codec_job *job, int64_t at) {
    return job->residual ? (float *)job->residual + (at - job->residual_begin) : NULL;
}

INLINE void store_scale(uint8_t *at, int32_t bits) {
    const uint16_t stored = (uint16_t)((uint32_t)bits >> SCALE_SHIFT);
    memcpy(at, &stored, SCALE_BYTES);
}
INLINE int32_t load_scale(const uint8_t *at) {
    uint16_t stored;
    memcpy(&stored, at, SCALE_BYTES);
    return (int32_t)((uint32_t)stored << SCALE_SHIFT);
}

/* Philox-4x32-10 (Salmon et al., SC 2011): word w of counter first + j to words[w · quarter + j]. Rounds are outside
 * and each word has a pointer of its own, or gcc would not vectorize it. */
INLINE void random_block(uint32_t *words, int64_t first, int64_t quarter, uint64_t seed) {
    uint32_t *restrict c0 = words, *restrict c1 = c0 + quarter, *restrict c2 = c1 + quarter, *restrict c3 = c2 + quarter;
    uint32_t k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32);
    for (int64_t j = 0; j < quarter; j++) {
        c0[j] = (uint32_t)(first + j);
        c1[j] = (uint32_t)((uint64_t)(first + j) >> 32);
        c2[j] = c3[j] = 0;
    }
    for (int round = 0; round < 10; round++) {
        for (int64_t j = 0; j < quarter; j++) {
            const uint64_t p0 = (uint64_t)c0[j] * 0xD2511F53u, p1 = (uint64_t)c2[j] * 0xCD9E8D57u;
            c0[j] = (uint32_t)(p1 >> 32) ^ c1[j] ^ k0;
            c1[j] = (uint32_t)p1;
            c2[j] = (uint32_t)(p0 >> 32) ^ c3[j] ^ k1;
            c3[j] = (uint32_t)p0;
        }
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
}

/* v of elements [at, at + n) into `v`; returns the largest magnitude's bits. In load.c, as are the next. */
int32_t load_block(float *restrict v, const codec_job *job, int64_t at, int n);
/* State that is kept in bf16: `n` elements of it, and back again, rounded by chance. Two halves of a block of
 * STATE_BLOCK share their words, since drawing takes longer than all else: the first takes the low half of each.
 * `first`, a multiple of STATE_BLOCK: the number of the first element. */
void widen(float *restrict wide, const uint16_t *restrict kept, int n);
void keep_in_bf16(uint16_t *restrict kept, const float *restrict wide, int64_t first, int n, uint64_t seed);
double sum_of_squares(const float *x, int64_t n);

/* Blocks [first, last), one file a family of formats; threads are in entry.c. Encoders return whether all was finite. */
int encode_dense(const codec_job *job, int64_t first, int64_t last);
void decode_dense(const codec_job *job, int64_t first, int64_t last);
int dense_ok(const codec_job *job, int64_t first, int64_t last);
int encode_topk(const codec_job *job, int64_t first, int64_t last);
void decode_topk(const codec_job *job, int64_t first, int64_t last);
int topk_ok(const codec_job *job, int64_t first, int64_t last);
#endif
