/* topk2: the largest elements of each block as a sign and one of two magnitudes; positions in Elias–Fano form. */
#include "blocks.h"
#include "common.h"

/* The `kept` largest magnitudes of bits[length], the earlier among equals: positions ascending. */
INLINE void select_largest(const int32_t *restrict bits, int length, int kept, int32_t largest, int32_t *restrict position) {
    int64_t low = 0, high = (int64_t)largest + 1; /* count(bits ≥ low) ≥ kept > count(bits ≥ high), until equal */
    int at_least = length;
    while (at_least != kept && high - low > 1) {
        const int32_t middle = (int32_t)((low + high) / 2);
        int count = 0;
        for (int i = 0; i < length; i++) count += bits[i] >= middle;
        if (count >= kept) { low = middle; at_least = count; }
        else high = middle;
    }
    const int32_t threshold = (int32_t)low;
    int above = 0;
    for (int i = 0; i < length; i++) above += bits[i] > threshold;
    int ties = kept - above, n = 0;
    if (at_least == kept) { /* all that reach the threshold */
        for (int i = 0; i < length; i++) { position[n < kept ? n : kept - 1] = i; n += bits[i] >= threshold; if (n == kept) break; }
        return;
    }
    for (int i = 0; i < length && n < kept; i++) {
        const int equal = bits[i] == threshold && ties > 0;
        position[n] = i;
        n += (bits[i] > threshold) | equal;
        ties -= equal;
    }
}

/* fp32 bits of the low and the high magnitude, rounded to the scale's type. */
INLINE void two_magnitudes(const float *restrict magnitude, int kept, int32_t largest, const quantize_job *job, int32_t levels[2]) {
    int32_t fixed[MAX_BLOCK];
    const int32_t exponent = largest >> 23;
    const float multiplier = float_of((269 - exponent) << 23), unit = float_of((exponent - 15) << 23);
    int32_t sum = 0, sum_high = 0, count_high = 0;
    for (int i = 0; i < kept; i++) { fixed[i] = (int32_t)(magnitude[i] * multiplier); sum += fixed[i]; }
    const int32_t mean = sum / kept;
    for (int i = 0; i < kept; i++) { sum_high += fixed[i] > mean ? fixed[i] : 0; count_high += fixed[i] > mean; }
    const float low = (float)(sum - sum_high) / (float)(kept - count_high) * unit;
    const float values[2] = {low, count_high ? (float)sum_high / (float)count_high * unit : low};
    for (int i = 0; i < 2; i++) {
        int32_t bits = bits_of(values[i]);
        const int32_t shift = job->scale_shift;
        if (shift) bits = (bits + (1 << (shift - 1)) - 1 + ((bits >> shift) & 1)) >> shift << shift;
        levels[i] = bits < job->max_scale_bits ? bits : job->max_scale_bits;
    }
}

INLINE void put_bits(uint8_t *string, int first, uint32_t value) { /* up to 16 bits, where there were zeros */
    uint32_t rest = value << (first & 7);
    for (uint8_t *at = string + (first >> 3); rest; at++, rest >>= 8) *at |= (uint8_t)rest;
}
INLINE uint32_t get_bits(const uint8_t *string, int first, int count) { /* up to 32 */
    uint64_t value = 0;
    const int bytes = ((first & 7) + count + 7) / 8;
    for (int i = 0; i < bytes; i++) value |= (uint64_t)string[(first >> 3) + i] << (8 * i);
    return (uint32_t)(value >> (first & 7) & (((uint64_t)1 << count) - 1));
}

