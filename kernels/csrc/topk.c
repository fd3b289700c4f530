/* topk2: the largest elements of each block as a sign and one of two magnitudes; positions in Elias–Fano form. */
#include "common.h"

INLINE int count_reaching(const int32_t *restrict bits, int length, int32_t threshold) {
    int count = 0;
    for (int i = 0; i < length; i++) count += bits[i] >= threshold;
    return count;
}

/* The `kept` largest magnitudes of bits[length], the earlier among equals: positions ascending. */
INLINE void select_largest(const int32_t *restrict bits, int length, int kept, int32_t largest,
                           int32_t *restrict position) {
    /* count(bits ≥ low) ≥ kept > count(bits ≥ high); most often 2^-16 of the largest is low enough to start */
    int32_t low = largest - (16 << 23), high = largest + 1;
    if (low < 0 || count_reaching(bits, length, low) < kept) low = 0;
    int reaching = length;
    while (reaching != kept && high - low > 1) {
        const int32_t middle = low + (high - low) / 2;
        const int count = count_reaching(bits, length, middle);
        if (count >= kept) {
            low = middle;
            reaching = count;
        } else {
            high = middle;
        }
    }
    int n = 0;
    if (reaching == kept) { /* no branch that depends on the data; position has room for one more */
        for (int i = 0; i < length; i++) {
            position[n] = i;
            n += bits[i] >= low;
        }
        return;
    }
    int spare = kept - count_reaching(bits, length, low + 1); /* how many of those that equal `low` still fit */
    for (int i = 0; n < kept; i++) {
        const int equal = bits[i] == low;
        position[n] = i;
        n += (bits[i] > low) | (equal & (spare > 0));
        spare -= equal;
    }
}

/* fp32 bits of the low and the high magnitude, rounded to the scale's type. */
INLINE void two_magnitudes(const float *restrict magnitude, int kept, int32_t largest, const codec_job *job,
                           int32_t levels[2]) {
    int32_t fixed[MAX_BLOCK];
    const int32_t exponent = largest >> 23;
    const float multiplier = float_of((269 - exponent) << 23), unit = float_of((exponent - 15) << 23);
    int32_t sum = 0, sum_high = 0, count_high = 0;
    for (int i = 0; i < kept; i++) {
        fixed[i] = (int32_t)(magnitude[i] * multiplier);
        sum += fixed[i];
    }
    const int32_t mean = sum / kept;
    for (int i = 0; i < kept; i++) {
        sum_high += fixed[i] > mean ? fixed[i] : 0;
        count_high += fixed[i] > mean;
    }
    const float low = (float)(sum - sum_high) / (float)(kept - count_high) * unit;
    const float values[2] = {low, count_high ? (float)sum_high / (float)count_high * unit : low};
    for (int i = 0; i < 2; i++) {
        int32_t bits = bits_of(values[i]);
        bits = (bits + (1 << (SCALE_SHIFT - 1)) - 1 + ((bits >> SCALE_SHIFT) & 1)) >> SCALE_SHIFT << SCALE_SHIFT;
        levels[i] = bits < job->max_scale_bits ? bits : job->max_scale_bits;
    }
}

/* Appends to the string of bits in whole words, where there were zeros. */
typedef struct {
    uint8_t *word;
    uint64_t pending;
    int count;
} writer;
INLINE void or_word(uint8_t *at, uint32_t value) {
    uint32_t word;
    memcpy(&word, at, 4);
    word |= value;
    memcpy(at, &word, 4);
}
INLINE writer write_at(uint8_t *string, int first) { return (writer){string + first / 32 * 4, 0, first % 32}; }
INLINE void append(writer *w, uint32_t value, int count) { /* up to 16 bits */
    w->pending |= (uint64_t)value << w->count;
    w->count += count;
    if (w->count >= 32) {
        or_word(w->word, (uint32_t)w->pending);
        w->word += 4;
        w->pending >>= 32;
        w->count -= 32;
    }
}
INLINE void finish(writer *w) {
    if (w->pending) or_word(w->word, (uint32_t)w->pending);
}

/* Up to 32 bits of a record's string. */
INLINE uint32_t get_bits(const uint8_t *string, const struct record *r, int first, int count) {
    uint64_t value = 0;
    const int byte = first >> 3, left = r->bytes - byte;
    if (left >= 8)
        memcpy(&value, string + byte, 8);
    else
        memcpy(&value, string + byte, (size_t)left);
    return (uint32_t)(value >> (first & 7) & (((uint64_t)1 << count) - 1));
}

