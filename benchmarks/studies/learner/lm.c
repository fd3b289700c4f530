/* The small byte model of `model.py`: loss and gradient of a batch by one thread, without a library's overhead a call.
   Matrices are row-major fp32. R rows are the tokens of a chunk of samples; a chunk's activations stay in the cache. */
#include "matrices.h"

typedef struct {
    int32_t vocab, hidden, layers, heads, ffn, length; /* length: tokens of a sample */
    float eps;
    const float *cosine, *sine; /* [length, head size / 2] */
} Model;

/* y = x Wᵀ, with Wᵀ [in, out] at hand;  dx = dy W;  dW += dyᵀ x */
static void forward_matrix(int rows, int in, int out, const float *x, const float *w_t, float *y, int add) {
    multiply(rows, out, in, x, in, 1, w_t, out, y, out, add);
}

static void backward_matrix(int rows, int in, int out, const float *dy, const float *x, const float *w, float *dx,
                            float *dw) {
    multiply(rows, in, out, dy, out, 1, w, in, dx, in, 0);
    multiply(out, in, rows, dy, 1, out, x, in, dw, in, 1);
}

/* ---- element by element */

INLINE float exponential(float x) { /* relative error below 3e-7; without branches, so that loops become vectors */
    float whole = x * 1.44269504f;
    int32_t n = (int32_t)(whole + copysignf(0.5f, whole)), bits;
    float r = x - n * 0.693359375f + n * 2.12194440e-4f, y = 1.9875691500e-4f, power;
    y = y * r + 1.3981999507e-3f;
    y = y * r + 8.3334519073e-3f;
    y = y * r + 4.1665795894e-2f;
    y = y * r + 1.6666665459e-1f;
    y = y * r + 5.0000001201e-1f;
    n = n < -126 ? -126 : n > 127 ? 127 : n; /* beyond: about 0, or infinity */
    bits = (n + 127) * (1 << 23);
    memcpy(&power, &bits, sizeof power);
    return (y * r * r + r + 1) * power;
}

INLINE float largest(int n, const float *x) { /* lane by lane: a plain reduction stays scalar, for NaNs' sake */
    float lane[LANES], most = x[0];
    int i = 0;
    for (int l = 0; l < LANES; l++) lane[l] = most;
    for (; i + LANES <= n; i += LANES)
        for (int l = 0; l < LANES; l++) lane[l] = x[i + l] > lane[l] ? x[i + l] : lane[l];
    for (; i < n; i++) most = x[i] > most ? x[i] : most;
    for (int l = 0; l < LANES; l++) most = lane[l] > most ? lane[l] : most;
    return most;
}

CLONES static void norm(int rows, int n, const float *x, const float *weight, float eps, float *scale, float *y) {
    for (int r = 0; r < rows; r++, x += n, y += n) {
        float sum = 0;
        for (int i = 0; i < n; i++) sum += x[i] * x[i];
        float s = scale[r] = 1 / sqrtf(sum / n + eps);
        for (int i = 0; i < n; i++) y[i] = x[i] * s * weight[i];
    }
}

/* dx += … */
CLONES static void norm_backward(int rows, int n, const float *x, const float *weight, const float *scale,
                                 const float *dy, float *dx, float *dweight) {
    for (int r = 0; r < rows; r++, x += n, dy += n, dx += n) {
        float s = scale[r], sum = 0;
        for (int i = 0; i < n; i++) sum += dy[i] * weight[i] * x[i];
        float back = sum * s * s * s / n;
        for (int i = 0; i < n; i++) {
            dweight[i] += dy[i] * x[i] * s;
            dx[i] += s * dy[i] * weight[i] - back * x[i];
        }
    }
}

/* gate_up: [rows, 2n], y = silu(gate) · up */
CLONES static void swiglu(int rows, int n, const float *gate_up, float *y) {
    for (int r = 0; r < rows; r++, gate_up += 2 * n, y += n)
        for (int i = 0; i < n; i++) y[i] = gate_up[i] / (1 + exponential(-gate_up[i])) * gate_up[n + i];
}

CLONES static void swiglu_backward(int rows, int n, const float *gate_up, const float *dy, float *dgate_up) {
    for (int r = 0; r < rows; r++, gate_up += 2 * n, dgate_up += 2 * n, dy += n)
        for (int i = 0; i < n; i++) {
            float g = gate_up[i], s = 1 / (1 + exponential(-g));
            dgate_up[i] = dy[i] * gate_up[n + i] * s * (1 + g * (1 - s));
            dgate_up[n + i] = dy[i] * g * s;
        }
}

