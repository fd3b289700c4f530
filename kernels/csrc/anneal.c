/* Simulated annealing of a table of stages × pipelines of devices, whose cost geotrain/plan/placement/cost.py defines.
 *
 * The cost is made of maxima, and so flat nearly everywhere. What is annealed has p-norms in their place, p = 2^power,
 * with the power rising from level to level while the temperature falls: at first every device pulls, at last nearly
 * only the dearest. `reference_anneal.py` does the same, with the same bits. */
#include "common.h"

typedef struct {
    const double *gradient, *activation, *compute; /* (n, n), (n, n), (n) */
    double *work;                                  /* see `anneal_work` in anneal.py */
    int32_t *order, *best, *spare; /* (n): the table row by row, then idle devices; the cheapest seen; (S·D + S) */
    int64_t steps;                 /* of each level */
    uint64_t seed;
    double heat, cool; /* the first temperature, and the factor from one step to the next */
    int32_t stages, replicas, devices, first_power, last_power;
} anneal_job;

typedef struct {
    const double *gradient;
    int32_t *order;
    double *row, *stage, *edge; /* each placed device's gradient links; norms: by stage to the p-th power, by edge */
    double *linked, *computed;  /* activation and compute to the p-th power */
    double compute;             /* sum over placed devices */
    int32_t stages, replicas, devices, power;
    uint64_t random;
} annealing;

#define SWAP(type, x, y)     \
    do {                     \
        const type kept = x; \
        x = y;               \
        y = kept;            \
    } while (0)

static uint64_t draw(annealing *s) { /* splitmix64 */
    uint64_t z = s->random += 0x9E3779B97F4A7C15u;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
}

static int32_t below(annealing *s, int32_t bound) {
    return (int32_t)(((draw(s) >> 32) * (uint64_t)bound) >> 32);
}

static double uniform(annealing *s) { return ((double)(draw(s) >> 11) + 0.5) * 0x1p-53; }

static double raised(double x, int32_t power) {
    while (power--) x *= x;
    return x;
}

static double root(double x, int32_t power) {
    while (power--) x = sqrt(x);
    return x;
}

static double edge_norm(const annealing *s, int32_t above, int32_t under) {
    const int32_t d = s->replicas, *one = s->order + above * d, *two = s->order + under * d;
    double sum = 0;
    for (int32_t i = 0; i < d; i++) sum += s->linked[(size_t)one[i] * (size_t)s->devices + (size_t)two[i]];
    return root(sum, s->power);
}

static double stage_power(const annealing *s, int32_t stage) {
    double sum = 0;
    for (int32_t i = stage * s->replicas; i < (stage + 1) * s->replicas; i++) sum += raised(s->row[i], s->power);
    return sum;
}

static double norms(const annealing *s, const double *edge) {
    double rows = 0, edges = 0;
    for (int32_t i = 0; i < s->stages; i++) rows += s->stage[i];
    for (int32_t i = 0; i + 1 < s->stages; i++) edges += edge[i];
    return root(rows, s->power) + 2 * edges + root(s->compute, s->power);
}

/* All anew: what is updated by differences gathers rounding. */
static double afresh(annealing *s) {
    const int32_t d = s->replicas;
    s->compute = 0;
    for (int32_t i = 0; i < s->stages * d; i++) {
        const double *link = s->gradient + (size_t)s->order[i] * (size_t)s->devices;
        const int32_t *group = s->order + i / d * d;
        double sum = 0;
        for (int32_t j = 0; j < d; j++) sum += link[group[j]];
        s->row[i] = sum;
        s->compute += s->computed[s->order[i]];
    }
    for (int32_t i = 0; i < s->stages; i++) s->stage[i] = stage_power(s, i);
    for (int32_t i = 0; i + 1 < s->stages; i++) s->edge[i] = edge_norm(s, i, i + 1);
    return norms(s, s->edge);
}