/* The codes of the kept elements with their positions; v becomes what is left. */
INLINE void write_kept(float *restrict v, const float *restrict magnitude, const int32_t *restrict position,
                       const int32_t levels[2], const struct record *r, uint8_t *restrict out) {
    const float low = float_of(levels[0]), high = float_of(levels[1]), middle = low * 0.5f + high * 0.5f;
    writer lows = write_at(out, r->lows_at), codes = write_at(out, r->values_at);
    for (int i = 0; i < r->kept; i++) {
        const int p = position[i];
        const int32_t sign = bits_of(v[p]) & INT32_MIN;
        const int which = magnitude[i] > middle;
        const int high_at = r->highs_at + (p >> r->low_bits) + i;
        append(&lows, (uint32_t)p & ((1u << r->low_bits) - 1), r->low_bits);
        or_word(out + high_at / 32 * 4, 1u << (high_at % 32));
        append(&codes, (uint32_t)((sign ? 2 : 0) | which), 2);
        v[p] = v[p] - float_of(levels[which] | sign);
    }
    finish(&lows);
    finish(&codes);
}

/* The same where all are kept: no positions, no branches. */
INLINE void write_all(float *restrict v, const float *restrict magnitude, const int32_t levels[2],
                      const struct record *r, uint8_t *restrict out) {
    const float low = float_of(levels[0]), high = float_of(levels[1]), middle = low * 0.5f + high * 0.5f;
    const int32_t low_bits = levels[0], differ = levels[0] ^ levels[1];
    uint8_t code[MAX_BLOCK + 8] __attribute__((aligned(64)));
    for (int i = 0; i < r->length; i++) {
        const int32_t sign = bits_of(v[i]) & INT32_MIN;
        const int32_t which = magnitude[i] > middle;
        code[i] = (uint8_t)((uint32_t)sign >> 30 | (uint32_t)which);
        v[i] = v[i] - float_of((low_bits ^ (differ & -which)) | sign);
    }
    memset(code + r->length, 0, 8);
    writer codes = write_at(out, r->values_at);
    for (int i = 0; i < r->length; i += 8) { /* 8 bytes of 2 bits each → 16 bits */
        uint64_t x;
        memcpy(&x, code + i, 8);
        x = (x | x >> 6) & 0x000F000F000F000Fu;
        x = (x | x >> 12) & 0x000000FF000000FFu;
        append(&codes, (uint32_t)((x | x >> 24) & 0xFFFF), 16);
    }
    finish(&codes);
}

CLONES int encode_topk(const codec_job *job, int64_t first, int64_t last) {
    const int block = job->block;
    float v[MAX_BLOCK] __attribute__((aligned(64))), magnitude[MAX_BLOCK] __attribute__((aligned(64)));
    int32_t bits[MAX_BLOCK] __attribute__((aligned(64))), position[MAX_BLOCK + 1];
    int all_finite = 1;
    for (int64_t b = first; b < last; b++) {
        const int64_t at = b * block;
        const int length = job->numel - at < block ? (int)(job->numel - at) : block;
        const struct record *r = &job->record[length < block];
        uint8_t *out = job->payload + b * job->record[0].bytes;
        int32_t largest = load_block(v, job, at, length);
        const int finite = largest < INFINITY_BITS;
        if (!finite) {
            memset(v, 0, sizeof(float) * (size_t)length);
            largest = 0;
            all_finite = 0;
        }
        for (int i = 0; i < length; i++) bits[i] = magnitude_bits(v[i]);
        if (r->kept == length) {
            memcpy(magnitude, bits, sizeof(float) * (size_t)length);
        } else {
            select_largest(bits, length, r->kept, largest, position);
            for (int i = 0; i < r->kept; i++) magnitude[i] = float_of(bits[position[i]]);
        }
        int32_t levels[2] = {0, 0};
        if (largest >= TINY_BITS) two_magnitudes(magnitude, r->kept, largest, job, levels);
        memset(out, 0, (size_t)r->bytes);
        for (int i = 0; i < 2; i++) store_scale(out + i * SCALE_BYTES, finite ? levels[i] : NAN_BITS);
        if (r->kept == length)
            write_all(v, magnitude, levels, r, out);
        else
            write_kept(v, magnitude, position, levels, r, out);
        if (job->residual && finite) memcpy(residual_at(job, at), v, sizeof(float) * (size_t)length);
    }
    return all_finite;
}

