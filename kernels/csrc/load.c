/* The first pass over a block: what is meant to be sent, its largest magnitude and its sum of squares. */
#include "common.h"

typedef float lanes __attribute__((vector_size(4 * LANES)));

#define LOAD_LOOP(EXPRESSION)                \
    for (int i = 0; i < n; i++) {            \
        float x = EXPRESSION;                \
        int32_t m = magnitude_bits(x);       \
        v[i] = x;                            \
        largest = m > largest ? m : largest; \
    }
CLONES int32_t load_block(float *restrict v, const quantize_job *job, int64_t at, int n, double *restrict squares) {
    const float *f = (const float *)job->values + at;
    const float *a = job->anchor ? job->anchor + at : NULL, *r = job->residual ? job->residual + at : NULL;
    const uint16_t *h = (const uint16_t *)job->values + at;
    const float decay = job->decay;
    int32_t largest = 0;
    switch ((a != NULL) * 4 + (r != NULL) * 2 + (job->values_are_bf16 != 0)) {
    case 0:
        LOAD_LOOP(f[i]) break;
    case 1:
        LOAD_LOOP(from_bf16(h[i])) break;
    case 2:
        LOAD_LOOP(f[i] + decay * r[i]) break;
    case 3:
        LOAD_LOOP(from_bf16(h[i]) + decay * r[i]) break;
    case 4:
        LOAD_LOOP(a[i] - f[i]) break;
    case 5:
        LOAD_LOOP(a[i] - from_bf16(h[i])) break;
    case 6:
        LOAD_LOOP((a[i] - f[i]) + decay * r[i]) break;
    case 7:
        LOAD_LOOP((a[i] - from_bf16(h[i])) + decay * r[i]) break;
    }
    lanes sum = {0};
    int i = 0;
    for (; i + LANES <= n; i += LANES) {
        lanes x;
        memcpy(&x, v + i, sizeof x);
        sum += x * x;
    }
    for (; i < n; i++) sum[i % LANES] += v[i] * v[i];
    for (int lane = 0; lane < LANES; lane++) squares[lane] += (double)sum[lane];
    return largest;
}