/* rows of scores become probabilities over the positions up to their own */
CLONES static void causal_softmax(int n, float scale, float *p) {
    for (int r = 0; r < n; r++, p += n) {
        float most = p[0], sum = 0;
        for (int i = 1; i <= r; i++) most = p[i] > most ? p[i] : most;
        for (int i = 0; i <= r; i++) sum += p[i] = exponential((p[i] - most) * scale);
        for (int i = 0; i <= r; i++) p[i] /= sum;
        memset(p + r + 1, 0, (n - r - 1) * sizeof(float));
    }
}

CLONES static void softmax_backward(int n, float scale, const float *p, float *dp) {
    for (int r = 0; r < n; r++, p += n, dp += n) {
        float sum = 0;
        for (int i = 0; i < n; i++) sum += p[i] * dp[i];
        for (int i = 0; i < n; i++) dp[i] = p[i] * (dp[i] - sum) * scale;
    }
}

/* Sum of the negative log likelihoods; logits become their gradient times `weight`. */
CLONES static double cross_entropy(int rows, int n, float *logits, const int64_t *targets, float weight) {
    double loss = 0;
    for (int r = 0; r < rows; r++, logits += n) {
        float most = largest(n, logits), sum = 0, own = logits[targets[r]];
        for (int i = 0; i < n; i++) sum += logits[i] = exponential(logits[i] - most);
        loss += log((double)sum) + most - own;
        for (int i = 0; i < n; i++) logits[i] *= weight / sum;
        logits[targets[r]] -= weight;
    }
    return loss;
}

CLONES static void add_to(long n, const float *x, float *y) {
    for (long i = 0; i < n; i++) y[i] += x[i];
}

/* Rotary embedding of one head, [length, size] from rows `step` apart; direction −1 undoes it. */
CLONES static void rotate(const Model *m, const float *from, long from_step, float *to, long to_step, float direction) {
    int half = m->hidden / m->heads / 2;
    for (int t = 0; t < m->length; t++, from += from_step, to += to_step)
        for (int i = 0; i < half; i++) {
            float c = m->cosine[t * half + i], s = m->sine[t * half + i] * direction;
            float first = from[i], second = from[half + i];
            to[i] = first * c - second * s;
            to[half + i] = second * c + first * s;
        }
}

/* ---- the model */

typedef struct { /* a layer's weights, or their gradients, or their transposes */
    float *norm1, *qkv, *out, *norm2, *gate_up, *down;
} Layer;

typedef struct { /* of a chunk */
    float *x, *scale1, *h1, *q, *k, *v, *p, *o, *middle, *scale2, *h2, *gate_up, *act;
} Saved;

static float *take(float **at, long n) {
    float *here = *at;
    *at += (n + LANES - 1) / LANES * LANES;
    return here;
}

static Layer layer_at(const Model *m, const float *weights, int i) {
    long h = m->hidden, f = m->ffn, each = 2 * h + 4 * h * h + 3 * h * f;
    float *at = (float *)weights + (long)m->vocab * h + i * each;
    Layer l;
    l.norm1 = at, at += h;
    l.qkv = at, at += 3 * h * h;
    l.out = at, at += h * h;
    l.norm2 = at, at += h;
    l.gate_up = at, at += 2 * h * f;
    l.down = at;
    return l;
}

static long numel(const Model *m) { return layer_at(m, 0, m->layers).norm1 - (float *)0 + m->hidden; }

static Saved saved_at(const Model *m, int rows, float **at) {
    long h = (long)rows * m->hidden, f = (long)rows * m->ffn;
    Saved s;
    s.x = take(at, h), s.scale1 = take(at, rows), s.h1 = take(at, h);
    s.q = take(at, h), s.k = take(at, h), s.v = take(at, h);
    s.p = take(at, (long)rows * m->heads * m->length), s.o = take(at, h);
    s.middle = take(at, h), s.scale2 = take(at, rows), s.h2 = take(at, h);
    s.gate_up = take(at, 2 * f), s.act = take(at, f);
    return s;
}

typedef struct {
    float *turned, *final, *scale, *h, *logits, *dx, *dh, *dqkv, *dgate_up, *dact, *head_t, *other_t, *dp, *dq, *dk;
} Scratch;

