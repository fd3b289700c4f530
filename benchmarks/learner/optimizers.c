/* Optimizers on flat vectors, as `optimizers.py` states them: AdamW; Muon on matrices, with AdamW on all else. */
#include "matrices.h"

typedef struct {
    float clip, keep1, keep2, eps, rate, scale2, shrink;
} Adam; /* rate: bias-corrected; shrink: rate × weight decay */

/* What the gradient is multiplied with, to be at most `clip` long. */
CLONES static float clipping(long n, const float *gradient, float clip) {
    double square = 0;
    for (long first = 0; first < n; first += 4096) {
        float sum = 0;
        for (long i = first; i < n && i < first + 4096; i++) sum += gradient[i] * gradient[i];
        square += sum;
    }
    float size = (float)sqrt(square);
    return size > clip ? clip / size : 1;
}

CLONES static void adamw(long n, float *weights, const float *gradient, float *m, float *v, const float *decays,
                         Adam s, float part) {
    for (long i = 0; i < n; i++) {
        float g = gradient[i] * part;
        m[i] += (1 - s.keep1) * (g - m[i]);
        v[i] = s.keep2 * v[i] + (1 - s.keep2) * g * g;
        weights[i] -= s.shrink * decays[i] * weights[i];
        weights[i] -= s.rate * m[i] / (sqrtf(v[i] * s.scale2) + s.eps);
    }
}

void geotrain_lm_adamw(long n, float *weights, const float *gradient, float *m, float *v, const float *decays,
                       const Adam *s) {
    adamw(n, weights, gradient, m, v, decays, *s, clipping(n, gradient, s->clip));
}

/* ---- Muon */

typedef struct {
    float keep, mix, lr, shrink, eps; /* mix: weight of the momentum; lr: of the orthogonal matrix */
    float a, b, c;               /* of an iteration */
    int32_t iterations;
} Muon;

/* c[n, n] = a[n, k] · b[k, n], which is known to be symmetric: computed above the diagonal, copied below it. */
static void multiply_symmetric(int n, int k, const float *a, long row_step, long column_step, const float *b,
                               float *c) {
    if (library_sgemm) {
        multiply(n, n, k, a, row_step, column_step, b, n, c, n, 0);
        return;
    }
    for (int j = 0; j < n; j += LANES) {
        int width = n - j < LANES ? n - j : LANES;
        multiply_here(j + width, width, k, a, row_step, column_step, b + j, n, c + j, n, 0);
        transpose(j, width, c + j, n, c + (long)j * n, n);
    }
}

CLONES static void momentum(long n, const float *gradient, float part, float keep, float mix, float *m, float *u) {
    for (long i = 0; i < n; i++) {
        float g = gradient[i] * part;
        m[i] += (1 - keep) * (g - m[i]);
        u[i] = (1 - mix) * g + mix * m[i];
    }
}

CLONES static void polynomial(int n, float a, float b, float c, const float *x, const float *square, float *p) {
    for (long i = 0; i < (long)n * n; i++) p[i] = b * x[i] + c * square[i];
    for (long i = 0; i < n; i++) p[i * (n + 1)] += a;
}

CLONES static void scale(long n, float by, float *x) {
    for (long i = 0; i < n; i++) x[i] *= by;
}

CLONES static void move(long n, float lr, float shrink, const float *update, float *weights) {
    for (long i = 0; i < n; i++) weights[i] -= shrink * weights[i] + lr * update[i];
}

/* out = the Newton–Schulz iterations of u [rows, columns], rows ≥ columns: X ← aX + bX(XᵀX) + cX(XᵀX)², from u/‖u‖.
   All its matrices are polynomials of the first XᵀX = G: they commute, are symmetric, and X is u · Q / ‖u‖ with
   Q ← QP, G ← PGP, P = aI + bG + cG². work: 5 · columns² floats. */
static void orthogonal(int rows, int columns, const float *u, const Muon *s, float *work, float *out) {
    long square = (long)columns * columns;
    float *g = work, *other = g + square, *p = other + square, *q = p + square, *next = q + square, size = 0;
    multiply_symmetric(columns, rows, u, 1, columns, u, g);
    for (int i = 0; i < columns; i++) size += g[i * (columns + 1)];
    size = 1 / (sqrtf(size) + s->eps);
    scale(square, size * size, g);
    for (int i = 0; i < s->iterations; i++) {
        multiply_symmetric(columns, columns, g, columns, 1, g, other);
        polynomial(columns, s->a, s->b, s->c, g, other, p);
        if (i) {
            multiply_symmetric(columns, columns, q, columns, 1, p, next);
            float *before = q;
            q = next, next = before;
        } else
            memcpy(q, p, square * sizeof(float));
        if (i + 1 < s->iterations) {
            multiply_symmetric(columns, columns, g, columns, 1, p, other);
            multiply_symmetric(columns, columns, other, columns, 1, p, g);
        }
    }
    scale(square, size, q);
    multiply(rows, columns, columns, u, columns, 1, q, columns, out, columns, 0);
}

/* Floats of workspace for a matrix. */
long geotrain_lm_muon_workspace(long rows, long columns) {
    long least = rows < columns ? rows : columns;
    return 3 * rows * columns + 5 * least * least;
}

/* places: of each of `count` matrices, in order, its first element, rows and columns. What lies between them is
   AdamW's. m: the momentum of a matrix, AdamW's first moment elsewhere. */
void geotrain_lm_muon(long n, float *weights, const float *gradient, float *m, float *v, const float *decays,
                      const Adam *adam, const Muon *s, long count, const int64_t *places, Sgemm *sgemm, float *work) {
    float part = clipping(n, gradient, adam->clip);
    long done = 0;
    library_sgemm = sgemm;
    for (long i = 0; i <= count; i++) {
        long at = i < count ? places[3 * i] : n;
        adamw(at - done, weights + done, gradient + done, m + done, v + done, decays + done, *adam, part);
        if (i == count) break;
        long rows = places[3 * i + 1], columns = places[3 * i + 2], size = rows * columns;
        long most = rows > columns ? rows : columns;
        float *u = work, *turned = u + size, *made = turned + size, *rest = made + size;
        momentum(size, gradient + at, part, s->keep, s->mix, m + at, u);
        if (rows >= columns)
            orthogonal(rows, columns, u, s, rest, made);
        else {
            transpose(rows, columns, u, columns, turned, rows);
            orthogonal(columns, rows, turned, s, rest, u);
            transpose(columns, rows, u, rows, made, columns);
        }
        move(size, s->lr * sqrtf((float)most), s->shrink, made, weights + at);
        done = at + size;
    }
}
