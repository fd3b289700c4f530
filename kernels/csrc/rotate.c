/* The rotary embedding. Bits as in kernels/reference.py. */
#include "common.h"

typedef struct {
    const void *input; /* fp32, or bf16 if is_bf16: [sequence, batch, heads, 2 · half], each head's elements together */
    void *output;      /* the same without gaps */
    const float *cosine, *sine; /* [sequence, half] */
    int64_t sequence, batch, heads, half, by_token, by_sample, by_head; /* the last three: of input, in elements */
    int32_t inverse, is_bf16, threads;
} rotate_job;

INLINE void rotate_head(const void *in, void *out, const float *restrict cosine, const float *restrict sine,
                        int64_t half, const int inverse, const int is_bf16) {
    const float *restrict x = in;
    const uint16_t *restrict h = in;
    float *restrict y = out;
    uint16_t *restrict g = out;
    for (int64_t i = 0; i < half; i++) {
        const float a = is_bf16 ? from_bf16(h[i]) : x[i], b = is_bf16 ? from_bf16(h[half + i]) : x[half + i];
        const float c = cosine[i], s = inverse ? -sine[i] : sine[i];
        const float first = a * c - b * s, second = b * c + a * s;
        if (is_bf16) {
            g[i] = to_bf16(first);
            g[half + i] = to_bf16(second);
        } else {
            y[i] = first;
            y[half + i] = second;
        }
    }
}

INLINE void rotate_row(const rotate_job *job, int64_t row, const int inverse, const int is_bf16) {
    const int64_t token = row / job->batch, sample = row % job->batch, size = is_bf16 ? 2 : 4, half = job->half;
    const char *in = (const char *)job->input + size * (token * job->by_token + sample * job->by_sample);
    char *out = (char *)job->output + size * (row * job->heads * 2 * half);
    const float *cosine = job->cosine + token * half, *sine = job->sine + token * half;
    for (int64_t head = 0; head < job->heads; head++)
        rotate_head(in + size * head * job->by_head, out + size * head * 2 * half, cosine, sine, half, inverse,
                    is_bf16);
}

CLONES void rotate_one(const rotate_job *job, int64_t row) {
    if (job->inverse)
        EITHER(job->is_bf16, rotate_row, job, row, 1);
    else
        EITHER(job->is_bf16, rotate_row, job, row, 0);
}

API void geotrain_rotate(const rotate_job *job) {
    const int64_t rows = job->sequence * job->batch;
#pragma omp parallel for schedule(static) num_threads(job->threads) \
    if (rows * job->heads * job->half > WORTH_THREADS)
    for (int64_t row = 0; row < rows; row++) rotate_one(job, row);
}
