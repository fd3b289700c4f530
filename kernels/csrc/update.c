/* The outer step, the merge and AdamW. Bits as in kernels/reference.py. */
#include "common.h"

typedef struct {
    float *weights;
    void *momentum, *accumulator; /* or NULL; fp32, or bf16 if state_is_bf16 */
    const float *delta;
    int64_t numel;
    uint64_t seed;
    float keep, gain, from_momentum, from_delta;
    int32_t moves_momentum, state_is_bf16, threads;
} outer_job;

typedef struct {
    float *weights, *base;
    const float *incoming;
    int64_t numel;
    float keep, alpha; /* 1 − α, α */
    int32_t ledger, threads;
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

/* The loops below are inlined once for each combination of their last, constant arguments: see EITHER. */
INLINE void outer_range(const outer_job *job, float *restrict m, float *restrict acc, int64_t begin, int n,
                        const int moves, const int accumulates) {
    float *restrict x = job->weights + begin;
    const float *restrict d = job->delta + begin;
    const float keep = job->keep, gain = job->gain, p = job->from_momentum, q = job->from_delta;
    for (int i = 0; i < n; i++) {
        const float total = accumulates ? acc[i] + d[i] : d[i];
        float change = q * d[i];
        if (moves) {
            m[i] = keep * m[i] + gain * total;
            change = p * m[i] + change;
        }
        if (accumulates) acc[i] = moves ? 0.0f : total;
        x[i] = x[i] - change;
    }
}

/* A vector of the state in fp32, in `room` if it is kept in bf16. */
static float *opened(const outer_job *job, void *state, float *room, int64_t begin, int n) {
    if (!state || !job->state_is_bf16) return state ? (float *)state + begin : NULL;
    widen(room, (const uint16_t *)state + begin, n);
    return room;
}

CLONES void outer_chunk(const outer_job *job, int64_t begin, int64_t end) {
    const int n = (int)(end - begin);
    float rooms[2][CHUNK] __attribute__((aligned(64)));
    float *m = opened(job, job->momentum, rooms[0], begin, n);
    float *acc = opened(job, job->accumulator, rooms[1], begin, n);
    if (job->moves_momentum)
        EITHER(acc != NULL, outer_range, job, m, acc, begin, n, 1);
    else
        EITHER(acc != NULL, outer_range, job, m, acc, begin, n, 0);
    if (!job->state_is_bf16) return;
    if (job->moves_momentum) keep_in_bf16((uint16_t *)job->momentum + begin, m, begin, n, job->seed);
    if (acc) keep_in_bf16((uint16_t *)job->accumulator + begin, acc, begin, n, SECOND_STREAM(job->seed));
}

CLONES void merge_chunk(const merge_job *job, int64_t begin, int64_t end) {
    float *restrict x = job->weights, *restrict base = job->base;
    const float *restrict incoming = job->incoming;
    const float keep = job->keep, alpha = job->alpha;
    if (job->ledger) {
        for (int64_t i = begin; i < end; i++) {
            const float sent = base[i], pending = sent - x[i], merged = keep * sent + alpha * incoming[i];
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

enum output { NOTHING = 0, TO_FP32 = 1, TO_BF16 = 2 };
INLINE void adam_range(const adam_job *job, int64_t begin, int64_t end, const int commit, const int look_ahead,
                       const int output, const int grad_is_bf16) {
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
        if (output == TO_BF16) narrow_out[i] = to_bf16(x);
        if (output == TO_FP32) wide_out[i] = x;
    }
}

CLONES void adam_chunk(const adam_job *job, int64_t begin, int64_t end) {
    const int output = job->out == NULL ? NOTHING : job->out_is_bf16 ? TO_BF16 : TO_FP32;
#define CASE(commit, look_ahead, output)                                                       \
    case (commit) * 6 + (look_ahead) * 3 + (output):                                           \
        EITHER(job->grad_is_bf16, adam_range, job, begin, end, commit, look_ahead, output);    \
        break;
    switch (job->commit * 6 + job->look_ahead * 3 + output) {
        CASE(1, 1, TO_FP32)
        CASE(1, 1, TO_BF16)
        CASE(1, 0, NOTHING)
        CASE(1, 0, TO_FP32)
        CASE(1, 0, TO_BF16)
        CASE(0, 1, TO_FP32)
        CASE(0, 1, TO_BF16)
        CASE(0, 0, TO_FP32)
        CASE(0, 0, TO_BF16)
    }
}

#define FOR_CHUNKS(job, function)                                                                          \
    const int64_t numel = (job)->numel;                                                                    \
    _Pragma("omp parallel for schedule(static) num_threads((job)->threads) if (numel > WORTH_THREADS)")    \
    for (int64_t begin = 0; begin < numel; begin += CHUNK)                                                 \
        function(job, begin, numel - begin < CHUNK ? numel : begin + CHUNK)

API void geotrain_outer_update(const outer_job *job) { FOR_CHUNKS(job, outer_chunk); }
API void geotrain_merge(const merge_job *job) { FOR_CHUNKS(job, merge_chunk); }
API void geotrain_adam(const adam_job *job) { FOR_CHUNKS(job, adam_chunk); }