/* The cost itself, or something above `known` if it is. */
static double true_cost(const annealing *s, const anneal_job *job, double known) {
    const int32_t d = s->replicas;
    double rows = 0, compute = 0;
    for (int32_t i = 0; i < s->stages * d; i++) {
        rows = s->row[i] > rows ? s->row[i] : rows;
        compute = job->compute[s->order[i]] > compute ? job->compute[s->order[i]] : compute;
    }
    double cost = rows + compute;
    for (int32_t e = 0; e + 1 < s->stages && cost < known; e++) {
        double most = 0;
        for (int32_t i = e * d; i < (e + 1) * d; i++) {
            const double link = job->activation[(size_t)s->order[i] * (size_t)s->devices + (size_t)s->order[i + d]];
            most = link > most ? link : most;
        }
        cost += 2 * most;
    }
    return cost;
}

static void put(annealing *s, int32_t cell, int32_t device) {
    const int32_t first = cell / s->replicas * s->replicas;
    const double *in = s->gradient + (size_t)device * (size_t)s->devices;
    const double *out = s->gradient + (size_t)s->order[cell] * (size_t)s->devices;
    double sum = 0;
    s->order[cell] = device;
    for (int32_t i = first; i < first + s->replicas; i++) {
        sum += in[s->order[i]];
        s->row[i] += in[s->order[i]] - out[s->order[i]];
    }
    s->row[cell] = sum;
}

static void edges_around(annealing *s, int32_t stage, int32_t length) {
    for (int32_t e = stage ? stage - 1 : 0; e < stage + length && e + 1 < s->stages; e++)
        s->edge[e] = edge_norm(s, e, e + 1);
}

/* From a stage on, two pipelines take each other's place: only one edge changes. */
static double cross(annealing *s, double cost, double limit) {
    const int32_t d = s->replicas, from = 1 + below(s, s->stages - 1), x = below(s, d), y = below(s, d);
    const double old = s->edge[from - 1];
    for (int32_t r = from; r < s->stages; r++) SWAP(int32_t, s->order[r * d + x], s->order[r * d + y]);
    const double norm = edge_norm(s, from - 1, from), then = cost + 2 * (norm - old);
    if (then > limit) {
        for (int32_t r = from; r < s->stages; r++) SWAP(int32_t, s->order[r * d + x], s->order[r * d + y]);
        return cost;
    }
    for (int32_t r = from; r < s->stages; r++) SWAP(double, s->row[r * d + x], s->row[r * d + y]);
    s->edge[from - 1] = norm;
    return then;
}

/* Stages x … y are turned around, or moved to stand behind z of the others. */
static double reorder(annealing *s, const anneal_job *job, double cost, double limit, double *kept) {
    const int32_t n = s->stages, d = s->replicas;
    int32_t x = below(s, n), y = below(s, n), z = below(s, n), *stages = job->spare + n * d, count = 0;
    if (x > y) SWAP(int32_t, x, y);
    const int turn = draw(s) >> 63 != 0;
    z %= n - (y - x);
    for (int32_t i = 0, others = 0; i <= n; i++) {
        if (turn && i < n) stages[count++] = i < x || i > y ? i : x + y - i;
        if (turn || (i >= x && i <= y)) continue;
        if (others++ == z)
            for (int32_t j = x; j <= y; j++) stages[count++] = j;
        if (i < n) stages[count++] = i;
    }
    for (int32_t e = 0; e + 1 < n; e++) {
        const int32_t one = stages[e], two = stages[e + 1];
        kept[e] = two == one + 1 ? s->edge[one] : one == two + 1 ? s->edge[two] : edge_norm(s, one, two);
    }
    const double then = norms(s, kept);
    if (then > limit) return cost;
    memcpy(s->edge, kept, sizeof(double) * (size_t)(n - 1));
    memcpy(kept, s->row, sizeof(double) * (size_t)(n * d + n)); /* stages lie behind the rows */
    memcpy(job->spare, s->order, sizeof(int32_t) * (size_t)(n * d));
    for (int32_t i = 0; i < n; i++) {
        memcpy(s->order + i * d, job->spare + stages[i] * d, sizeof(int32_t) * (size_t)d);
        memcpy(s->row + i * d, kept + stages[i] * d, sizeof(double) * (size_t)d);
        s->stage[i] = kept[n * d + stages[i]];
    }
    return then;
}

