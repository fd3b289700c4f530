/* What Python calls: cuts a job into chunks of blocks and shares them among threads. */
#include <stdlib.h>

#include "blocks.h"
#include "common.h"

/* Digest of these sources, so that a stale build is noticed. */
API const char *geotrain_source(void) { return GEOTRAIN_SOURCE; }

typedef struct {
    int64_t blocks, per_chunk, chunks;
} cut;

static cut cut_blocks(int64_t numel, int32_t block) {
    cut c;
    c.blocks = (numel + block - 1) / block;
    c.per_chunk = CHUNK / block;
    c.chunks = (c.blocks + c.per_chunk - 1) / c.per_chunk;
    return c;
}
static int64_t end_of(cut c, int64_t chunk) {
    const int64_t end = (chunk + 1) * c.per_chunk;
    return end < c.blocks ? end : c.blocks;
}

/* Returns 1 if all was finite, 0 if not, -1 if out of memory. The sum does not depend on the number of threads. */
API int32_t geotrain_quantize(const quantize_job *job, double *sum_of_squares) {
    const cut c = cut_blocks(job->numel, job->block);
    double *sums = calloc((size_t)c.chunks + 1, sizeof(double));
    int finite = 1;
    if (!sums) return -1;
    if (job->codes_offset) { /* the padding between scales and codes */
        const int64_t scales = c.blocks * job->scale_bytes;
        memset(job->payload + scales, 0, (size_t)(job->codes_offset - scales));
    }
#pragma omp parallel for schedule(static) reduction(&& : finite) num_threads(job->threads) if (c.chunks > 1)
    for (int64_t chunk = 0; chunk < c.chunks; chunk++) {
        const int64_t first = chunk * c.per_chunk, last = end_of(c, chunk);
        double squares[LANES] = {0};
        const int ok =
            job->format == TOPK2 ? encode_topk(job, first, last, squares) : encode_dense(job, first, last, squares);
        for (int lane = 0; lane < LANES; lane++) sums[chunk] += squares[lane];
        finite = finite && ok;
    }
    *sum_of_squares = 0.0;
    for (int64_t chunk = 0; chunk < c.chunks; chunk++) *sum_of_squares += sums[chunk];
    free(sums);
    return finite;
}

API void geotrain_dequantize(const dequantize_job *job) {
    const cut c = cut_blocks(job->numel, job->block);
#pragma omp parallel for schedule(static) num_threads(job->threads) if (c.chunks > 1)
    for (int64_t chunk = 0; chunk < c.chunks; chunk++) {
        if (job->format == TOPK2)
            decode_topk(job, chunk * c.per_chunk, end_of(c, chunk));
        else
            decode_dense(job, chunk * c.per_chunk, end_of(c, chunk));
    }
}

/* Whether a payload (of the right size) decodes to finite values at positions that exist. */
API int32_t geotrain_payload_ok(const dequantize_job *job) {
    const cut c = cut_blocks(job->numel, job->block);
    int ok = 1;
#pragma omp parallel for schedule(static) reduction(&& : ok) num_threads(job->threads) if (c.chunks > 16)
    for (int64_t chunk = 0; chunk < c.chunks; chunk++) {
        const int64_t first = chunk * c.per_chunk, last = end_of(c, chunk);
        const int good = job->format == TOPK2 ? topk_ok(job, first, last) : dense_ok(job, first, last);
        ok = ok && good;
    }
    return ok;
}
