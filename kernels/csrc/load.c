/* The first pass over a block that is encoded, and the last over a chunk that was decoded. */
#include "common.h"

/* What is meant to be sent, and its largest magnitude. One loop for each combination of what is given, so that none
 * has a condition inside. */
CLONES int32_t load_block(float *restrict v, const codec_job *job, int64_t at, int n) {
    const float *f = (const float *)job->values + at;
    const float *a = job->anchor ? job->anchor + at : NULL, *r = residual_at(job, at);
    const uint16_t *h = (const uint16_t *)job->values + at;
    int32_t largest = 0;
#define CASE(has_anchor, has_residual, is_bf16, EXPRESSION)         \
    case (has_anchor) * 4 + (has_residual) * 2 + (is_bf16):         \
        for (int i = 0; i < n; i++) {                               \
            const float x = EXPRESSION;                             \
            const int32_t magnitude = magnitude_bits(x);            \
            v[i] = x;                                               \
            largest = magnitude > largest ? magnitude : largest;    \
        }                                                           \
        break;
    switch ((a != NULL) * 4 + (r != NULL) * 2 + (job->values_are_bf16 != 0)) {
        CASE(0, 0, 0, f[i])
        CASE(0, 0, 1, from_bf16(h[i]))
        CASE(0, 1, 0, f[i] + r[i])
        CASE(0, 1, 1, from_bf16(h[i]) + r[i])
        CASE(1, 0, 0, a[i] - f[i])
        CASE(1, 0, 1, a[i] - from_bf16(h[i]))
        CASE(1, 1, 0, (a[i] - f[i]) + r[i])
        CASE(1, 1, 1, (a[i] - from_bf16(h[i])) + r[i])
    }
    return largest;
}

CLONES void widen(float *restrict wide, const uint16_t *restrict kept, int n) {
    for (int i = 0; i < n; i++) wide[i] = from_bf16(kept[i]);
}

CLONES void keep_in_bf16(uint16_t *restrict kept, const float *restrict wide, int64_t first, int n, uint64_t seed) {
    enum { HALF = STATE_BLOCK / 2 };
    uint32_t high[HALF] __attribute__((aligned(64))), low[HALF] __attribute__((aligned(64)));
    for (int at = 0; at < n; at += STATE_BLOCK) {
        const int left = n - at, second = at + HALF;
        random_block(high, (first + at) / 8, HALF / 4, seed);
        for (int i = 0; i < HALF; i++) low[i] = high[i] << 16;
        round_bf16(kept + at, wide + at, low, left < HALF ? left : HALF, 1);
        round_bf16(kept + second, wide + second, high, left < STATE_BLOCK ? left - HALF : HALF, 1);
    }
}

/* In fp64, where the square of an fp32 number is exact. The order is fixed, whatever the width of the machine's
 * vectors: element i goes to lane i mod LANES, and the lanes are then added by halves. */
enum { LANES = 32 };
typedef float lanes_f32 __attribute__((vector_size(4 * LANES)));
typedef double lanes_f64 __attribute__((vector_size(8 * LANES)));

CLONES double sum_of_squares(const float *x, int64_t n) {
    lanes_f64 sum = {0};
    for (int64_t i = 0; i < n; i += LANES) {
        lanes_f32 part = {0};
        if (n - i >= LANES)
            memcpy(&part, x + i, sizeof part);
        else
            memcpy(&part, x + i, sizeof(float) * (size_t)(n - i));
        const lanes_f64 wide = __builtin_convertvector(part, lanes_f64);
        sum += wide * wide;
    }
    for (int width = LANES / 2; width; width /= 2)
        for (int lane = 0; lane < width; lane++) sum[lane] += sum[lane + width];
    return sum[0];
}
