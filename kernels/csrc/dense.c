/* fp32, bf16, int8 and the 4-bit formats: blocks of the payload, encoded and decoded. */
#include "common.h"

/* Index of the nearest magnitude, ties to the even index. */
INLINE int32_t to_code(float x, const int format) {
    const int32_t max_code = format == INT8 ? 127 : 7;
    const int32_t small = bits_of(x + 0x1p23f) & 0x7FFFFF;
    int32_t code = small;
    if (format == E3M0) {
        const int32_t b = bits_of(x), large = ((b + (1 << 22) - 1 + ((b >> 23) & 1)) >> 23) - 126;
        const int32_t is_small = -(x < 1.0f); /* a mask: a conditional would keep gcc from vectorizing */
        code = (small & is_small) | (large & ~is_small);
    }
    return code < max_code ? code : max_code;
}

INLINE float to_level(int32_t code, const int format) {
    if (format != E3M0) return (float)code;
    const float large = float_of((code << 23) + (126 << 23));
    return code < 1 ? (float)code : large;
}

/* Code of v, and v − decoded to *rest. */
INLINE int32_t code_of(float v, float inverse, float scale, const int format, float *rest) {
    int32_t sign = bits_of(v) & INT32_MIN;
    int32_t code = to_code(float_of(magnitude_bits(v)) * inverse, format);
    *rest = v - float_of(bits_of(to_level(code, format) * scale) | sign);
    return format == INT8 ? (sign ? -code : code) : code | ((sign >> 28) & 8);
}

/* One padded block: v[block] → codes, v becomes what is left. */
INLINE void code_block(float *restrict v, uint8_t *restrict codes, int block, float inverse, float scale,
                       const int format) {
    if (format == INT8) {
        for (int i = 0; i < block; i++) codes[i] = (uint8_t)code_of(v[i], inverse, scale, format, &v[i]);
        return;
    }
    const int half = block / 2;
    float *restrict high = v + half;
    for (int j = 0; j < half; j++) {
        int32_t first = code_of(v[j], inverse, scale, format, &v[j]);
        int32_t second = code_of(high[j], inverse, scale, format, &high[j]);
        codes[j] = (uint8_t)(first | second << 4);
    }
}

/* Blocks [first, last). Returns whether all were finite. */
INLINE int encode_blocks(const codec_job *job, int64_t first, int64_t last, const int format) {
    const int block = job->block, per_byte = format == INT8 ? 1 : 2;
    float v[MAX_BLOCK] __attribute__((aligned(64)));
    uint8_t codes[MAX_BLOCK] __attribute__((aligned(64)));
    const int32_t mask = (1 << SCALE_SHIFT) - 1;
    int all_finite = 1;
    for (int64_t b = first; b < last; b++) {
        const int64_t at = b * block;
        const int length = job->numel - at < block ? (int)(job->numel - at) : block;
        const int low = per_byte == 2 && length < block ? (length + 1) / 2 : length;
        int32_t largest = load_block(v, job, at, length);
        if (length < block) { /* lay the second half where high nibbles are taken from, zeros elsewhere */
            const int high = per_byte == 2 ? block / 2 : length;
            memmove(v + high, v + low, sizeof(float) * (size_t)(length - low));
            if (per_byte == 2) memset(v + low, 0, sizeof(float) * (size_t)(high - low));
            memset(v + high + length - low, 0, sizeof(float) * (size_t)(block - high - (length - low)));
        }
        const int finite = largest < INFINITY_BITS;
        int32_t bits = (bits_of(float_of(largest) * job->inverse_level) + mask) & ~mask;
        bits = bits < job->max_scale_bits ? bits : job->max_scale_bits;
        if (!finite) {
            memset(v, 0, sizeof(float) * (size_t)block);
            all_finite = 0;
        }
        if (!finite || largest < TINY_BITS) bits = 0;
        const float scale = float_of(bits), inverse = bits ? 1.0f / scale : 0.0f;
        uint8_t *target = job->payload + job->codes_offset + at / per_byte;
        uint8_t *into = length < block ? codes : target;
        code_block(v, into, block, inverse, scale, format);
        if (length < block) memcpy(target, codes, (size_t)low);
        store_scale(job->payload + b * SCALE_BYTES, finite ? bits : NAN_BITS);
        float *residual = residual_at(job, at);
        if (residual && finite) {
            const int high = length < block && per_byte == 2 ? block / 2 : low;
            memcpy(residual, v, sizeof(float) * (size_t)low);
            memcpy(residual + low, v + high, sizeof(float) * (size_t)(length - low));
        }
    }
    return all_finite;
}