/* Devices change places: one with another or an idle one, or some stages of a pipeline with as many elsewhere. */
static double exchange(annealing *s, double cost, double limit, int long_ones, int with_idle, double *kept) {
    const int32_t n = s->stages, d = s->replicas, placed = n * d;
    int32_t length = 1, x, y;
    if (with_idle) {
        x = below(s, placed);
        y = placed + below(s, s->devices - placed);
    } else {
        if (long_ones && n > 3) length = 1 + below(s, n / 2);
        int32_t one = below(s, n - length + 1), two = below(s, n - length + 1);
        if (one - two < length && two - one < length) two = one;
        x = one * d + below(s, d);
        y = two * d + below(s, d);
    }
    const int32_t above = x / d, under = y / d, within = above == under;
    if (x == y || (within && length == 1 && n == 1)) return cost;
    memcpy(kept, s->row, sizeof(double) * (size_t)(placed + n + n)); /* rows, stages and edges lie in a line */
    const double compute = s->compute;
    for (int32_t i = 0; i < length; i++) {
        const int32_t p = x + i * d, q = y + i * d, one = s->order[p], two = s->order[q];
        if (within) {
            SWAP(int32_t, s->order[p], s->order[q]);
            SWAP(double, s->row[p], s->row[q]);
            continue;
        }
        put(s, p, two);
        s->stage[above + i] = stage_power(s, above + i);
        if (with_idle) {
            s->order[q] = one;
            s->compute += s->computed[two] - s->computed[one];
        } else {
            put(s, q, one);
            s->stage[under + i] = stage_power(s, under + i);
        }
    }
    edges_around(s, above, length);
    if (!with_idle && !within) edges_around(s, under, length);
    const double then = norms(s, s->edge);
    if (then <= limit) return then;
    for (int32_t i = 0; i < length; i++) SWAP(int32_t, s->order[x + i * d], s->order[y + i * d]);
    memcpy(s->row, kept, sizeof(double) * (size_t)(placed + n + n));
    s->compute = compute;
    return cost;
}

/* Returns the cost of `best`. */
API double geotrain_anneal(const anneal_job *job) {
    const int32_t placed = job->stages * job->replicas, n = job->devices, idle = n > placed;
    double *work = job->work, best = INFINITY, heat = job->heat;
    annealing s = {.gradient = job->gradient, .order = job->order, .row = work, .stages = job->stages};
    s.replicas = job->replicas, s.devices = n, s.random = job->seed;
    s.stage = s.row + placed, s.edge = s.stage + job->stages, s.computed = s.edge + job->stages;
    s.linked = s.computed + n;
    double *kept = s.linked + (size_t)n * (size_t)n;
    for (s.power = job->first_power; s.power <= job->last_power; s.power++) {
        double cost = 0;
        for (size_t i = 0; i < (size_t)n * (size_t)n; i++) s.linked[i] = raised(job->activation[i], s.power);
        for (int32_t i = 0; i < n; i++) s.computed[i] = raised(job->compute[i], s.power);
        for (int64_t step = 0; step < job->steps; step++, heat *= job->cool) {
            if (step % 4096 == 0) cost = afresh(&s);
            const double limit = cost - heat * log(uniform(&s)), before = cost;
            const int32_t kind = (int32_t)(draw(&s) >> 60);
            if (kind == 0 && s.stages > 1)
                cost = cross(&s, cost, limit);
            else if (kind == 1 && s.stages > 1)
                cost = reorder(&s, job, cost, limit, kept);
            else
                cost = exchange(&s, cost, limit, kind < 6, kind > 12 && idle, kept);
            if (cost == before && step) continue;
            const double found = true_cost(&s, job, best);
            if (found < best) {
                best = found;
                memcpy(job->best, s.order, sizeof(int32_t) * (size_t)n);
            }
        }
    }
    return best;
}
