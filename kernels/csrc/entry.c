/* What Python calls: cuts a job into chunks of blocks and shares them among threads. */
#include "common.h"

/* Digest of these sources, so that a stale build is noticed. */
API const char *geotrain_source(void) { return GEOTRAIN_SOURCE; }

static int64_t chunks_of(int64_t numel) { return (numel + CHUNK - 1) / CHUNK; }

/* The number of the block that follows a chunk's last one. */
static int64_t end_of(int64_t chunk, int64_t numel, int32_t block) {
    const int64_t end = (chunk + 1) * (CHUNK / block), blocks = (numel + block - 1) / block;
    return end < blocks ? end : blocks;
}

/* Returns whether all was finite. */
API int32_t geotrain_quantize(const codec_job *job) {
    const int64_t numel = job->numel, block = job->block;
    int finite = 1;
    if (job->codes_offset) { /* the padding between scales and codes */
        const int64_t scales = (numel + block - 1) / block * SCALE_BYTES;
        memset(job->payload + scales, 0, (size_t)(job->codes_offset - scales));
    }
#pragma omp parallel for schedule(static) reduction(&& : finite) num_threads(job->threads) if (numel > WORTH_THREADS)
    for (int64_t chunk = 0; chunk < chunks_of(numel); chunk++) {
        const int64_t first = chunk * (CHUNK / block), last = end_of(chunk, numel, job->block), at = chunk * CHUNK;
        const int length = (int)(numel - at < CHUNK ? numel - at : CHUNK);
        uint16_t *kept = job->residual_is_bf16 ? (uint16_t *)job->residual + at : NULL;
        float wide[CHUNK] __attribute__((aligned(64)));
        codec_job part = *job;
        if (kept) {
            widen(wide, kept, length);
            part.residual = wide;
            part.residual_begin = at;
        }
        const int ok = job->format == TOPK2 ? encode_topk(&part, first, last) : encode_dense(&part, first, last);
        if (kept) keep_in_bf16(kept, wide, at, length, SECOND_STREAM(job->seed));
        if (job->moves_anchor) memcpy(job->anchor + at, (const float *)job->values + at, sizeof(float) * (size_t)length);
        finite = finite && ok;
    }
    return finite;
}

API void geotrain_dequantize(const codec_job *job) {
    const int64_t numel = job->numel;
#pragma omp parallel for schedule(static) num_threads(job->threads) if (numel > WORTH_THREADS)
    for (int64_t chunk = 0; chunk < chunks_of(numel); chunk++) {
        const int64_t first = chunk * (CHUNK / job->block), last = end_of(chunk, numel, job->block);
        const int64_t at = chunk * CHUNK, length = numel - at < CHUNK ? numel - at : CHUNK;
        if (job->format == TOPK2)
            decode_topk(job, first, last);
        else
            decode_dense(job, first, last);
        /* The chunk is still in the first cache, so that a norm takes no second pass over memory. */
        if (job->squares) job->squares[chunk] = sum_of_squares(job->out + at, length);
    }
}

/* Whether a payload (of the right size) decodes to finite values at positions that exist. */
API int32_t geotrain_payload_ok(const codec_job *job) {
    const int64_t numel = job->numel;
    int ok = 1;
#pragma omp parallel for schedule(static) reduction(&& : ok) num_threads(job->threads) if (numel > 16 * WORTH_THREADS)
    for (int64_t chunk = 0; chunk < chunks_of(numel); chunk++) {
        const int64_t first = chunk * (CHUNK / job->block), last = end_of(chunk, numel, job->block);
        const int good = job->format == TOPK2 ? topk_ok(job, first, last) : dense_ok(job, first, last);
        ok = ok && good;
    }
    return ok;
}