INLINE void decode_blocks(const codec_job *job, int64_t first, int64_t last, const int format,
                          const int accumulate) {
    const int block = job->block, per_byte = format == INT8 ? 1 : 2;
    const float weight = job->weight;
    for (int64_t b = first; b < last; b++) {
        const int64_t at = b * block;
        const int length = job->numel - at < block ? (int)(job->numel - at) : block;
        const int low = per_byte == 2 ? (length + 1) / 2 : length;
        const float scale = float_of(load_scale(job->payload + b * SCALE_BYTES));
        const uint8_t *restrict codes = job->payload + job->codes_offset + at / per_byte;
        float *restrict out = job->out + at, *restrict high = out + low;
#define PUT(target, code)                                                                                            \
    do {                                                                                                             \
        float value =                                                                                                \
            format == INT8                                                                                           \
                ? (float)(code) * scale                                                                              \
                : float_of(bits_of(to_level((code) & 7, format) * scale) ^ (int32_t)(((uint32_t)(code) & 8) << 28)); \
        target = accumulate ? target + weight * value : value;                                                       \
    } while (0)
        if (format == INT8) {
            const int8_t *restrict signed_codes = (const int8_t *)codes;
            for (int i = 0; i < length; i++) PUT(out[i], (int32_t)signed_codes[i]);
        } else {
            for (int j = 0; j < length - low; j++) {
                int32_t byte = codes[j];
                PUT(out[j], byte & 15);
                PUT(high[j], byte >> 4);
            }
            if (length - low < low) PUT(out[low - 1], (int32_t)(codes[low - 1] & 15));
        }
#undef PUT
    }
}

/* fp32 and bf16, elements of blocks [first, last). */
INLINE int encode_plain(const codec_job *job, int64_t first, int64_t last, const int format) {
    const int block = job->block;
    float v[MAX_BLOCK] __attribute__((aligned(64)));
    int all_finite = 1;
    for (int64_t b = first; b < last; b++) {
        const int64_t at = b * block;
        const int length = job->numel - at < block ? (int)(job->numel - at) : block;
        const int finite = load_block(v, job, at, length) < INFINITY_BITS;
        all_finite &= finite;
        float *restrict residual = residual_at(job, at);
        if (format == FP32) {
            memcpy(job->payload + at * 4, v, sizeof(float) * (size_t)length);
            for (int i = 0; residual && i < length; i++)
                residual[i] = magnitude_bits(v[i]) < INFINITY_BITS ? 0.0f : residual[i];
            continue;
        }
        uint16_t codes[MAX_BLOCK] __attribute__((aligned(64)));
        round_bf16(codes, v, NULL, length, 0);
        memcpy(job->payload + at * 2, codes, sizeof(uint16_t) * (size_t)length);
        for (int i = 0; residual && i < length; i++)
            residual[i] = magnitude_bits(v[i]) < INFINITY_BITS ? v[i] - from_bf16(codes[i]) : residual[i];
    }
    return all_finite;
}

INLINE void decode_plain(const codec_job *job, int64_t first, int64_t last, const int format,
                         const int accumulate) {
    const float weight = job->weight;
    const int64_t begin = first * job->block, end = last * job->block < job->numel ? last * job->block : job->numel;
    const float *restrict wide = (const float *)(const void *)job->payload;
    const uint16_t *restrict narrow = (const uint16_t *)(const void *)job->payload;
    float *restrict out = job->out;
    for (int64_t i = begin; i < end; i++) {
        float value = format == FP32 ? wide[i] : from_bf16(narrow[i]);
        out[i] = accumulate ? out[i] + weight * value : value;
    }
}

CLONES int encode_dense(const codec_job *job, int64_t first, int64_t last) {
    switch (job->format) {
        case FP32: return encode_plain(job, first, last, FP32);
        case BF16: return encode_plain(job, first, last, BF16);
        case INT8: return encode_blocks(job, first, last, INT8);
        case INT4: return encode_blocks(job, first, last, INT4);
        case E3M0: return encode_blocks(job, first, last, E3M0);
    }
    return 0;
}

CLONES void decode_dense(const codec_job *job, int64_t first, int64_t last) {
    switch (job->format) {
        case FP32: EITHER(job->accumulate, decode_plain, job, first, last, FP32); break;
        case BF16: EITHER(job->accumulate, decode_plain, job, first, last, BF16); break;
        case INT8: EITHER(job->accumulate, decode_blocks, job, first, last, INT8); break;
        case INT4: EITHER(job->accumulate, decode_blocks, job, first, last, INT4); break;
        case E3M0: EITHER(job->accumulate, decode_blocks, job, first, last, E3M0); break;
    }
}

CLONES int dense_ok(const codec_job *job, int64_t first, int64_t last) {
    int bad = 0;
    const int64_t begin = first * job->block, end = last * job->block < job->numel ? last * job->block : job->numel;
    if (job->format == FP32) {
        const int32_t *restrict bits = (const int32_t *)(const void *)job->payload;
        for (int64_t i = begin; i < end; i++) bad |= (bits[i] & 0x7FFFFFFF) >= INFINITY_BITS;
    } else if (job->format == BF16) {
        const uint16_t *restrict bits = (const uint16_t *)(const void *)job->payload;
        for (int64_t i = begin; i < end; i++) bad |= (bits[i] & 0x7FFF) >= (INFINITY_BITS >> 16);
    } else {
        const uint16_t most = (uint16_t)((uint32_t)job->max_scale_bits >> SCALE_SHIFT); /* a set sign bit is more */
        const uint16_t *restrict scales = (const uint16_t *)(const void *)job->payload;
        for (int64_t i = first; i < last; i++) bad |= scales[i] > most;
    }
    return !bad;
}
