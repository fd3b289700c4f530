/* Products and transposes of small matrices, row-major fp32, by one thread. */
#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__) && defined(__GNUC__) && __GNUC__ >= 12
#define CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define CLONES
#endif
#define INLINE static inline __attribute__((always_inline))

typedef float vector __attribute__((vector_size(64), aligned(4), may_alias));
enum { LANES = 16 };

/* ---- C[m, n] = (C or 0) + A[m, k] · B[k, n]; A's elements lie row_step and column_step apart */

INLINE void tile(int rows, int vectors, int k, const float *a, long row_step, long column_step, const float *b,
                 long b_step, float *c, long c_step, int add) {
    vector sum[8][2];
#pragma GCC unroll 8
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 2
        for (int j = 0; j < vectors; j++) sum[i][j] = add ? *(vector *)(c + i * c_step + j * LANES) : (vector){0};
    for (int p = 0; p < k; p++, a += column_step, b += b_step) {
        vector right[2];
#pragma GCC unroll 2
        for (int j = 0; j < vectors; j++) right[j] = *(const vector *)(b + j * LANES);
#pragma GCC unroll 8
        for (int i = 0; i < rows; i++)
#pragma GCC unroll 2
            for (int j = 0; j < vectors; j++) sum[i][j] += a[i * row_step] * right[j];
    }
#pragma GCC unroll 8
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 2
        for (int j = 0; j < vectors; j++) *(vector *)(c + i * c_step + j * LANES) = sum[i][j];
}

INLINE void columns(int vectors, int m, int k, const float *a, long row_step, long column_step, const float *b,
                    long b_step, float *c, long c_step, int add) {
    int i = 0;
    for (; i + 8 <= m; i += 8)
        tile(8, vectors, k, a + i * row_step, row_step, column_step, b, b_step, c + i * c_step, c_step, add);
    for (; i < m; i++)
        tile(1, vectors, k, a + i * row_step, row_step, column_step, b, b_step, c + i * c_step, c_step, add);
}

CLONES static void multiply(int m, int n, int k, const float *a, long row_step, long column_step, const float *b,
                            long b_step, float *c, long c_step, int add) {
    int j = 0;
    for (; j + 2 * LANES <= n; j += 2 * LANES)
        columns(2, m, k, a, row_step, column_step, b + j, b_step, c + j, c_step, add);
    for (; j + LANES <= n; j += LANES)
        columns(1, m, k, a, row_step, column_step, b + j, b_step, c + j, c_step, add);
    for (; j < n; j++)
        for (int i = 0; i < m; i++) {
            float sum = add ? c[i * c_step + j] : 0;
            for (int p = 0; p < k; p++) sum += a[i * row_step + p * column_step] * b[p * b_step + j];
            c[i * c_step + j] = sum;
        }
}

/* A block of 16 × 16: in the stage `half`, rows that lie so far apart exchange their halves of that width. */
INLINE void transpose_block(const float *from, long from_step, float *to, long to_step) {
    typedef int32_t places __attribute__((vector_size(64)));
    vector row[LANES];
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++) row[i] = *(const vector *)(from + i * from_step);
#pragma GCC unroll 4
    for (int half = LANES / 2; half; half /= 2) {
        places low, high;
#pragma GCC unroll 16
        for (int l = 0; l < LANES; l++) {
            low[l] = l & half ? l - half + LANES : l;
            high[l] = l & half ? l + LANES : l + half;
        }
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++)
            if (!(i & half)) {
                vector above = row[i], below = row[i + half];
                row[i] = __builtin_shuffle(above, below, low);
                row[i + half] = __builtin_shuffle(above, below, high);
            }
    }
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++) *(vector *)(to + i * to_step) = row[i];
}

CLONES static void transpose(int rows, int cols, const float *from, long from_step, float *to, long to_step) {
    for (int j = 0; j < cols; j += LANES)
        for (int i = 0; i < rows; i += LANES)
            if (i + LANES <= rows && j + LANES <= cols)
                transpose_block(from + i * from_step + j, from_step, to + j * to_step + i, to_step);
            else
                for (int k = i; k < rows && k < i + LANES; k++)
                    for (int l = j; l < cols && l < j + LANES; l++) to[l * to_step + k] = from[k * from_step + l];
}