static Scratch scratch_at(const Model *m, int rows, float **at) {
    long h = (long)rows * m->hidden, f = (long)rows * m->ffn, size = (long)m->length * (m->hidden / m->heads);
    Scratch s;
    s.turned = take(at, numel(m));
    s.final = take(at, h), s.scale = take(at, rows), s.h = take(at, h), s.logits = take(at, (long)rows * m->vocab);
    s.dx = take(at, h), s.dh = take(at, h), s.dqkv = take(at, 3 * h), s.dgate_up = take(at, 2 * f);
    s.dact = take(at, f), s.head_t = take(at, size), s.other_t = take(at, size);
    s.dp = take(at, (long)m->length * m->length), s.dq = take(at, size), s.dk = take(at, size);
    return s;
}

static void attend(const Model *m, int samples, const float *qkv, const Saved *s, const Scratch *t) {
    int n = m->length, size = m->hidden / m->heads;
    for (int i = 0; i < samples * m->heads; i++) {
        const float *from = qkv + (long)(i / m->heads) * n * 3 * m->hidden + i % m->heads * size;
        float *q = s->q + (long)i * n * size, *k = s->k + (long)i * n * size, *v = s->v + (long)i * n * size;
        float *p = s->p + (long)i * n * n;
        rotate(m, from, 3 * m->hidden, q, size, 1);
        rotate(m, from + m->hidden, 3 * m->hidden, k, size, 1);
        for (int r = 0; r < n; r++) memcpy(v + r * size, from + 2 * m->hidden + (long)r * 3 * m->hidden, size * 4);
        transpose(n, size, k, size, t->head_t, n);
        multiply(n, n, size, q, size, 1, t->head_t, n, p, n, 0);
        causal_softmax(n, 1 / sqrtf(size), p);
        float *o = s->o + (long)(i / m->heads) * n * m->hidden + i % m->heads * size;
        multiply(n, size, n, p, n, 1, v, size, o, m->hidden, 0);
    }
}

static void attend_backward(const Model *m, int samples, const float *d, const Saved *s, const Scratch *t) {
    int n = m->length, size = m->hidden / m->heads;
    for (int i = 0; i < samples * m->heads; i++) {
        long row = (long)(i / m->heads) * n, place = i % m->heads * size;
        const float *q = s->q + (long)i * n * size, *k = s->k + (long)i * n * size, *v = s->v + (long)i * n * size;
        const float *p = s->p + (long)i * n * n, *dy = d + row * m->hidden + place;
        float *to = t->dqkv + row * 3 * m->hidden + place;
        transpose(n, size, v, size, t->other_t, n);
        multiply(n, n, size, dy, m->hidden, 1, t->other_t, n, t->dp, n, 0);
        multiply(n, size, n, p, 1, n, dy, m->hidden, to + 2 * m->hidden, 3 * m->hidden, 0);
        softmax_backward(n, 1 / sqrtf(size), p, t->dp);
        multiply(n, size, n, t->dp, n, 1, k, size, t->dq, size, 0);
        multiply(n, size, n, t->dp, 1, n, q, size, t->dk, size, 0);
        rotate(m, t->dq, size, to, 3 * m->hidden, -1);
        rotate(m, t->dk, size, to + m->hidden, 3 * m->hidden, -1);
    }
}

static void turn(const Model *m, const float *weights, float *turned) {
    int h = m->hidden, f = m->ffn;
    transpose(m->vocab, h, weights, h, turned, m->vocab);
    for (int i = 0; i < m->layers; i++) {
        Layer w = layer_at(m, weights, i), t = layer_at(m, turned, i);
        transpose(3 * h, h, w.qkv, h, t.qkv, 3 * h);
        transpose(h, h, w.out, h, t.out, h);
        transpose(2 * f, h, w.gate_up, h, t.gate_up, 2 * f);
        transpose(h, f, w.down, f, t.down, h);
    }
}

/* Floats of workspace for chunks of so many samples. */
long geotrain_lm_workspace(const Model *m, int samples) {
    float *at = 0;
    for (int i = 0; i < m->layers; i++) saved_at(m, samples * m->length, &at);
    scratch_at(m, samples * m->length, &at);
    return at - (float *)0;
}

