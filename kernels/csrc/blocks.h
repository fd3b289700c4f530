/* Ranges of blocks, one file a family of formats; the threads are in entry.c. Encoders return whether all was finite.
 */
#ifndef GEOTRAIN_BLOCKS_H
#define GEOTRAIN_BLOCKS_H
#include "common.h"
int encode_dense(const quantize_job *job, int64_t first, int64_t last, double *squares);
void decode_dense(const dequantize_job *job, int64_t first, int64_t last);
int dense_ok(const dequantize_job *job, int64_t first, int64_t last);
int encode_topk(const quantize_job *job, int64_t first, int64_t last, double *squares);
void decode_topk(const dequantize_job *job, int64_t first, int64_t last);
int topk_ok(const dequantize_job *job, int64_t first, int64_t last);
#endif