/* Calls BODY for the kept elements of a record with their `rank` and position `p`; counts them in `rank`. */
#define FOR_KEPT(in, r, rank, p, BODY)                                                                      \
    for (int word_at = (r)->highs_at; word_at < (r)->values_at; word_at += 32) {                            \
        const int left = (r)->values_at - word_at;                                                          \
        for (uint32_t set = get_bits(in, r, word_at, left < 32 ? left : 32); set; set &= set - 1, rank++) { \
            if (rank >= (r)->kept) return 0;                                                                \
            const int bit = word_at - (r)->highs_at + __builtin_ctz(set);                                   \
            const int p = (bit - rank) << (r)->low_bits |                                                   \
                          (int)get_bits(in, r, (r)->lows_at + rank * (r)->low_bits, (r)->low_bits);         \
            if (p >= (r)->length) return 0;                                                                 \
            BODY                                                                                            \
        }                                                                                                   \
    }

INLINE int decode_kept(const codec_job *job, const uint8_t *in, const struct record *r, float *restrict out) {
    float value[4];
    int rank = 0;
    for (int i = 0; i < 4; i++) {
        const int32_t bits = load_scale(in + (i & 1) * SCALE_BYTES);
        value[i] = float_of(bits ^ (i & 2 ? INT32_MIN : 0));
    }
    FOR_KEPT(in, r, rank, p, {
        const float decoded = value[get_bits(in, r, r->values_at + 2 * rank, 2)];
        out[p] = job->accumulate ? out[p] + job->weight * decoded : decoded;
    })
    return 1;
}

/* A record without positions. */
INLINE void decode_all(const codec_job *job, const uint8_t *in, const struct record *r, float *restrict out,
                       const int accumulate) {
    const int32_t low = load_scale(in), differ = low ^ load_scale(in + SCALE_BYTES);
    const float weight = job->weight;
    uint8_t code[MAX_BLOCK + 8] __attribute__((aligned(64)));
    for (int i = 0; i < r->length; i += 8) { /* 16 bits → 8 bytes of 2 bits each */
        const int n = r->length - i < 8 ? r->length - i : 8;
        uint64_t x = get_bits(in, r, r->values_at + 2 * i, 2 * n);
        x = (x | x << 24) & 0x000000FF000000FFu;
        x = (x | x << 12) & 0x000F000F000F000Fu;
        x = (x | x << 6) & 0x0303030303030303u;
        memcpy(code + i, &x, 8);
    }
    for (int i = 0; i < r->length; i++) {
        const int32_t c = code[i], sign = (int32_t)((uint32_t)(c & 2) << 30);
        const float value = float_of((low ^ (differ & -(c & 1))) ^ sign);
        out[i] = accumulate ? out[i] + weight * value : value;
    }
}

CLONES void decode_topk(const codec_job *job, int64_t first, int64_t last) {
    for (int64_t b = first; b < last; b++) {
        const int64_t at = b * job->block;
        const int length = job->numel - at < job->block ? (int)(job->numel - at) : job->block;
        const struct record *r = &job->record[length < job->block];
        const uint8_t *in = job->payload + b * job->record[0].bytes;
        if (r->kept < length) {
            if (!job->accumulate) memset(job->out + at, 0, sizeof(float) * (size_t)length);
            decode_kept(job, in, r, job->out + at);
        } else {
            EITHER(job->accumulate, decode_all, job, in, r, job->out + at);
        }
    }
}

INLINE int record_ok(const codec_job *job, const uint8_t *in, const struct record *r) {
    int rank = 0;
    for (int i = 0; i < 2; i++) {
        const int32_t bits = load_scale(in + i * SCALE_BYTES);
        if (bits < 0 || bits > job->max_scale_bits) return 0;
    }
    if (r->kept == r->length) return 1;
    FOR_KEPT(in, r, rank, p, {})
    return rank == r->kept;
}

CLONES int topk_ok(const codec_job *job, int64_t first, int64_t last) {
    int ok = 1;
    for (int64_t b = first; b < last; b++) {
        const struct record *r = &job->record[job->numel - b * job->block < job->block];
        ok &= record_ok(job, job->payload + b * job->record[0].bytes, r);
    }
    return ok;
}