static double chunk(const Model *m, const float *weights, float *gradient, const int64_t *tokens, int samples,
                    float weight, float *work, int room) {
    int n = m->length, h = m->hidden, f = m->ffn, rows = samples * n;
    Saved saved[m->layers];
    int64_t inputs[rows], targets[rows];
    for (int i = 0; i < m->layers; i++) saved[i] = saved_at(m, room * n, &work);
    Scratch t = scratch_at(m, room * n, &work);
    for (int r = 0; r < rows; r++) {
        inputs[r] = tokens[r / n * (n + 1) + r % n];
        targets[r] = tokens[r / n * (n + 1) + r % n + 1];
        memcpy(saved[0].x + (long)r * h, weights + inputs[r] * h, h * sizeof(float));
    }
    for (int i = 0; i < m->layers; i++) {
        Layer w = layer_at(m, weights, i), wt = layer_at(m, t.turned, i);
        const Saved *s = &saved[i];
        float *next = i + 1 < m->layers ? saved[i + 1].x : t.final;
        norm(rows, h, s->x, w.norm1, m->eps, s->scale1, s->h1);
        forward_matrix(rows, h, 3 * h, s->h1, wt.qkv, t.dqkv, 0);
        attend(m, samples, t.dqkv, s, &t);
        memcpy(s->middle, s->x, (long)rows * h * sizeof(float));
        forward_matrix(rows, h, h, s->o, wt.out, s->middle, 1);
        norm(rows, h, s->middle, w.norm2, m->eps, s->scale2, s->h2);
        forward_matrix(rows, h, 2 * f, s->h2, wt.gate_up, s->gate_up, 0);
        swiglu(rows, f, s->gate_up, s->act);
        memcpy(next, s->middle, (long)rows * h * sizeof(float));
        forward_matrix(rows, f, h, s->act, wt.down, next, 1);
    }
    const float *final_norm = layer_at(m, weights, m->layers).norm1;
    norm(rows, h, t.final, final_norm, m->eps, t.scale, t.h);
    forward_matrix(rows, h, m->vocab, t.h, t.turned, t.logits, 0);
    double loss = cross_entropy(rows, m->vocab, t.logits, targets, weight);
    if (!gradient) return loss;

    backward_matrix(rows, h, m->vocab, t.logits, t.h, weights, t.dh, gradient);
    memset(t.dx, 0, (long)rows * h * sizeof(float));
    norm_backward(rows, h, t.final, final_norm, t.scale, t.dh, t.dx, layer_at(m, gradient, m->layers).norm1);
    for (int i = m->layers - 1; i >= 0; i--) {
        Layer w = layer_at(m, weights, i), g = layer_at(m, gradient, i);
        const Saved *s = &saved[i];
        backward_matrix(rows, f, h, t.dx, s->act, w.down, t.dact, g.down);
        swiglu_backward(rows, f, s->gate_up, t.dact, t.dgate_up);
        backward_matrix(rows, h, 2 * f, t.dgate_up, s->h2, w.gate_up, t.dh, g.gate_up);
        norm_backward(rows, h, s->middle, w.norm2, s->scale2, t.dh, t.dx, g.norm2);
        backward_matrix(rows, h, h, t.dx, s->o, w.out, t.dh, g.out);
        attend_backward(m, samples, t.dh, s, &t);
        backward_matrix(rows, h, 3 * h, t.dqkv, s->h1, w.qkv, t.dh, g.qkv);
        norm_backward(rows, h, s->x, w.norm1, s->scale1, t.dh, t.dx, g.norm1);
    }
    for (int r = 0; r < rows; r++) add_to(h, t.dx + (long)r * h, gradient + inputs[r] * h);
    return loss;
}

/* Mean negative log likelihood of tokens [samples, length + 1]; its gradient, unless that is NULL, is overwritten.
   room: samples of a chunk, whose workspace `work` has. */
double geotrain_lm(const Model *m, const float *weights, float *gradient, const int64_t *tokens, int samples,
                   float *work, int room) {
    double loss = 0;
    float *at = work;
    for (int i = 0; i < m->layers; i++) saved_at(m, room * m->length, &at);
    turn(m, weights, scratch_at(m, room * m->length, &at).turned);
    if (gradient) memset(gradient, 0, numel(m) * sizeof(float));
    double tokens_in_all = (double)samples * m->length;
    for (int first = 0; first < samples; first += room) {
        int here = samples - first < room ? samples - first : room;
        loss += chunk(m, weights, gradient, tokens + (long)first * (m->length + 1), here, 1 / tokens_in_all, work, room);
    }
    return loss / tokens_in_all;
}