CLONES int encode_topk(const quantize_job *job, int64_t first, int64_t last, double *squares) {
    const int block = job->block;
    float v[MAX_BLOCK] __attribute__((aligned(64))), magnitude[MAX_BLOCK];
    int32_t bits[MAX_BLOCK] __attribute__((aligned(64))), position[MAX_BLOCK];
    uint32_t random[MAX_BLOCK];
    int all_finite = 1;
    for (int64_t b = first; b < last; b++) {
        const int64_t at = b * block;
        const int length = job->numel - at < block ? (int)(job->numel - at) : block;
        const struct record *r = &job->record[length < block];
        uint8_t *out = job->payload + b * job->record[0].bytes;
        int32_t largest = load_block(v, job, at, length, squares);
        const int finite = largest < INFINITY_BITS;
        if (!finite) { memset(v, 0, sizeof(float) * (size_t)length); largest = 0; all_finite = 0; }
        for (int i = 0; i < length; i++) bits[i] = magnitude_bits(v[i]);
        select_largest(bits, length, r->kept, largest, position);
        for (int i = 0; i < r->kept; i++) magnitude[i] = float_of(bits[position[i]]);
        int32_t levels[2] = {0, 0};
        if (largest >= TINY_BITS) two_magnitudes(magnitude, r->kept, largest, job, levels);
        const float low = float_of(levels[0]), high = float_of(levels[1]), middle = low * 0.5f + high * 0.5f;
        if (job->stochastic) random_block(random, b * (block / 4), block / 4, job->seed);
        memset(out, 0, (size_t)r->bytes);
        for (int i = 0; i < 2; i++)
            store_scale(out + i * job->scale_bytes, finite ? levels[i] : NAN_BITS, job->scale_shift, job->scale_bytes);
        for (int i = 0; i < r->kept; i++) {
            const int p = position[i];
            const int32_t sign = bits_of(v[p]) & INT32_MIN;
            const int which = job->stochastic
                ? (float)(int32_t)(random[p] >> 8) * 0x1p-24f * (high - low) < magnitude[i] - low
                : magnitude[i] > middle;
            put_bits(out, r->lows_at + i * r->low_bits, (uint32_t)p & ((1u << r->low_bits) - 1));
            put_bits(out, r->highs_at + (p >> r->low_bits) + i, 1);
            put_bits(out, r->values_at + 2 * i, (uint32_t)((sign ? 2 : 0) | which));
            v[p] = v[p] - float_of(levels[which] | sign);
        }
        if (job->residual && finite) memcpy(job->residual + at, v, sizeof(float) * (size_t)length);
    }
    return all_finite;
}

/* Calls BODY for the kept elements of a record with their `rank` and position `p`; counts them in `rank`. */
#define FOR_KEPT(in, r, rank, p, BODY)                                                                    \
    for (int word_at = (r)->highs_at; word_at < (r)->values_at; word_at += 32) {                          \
        const int left = (r)->values_at - word_at;                                                        \
        for (uint32_t set = get_bits(in, word_at, left < 32 ? left : 32); set; set &= set - 1, rank++) {  \
            if (rank >= (r)->kept) return 0;                                                              \
            const int bit = word_at - (r)->highs_at + __builtin_ctz(set);                                 \
            const int p = (bit - rank) << (r)->low_bits                                                   \
                | (int)get_bits(in, (r)->lows_at + rank * (r)->low_bits, (r)->low_bits);                  \
            if (p >= (r)->length) return 0;                                                               \
            BODY                                                                                          \
        }                                                                                                 \
    }

INLINE int decode_record(const dequantize_job *job, const uint8_t *in, const struct record *r, float *restrict out) {
    float value[4];
    int rank = 0;
    for (int i = 0; i < 4; i++) {
        const int32_t bits = load_scale(in + (i & 1) * job->scale_bytes, job->scale_shift, job->scale_bytes);
        value[i] = float_of(bits ^ (i & 2 ? INT32_MIN : 0));
    }
    FOR_KEPT(in, r, rank, p, {
        const float decoded = value[get_bits(in, r->values_at + 2 * rank, 2)];
        out[p] = job->accumulate ? out[p] + job->weight * decoded : decoded;
    })
    return 1;
}

CLONES void decode_topk(const dequantize_job *job, int64_t first, int64_t last) {
    for (int64_t b = first; b < last; b++) {
        const int64_t at = b * job->block;
        const int length = job->numel - at < job->block ? (int)(job->numel - at) : job->block;
        if (!job->accumulate) memset(job->out + at, 0, sizeof(float) * (size_t)length);
        decode_record(job, job->payload + b * job->record[0].bytes, &job->record[length < job->block], job->out + at);
    }
}

INLINE int record_ok(const dequantize_job *job, const uint8_t *in, const struct record *r) {
    int rank = 0;
    for (int i = 0; i < 2; i++) {
        const int32_t bits = load_scale(in + i * job->scale_bytes, job->scale_shift, job->scale_bytes);
        if (bits < 0 || bits > job->max_scale_bits) return 0;
    }
    FOR_KEPT(in, r, rank, p, {})
    return rank == r->kept;
}

CLONES int topk_ok(const dequantize_job *job, int64_t first, int64_t last) {
    int ok = 1;
    for (int64_t b = first; b < last; b++) {
        const struct record *r = &job->record[job->numel - b * job->block < job->block];
        ok &= record_ok(job, job->payload + b * job->record[0].bytes, r);
    }
    return ok;
}
