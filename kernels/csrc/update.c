/* The outer step, the merge and AdamW. Bits as in kernels/reference_update.py. */
#include "common.h"

typedef struct {
    float *weights, *momentum, *accumulator; /* accumulator or NULL */
    const float *delta;
    int64_t numel;
    float keep, gain, from_momentum, from_delta;
    int32_t moves_momentum, threads;
} outer_job;

typedef struct {
    float *weights, *base;
    const float *incoming, *sent; /* sent or NULL */
    int64_t numel;
    float keep, alpha; /* 1 − α, α */
    int32_t threads;
} merge_job;

typedef struct {
    float grad_scale, beta1, rest1, beta2, rest2, root_scale, eps, rate, shrink;
} adam_step;
typedef struct {
    float *weights, *exp_avg, *exp_avg_sq;
    const void *grad; /* fp32, or bf16 if grad_is_bf16 */
    void *out;        /* or NULL; fp32, or bf16 if out_is_bf16 */
    int64_t numel;
    adam_step step, next;
    int32_t commit, look_ahead, grad_is_bf16, out_is_bf16, threads;
} adam_job;

#define RANGE(job) \
    const int64_t begin = chunk * CHUNK, end = begin + CHUNK < (job)->numel ? begin + CHUNK : (job)->numel

CLONES void outer_chunk(const outer_job *job, int64_t chunk) {
    RANGE(job);
    float *restrict x = job->weights, *restrict m = job->momentum, *restrict acc = job->accumulator;
    const float *restrict d = job->delta;
    const float keep = job->keep, gain = job->gain, p = job->from_momentum, q = job->from_delta;
    if (!job->moves_momentum) {
        for (int64_t i = begin; i < end; i++) {
            acc[i] = acc[i] + d[i];
            x[i] = x[i] - q * d[i];
        }
    } else if (acc) {
        for (int64_t i = begin; i < end; i++) {
            m[i] = keep * m[i] + gain * (acc[i] + d[i]);
            x[i] = x[i] - (p * m[i] + q * d[i]);
            acc[i] = 0.0f;
        }
    } else {
        for (int64_t i = begin; i < end; i++) {
            m[i] = keep * m[i] + gain * d[i];
            x[i] = x[i] - (p * m[i] + q * d[i]);
        }
    }
}

CLONES void merge_chunk(const merge_job *job, int64_t chunk) {
    RANGE(job);
    float *restrict x = job->weights, *restrict base = job->base;
    const float *restrict incoming = job->incoming, *restrict sent = job->sent;
    const float keep = job->keep, alpha = job->alpha;
    if (sent) {
        for (int64_t i = begin; i < end; i++) {
            const float pending = sent[i] - x[i], merged = keep * sent[i] + alpha * incoming[i];
            base[i] = merged;
            x[i] = merged - pending;
        }
    } else {
        for (int64_t i = begin; i < end; i++) base[i] = x[i] = keep * x[i] + alpha * incoming[i];
    }
}

INLINE void adamw(float *x, float *m, float *v, float grad, const adam_step *s) {
    const float g = grad * s->grad_scale;
    *m = s->beta1 * *m + s->rest1 * g;
    *v = s->beta2 * *v + s->rest2 * (g * g);
    const float direction = *m / (sqrtf(*v) * s->root_scale + s->eps);
    *x = (*x - s->shrink * *x) - s->rate * direction;
}

INLINE void adam_range(const adam_job *job, int64_t begin, int64_t end, const int commit, const int look_ahead,
                       const int grad_is_bf16, const int has_out, const int out_is_bf16) {
    float *restrict weights = job->weights, *restrict exp_avg = job->exp_avg, *restrict exp_avg_sq = job->exp_avg_sq;
    const float *restrict wide_grad = job->grad;
    const uint16_t *restrict narrow_grad = job->grad;
    float *restrict wide_out = job->out;
    uint16_t *restrict narrow_out = job->out;
    const adam_step step = job->step, next = job->next;
    for (int64_t i = begin; i < end; i++) {
        float x = weights[i], m = exp_avg[i], v = exp_avg_sq[i];
        const float grad = grad_is_bf16 ? from_bf16(narrow_grad[i]) : wide_grad[i];
        adamw(&x, &m, &v, grad, &step);
        if (commit) {
            weights[i] = x;
            exp_avg[i] = m;
            exp_avg_sq[i] = v;
        }
        if (look_ahead) adamw(&x, &m, &v, grad, &next);
        if (has_out && out_is_bf16) narrow_out[i] = to_bf16(x);
        if (has_out && !out_is_bf16) wide_out[i] = x;
    }
}

#define ADAM(commit, ahead)                                                      \
    switch (job->grad_is_bf16 * 4 + (job->out != NULL) * 2 + job->out_is_bf16) { \
    case 0:                                                                      \
        adam_range(job, begin, end, commit, ahead, 0, 0, 0);                     \
        break;                                                                   \
    case 2:                                                                      \
        adam_range(job, begin, end, commit, ahead, 0, 1, 0);                     \
        break;                                                                   \
    case 3:                                                                      \
        adam_range(job, begin, end, commit, ahead, 0, 1, 1);                     \
        break;                                                                   \
    case 4:                                                                      \
        adam_range(job, begin, end, commit, ahead, 1, 0, 0);                     \
        break;                                                                   \
    case 6:                                                                      \
        adam_range(job, begin, end, commit, ahead, 1, 1, 0);                     \
        break;                                                                   \
    case 7:                                                                      \
        adam_range(job, begin, end, commit, ahead, 1, 1, 1);                     \
        break;                                                                   \
    }
CLONES void adam_chunk(const adam_job *job, int64_t chunk) {
    RANGE(job);
    if (job->commit && job->look_ahead) {
        ADAM(1, 1)
    } else if (job->commit) {
        ADAM(1, 0)
    } else {
        ADAM(0, 0)
    }
}

#define FOR_CHUNKS(job, function)                                                                                    \
    const int64_t chunks = ((job)->numel + CHUNK - 1) / CHUNK;                                                       \
    _Pragma("omp parallel for schedule(static) num_threads((job)->threads) if (chunks > 1)") for (int64_t chunk = 0; \
                                                                                                  chunk < chunks;    \
                                                                                                  chunk++)           \
        function(job, chunk)

API void geotrain_outer_update(const outer_job *job) { FOR_CHUNKS(job, outer_chunk); }
API void geotrain_merge(const merge_job *job) { FOR_CHUNKS(job, merge_chunk); }
API void geotrain_adam(const adam_job *job) { FOR_CHUNKS(job, adam_chunk); }
