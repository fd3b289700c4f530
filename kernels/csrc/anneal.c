/* Simulated annealing of a table of stages × pipelines of devices, whose cost geotrain/plan/placement/cost.py defines,
 * in whole units. `reference_anneal.py` says plainly what each turn does, and does the same.
 *
 * In most turns one device looks at all others at once, and changes places with the one with which that seems cheapest,
 * if the temperature allows it. This is a loop over memory, since links are kept in the table's order: where devices
 * change places, rows and columns do. What is looked at is a little less than the cost: a stage costs at least what its
 * newcomer pays. Only what seems cheapest is worked out, and it is hardly ever dearer than the temperature allows.
 *
 * A stage lies in a block of cells, padded to whole vectors: FAR_AWAY is what nobody's links cost. Stages that are put
 * in another order stay in their blocks. Edge e joins stages e − 1 and e; edges 0 and S join nothing and cost nothing. */
#include "common.h"

enum { LANES = 8, FAR_AWAY = 1 << 27, AT_ONE_HEAT = 64, MOST_HEAT = 1 << 26, LUCK = 4096, TURNS = 32 };
enum turn { ONE_DEVICE, TAILS, RUNS, REORDER };
/* Of arrays that do not overlap. */
#define EACH_LANE(k, from, to) _Pragma("GCC ivdep") for (int32_t k = from, k##_end = from + ((to - from) & -LANES); k < k##_end; k++)

typedef struct {
    int32_t *gradient, *activation, *compute; /* (cells, cells) twice, (cells): in the table's order, and changed */
    const double *luck;                       /* (LUCK): exponentially distributed */
    const uint8_t *turns;                     /* (TURNS): their kinds, again and again */
    int32_t *device, *best, *work;            /* (cells): who is where, below 0 nobody; at the cheapest seen; zeros */
    int64_t steps;
    uint64_t seed;
    double heat, cool; /* in units; the factor every AT_ONE_HEAT turns */
    int32_t stages, replicas, idle, wide, cells, shift; /* wide: of a block */
} anneal_job;

typedef struct {
    int32_t link[3], slot[3];
} dearest_three;

typedef struct {
    int32_t *gradient, *activation, *compute, *device;
    int32_t *reach, *row, *most, *at; /* by block: what each device would pay there, and those there pay; the block of a stage */
    int32_t *link, *other, *dear;     /* by edge: links; for each slot the dearest of the other links; the dearest */
    dearest_three *tops;              /* by edge */
    dearest_three rows;               /* the dearest stages' rows, by block */
    int32_t *nobody, *but_above, *but_under, *over, *path_with, *stages_then;
    int32_t stages, d, idle, wide, cells, shift, slowest, path, whose;
    int64_t sum; /* of the stages' dearest rows and of compute: 2^−shift of it is part of what is annealed */
    uint64_t random;
} annealing;

/* The device that looks around: its stage, slot, block and cell; its links, its gradient links; what each would pay in
 * its stage; links of those before and behind it in its pipeline; the dearest other links there. */
typedef struct {
    int32_t u, p, b, x;
    const int32_t *own, *pull, *here, *above, *under;
    int32_t up, down;
} seat;

#define SWAP(x, y)              \
    do {                        \
        const int32_t kept = x; \
        x = y;                  \
        y = kept;               \
    } while (0)

INLINE int32_t max2(int32_t x, int32_t y) { return x > y ? x : y; }
INLINE int32_t min2(int32_t x, int32_t y) { return x < y ? x : y; }

INLINE uint64_t draw(annealing *s) { /* splitmix64 */
    uint64_t z = s->random += 0x9E3779B97F4A7C15u;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
}
INLINE int32_t below(uint64_t bits, int32_t bound) { return (int32_t)(((bits & 0xFFF) * (uint64_t)bound) >> 12); }

INLINE int32_t cell(const annealing *s, int32_t stage, int32_t slot) { return s->at[stage] * s->wide + slot; }
INLINE int32_t *line(int32_t *matrix, int32_t x, int32_t cells) { return matrix + (size_t)x * (size_t)cells; }
INLINE const int32_t *links(const annealing *s, int32_t x) { return line(s->activation, x, s->cells); }
INLINE const int32_t *pulls(const annealing *s, int32_t x) { return line(s->gradient, x, s->cells); }
INLINE int32_t *reach(const annealing *s, int32_t block) { return line(s->reach, block, s->cells); }

INLINE void insert(dearest_three *t, int32_t link, int32_t slot) {
    for (int k = 0; k < 3; k++) {
        const int32_t x = t->link[k], y = t->slot[k], more = link > x;
        t->link[k] = more ? link : x, t->slot[k] = more ? slot : y;
        link = more ? x : link, slot = more ? y : slot;
    }
}
/* the dearest but for those of p and q */
INLINE int32_t but(const dearest_three *t, int32_t p, int32_t q) {
    const int32_t no0 = (t->slot[0] == p) | (t->slot[0] == q), no1 = (t->slot[1] == p) | (t->slot[1] == q);
    return no0 ? (no1 ? t->link[2] : t->link[1]) : t->link[0];
}
static const dearest_three NONE = {{0, 0, 0}, {-1, -1, -1}};

INLINE int64_t total(const annealing *s, int32_t rows, int32_t path, int32_t slowest, int64_t sum) {
    return ((int64_t)(rows + 2 * path + slowest) << s->shift) + sum;
}

/* --------------------------------------------------------------------------------- what is known of the table */

INLINE void set_edge(annealing *s, int32_t e) {
    if (e < 1 || e >= s->stages) return;
    int32_t *link = s->link + e * s->wide, *other = s->other + e * s->wide;
    dearest_three t = NONE;
    for (int32_t p = 0; p < s->d; p++) insert(&t, link[p] = links(s, cell(s, e - 1, p))[cell(s, e, p)], p);
    for (int32_t p = 0; p < s->d; p++) other[p] = but(&t, p, p);
    s->path += t.link[0] - s->dear[e];
    s->dear[e] = t.link[0];
    s->tops[e] = t;
}

INLINE void set_stage(annealing *s, int32_t block) {
    const int32_t first = block * s->wide, *own = reach(s, block) + first;
    int32_t most = 0;
    for (int32_t p = 0; p < s->d; p++) most = max2(most, s->row[first + p] = own[p]);
    s->sum += most - s->most[block];
    s->most[block] = most;
}

INLINE void set_rows(annealing *s) {
    s->rows = NONE;
    for (int32_t b = 0; b < s->stages; b++) insert(&s->rows, s->most[b], b);
}

INLINE void swap_cells(annealing *s, int32_t x, int32_t y) {
    const int32_t cells = s->cells;
    for (int both = 0; both < 2; both++) {
        int32_t *m = both ? s->gradient : s->activation, *restrict one = line(m, x, cells), *restrict two = line(m, y, cells);
        for (int32_t i = 0; i < cells; i++) SWAP(one[i], two[i]);
        for (int32_t i = 0; i < cells; i++, m += cells) SWAP(m[x], m[y]);
    }
    for (int32_t b = 0; b < s->stages; b++) SWAP(reach(s, b)[x], reach(s, b)[y]);
    SWAP(s->compute[x], s->compute[y]);
    SWAP(s->device[x], s->device[y]);
}

/* Devices of different stages change places; block c < 0: with an idle one. */
INLINE void trade(annealing *s, int32_t b, int32_t x, int32_t c, int32_t y) {
    swap_cells(s, x, y);
    const int32_t *came = pulls(s, x), *left = pulls(s, y), cells = s->cells;
    int32_t *restrict here = reach(s, b), *restrict there = c < 0 ? s->path_with : reach(s, c);
    for (int32_t i = 0; i < cells; i++) {
        here[i] += came[i] - left[i];
        there[i] -= came[i] - left[i];
    }
    set_stage(s, b);
    if (c >= 0) set_stage(s, c);
}

/* The dearest row of a block in whose cell x the device of cell y takes the place. */
INLINE int32_t stage_with(const annealing *s, int32_t block, int32_t x, int32_t y) {
    const int32_t first = block * s->wide, p = x - first, own = reach(s, block)[y] - pulls(s, y)[x];
    const int32_t *row = s->row + first, *came = pulls(s, y) + first, *left = pulls(s, x) + first;
    int32_t most = 0;
    EACH_LANE(k, 0, s->wide) {
        const int32_t then = row[k] + came[k] - left[k];
        most = max2(most, k == p ? own : then);
    }
    return most;
}

/* ------------------------------------------------------------------------------- one device looks at all others */

/* Into but: for each slot, the dearest link of an edge but for that slot's and p's. */
INLINE void but_slots(const annealing *s, int32_t e, int32_t p, int32_t *found) {
    const dearest_three t = s->tops[e];
    EACH_LANE(k, 0, s->wide) found[k] = but(&t, p, k);
}

/* In the same stage: the pipelines that they belong to are exchanged. */
INLINE void look_within(const annealing *s, const seat *me, int64_t limit) {
    const int32_t u = me->u, first = me->b * s->wide;
    const int32_t *to_up = u ? me->own + cell(s, u - 1, 0) : s->nobody;
    const int32_t *to_down = u + 1 < s->stages ? me->own + cell(s, u + 1, 0) : s->nobody;
    const int32_t *above = me->above + first, *under = me->under + first;
    int32_t *over = s->over + u * s->wide;
    const int32_t base = s->path - s->dear[u] - s->dear[u + 1];
    const int32_t room = (int32_t)((limit - s->sum) >> s->shift) - s->slowest - s->rows.link[0];
    EACH_LANE(k, 0, s->wide) {
        const int32_t before = max2(max2(to_up[k], above[k]), s->but_above[k]);
        const int32_t behind = max2(max2(to_down[k], under[k]), s->but_under[k]);
        over[k] = 2 * (base + before + behind) - room;
    }
    over[me->p] = FAR_AWAY;
}

/* In a stage that no edge joins with its own. */
INLINE void look_far(const annealing *s, const seat *me, int32_t v, int64_t limit) {
    const int32_t c = s->at[v], first = c * s->wide, shift = s->shift, up = me->up, down = me->down;
    const int32_t *to_up = v ? me->own + cell(s, v - 1, 0) : s->nobody;
    const int32_t *to_down = v + 1 < s->stages ? me->own + cell(s, v + 1, 0) : s->nobody;
    const int32_t *above = me->above + first, *under = me->under + first, *pull = me->pull + first, *here = me->here + first;
    const int32_t *other_up = s->other + v * s->wide, *other_down = other_up + s->wide;
    int32_t *over = s->over + v * s->wide, *path_with = s->path_with + v * s->wide;
    const int32_t others = but(&s->rows, me->b, c), there = reach(s, c)[me->x];
    const int32_t base = s->path - s->dear[me->u] - s->dear[me->u + 1] - s->dear[v] - s->dear[v + 1];
    const int32_t room = (int32_t)((limit - s->sum + s->most[me->b] + s->most[c]) >> shift) - s->slowest;
    EACH_LANE(k, 0, s->wide) {
        const int32_t mine = max2(above[k], up) + max2(under[k], down);
        const int32_t theirs = max2(to_up[k], other_up[k]) + max2(to_down[k], other_down[k]);
        const int32_t path = base + mine + theirs, one = here[k] - pull[k], two = there - pull[k];
        path_with[k] = path;
        over[k] = max2(max2(one, two), others) + 2 * path + ((one + two) >> shift) - room;
    }
}

/* In the stage before or behind its own: the edge between changes in two slots, or not at all. */
INLINE void look_near(const annealing *s, const seat *me, int32_t v, int64_t limit) {
    const int32_t c = s->at[v], first = c * s->wide, shift = s->shift, behind = v > me->u, beyond = behind ? v + 1 : v - 1;
    const int32_t *to_far = beyond >= 0 && beyond < s->stages ? me->own + cell(s, beyond, 0) : s->nobody;
    const int32_t *to_near = me->own + me->b * s->wide;
    const int32_t *far = (behind ? me->above : me->under) + first, *near = (behind ? me->under : me->above) + first;
    const int32_t *other_far = s->other + (behind ? v + 1 : v) * s->wide, other = behind ? me->up : me->down;
    const int32_t *pull = me->pull + first, *here = me->here + first;
    int32_t *over = s->over + v * s->wide, *path_with = s->path_with + v * s->wide;
    int32_t *shared = behind ? s->but_under : s->but_above;
    shared[me->p] = max2(shared[me->p], me->own[first + me->p]); /* neighbours in a pipeline keep their link */
    const int32_t others = but(&s->rows, me->b, c), there = reach(s, c)[me->x], e = max2(me->u, v);
    const int32_t base = s->path - s->dear[e - 1] - s->dear[e] - s->dear[e + 1];
    const int32_t room = (int32_t)((limit - s->sum + s->most[me->b] + s->most[c]) >> shift) - s->slowest;
    EACH_LANE(k, 0, s->wide) {
        const int32_t between = max2(max2(near[k], to_near[k]), shared[k]);
        const int32_t path = base + between + max2(far[k], other) + max2(to_far[k], other_far[k]);
        const int32_t one = here[k] - pull[k], two = there - pull[k];
        path_with[k] = path;
        over[k] = max2(max2(one, two), others) + 2 * path + ((one + two) >> shift) - room;
    }
}

INLINE void look_idle(const annealing *s, const seat *me, int64_t limit) {
    const int32_t others = but(&s->rows, me->b, me->b), shift = s->shift, up = me->up, down = me->down;
    const int32_t still = s->compute[me->x] < s->slowest ? s->slowest : 0;
    const int32_t base = s->path - s->dear[me->u] - s->dear[me->u + 1];
    const int32_t room = (int32_t)((limit - s->sum + s->most[me->b] + s->compute[me->x]) >> shift);
    EACH_LANE(k, s->stages * s->wide, s->cells) {
        const int32_t path = base + max2(me->above[k], up) + max2(me->under[k], down), one = me->here[k] - me->pull[k];
        s->path_with[k] = path;
        s->over[k] = max2(one, others) + 2 * path + max2(s->compute[k], still) + ((one + s->compute[k]) >> shift) - room;
    }
}

INLINE int32_t slowest_with(const annealing *s, int32_t x, int32_t y) {
    int32_t slowest = s->compute[y];
    if (s->compute[x] < s->slowest) return max2(slowest, s->slowest);
    for (int32_t i = 0; i < s->stages * s->wide; i++) slowest = i == x ? slowest : max2(slowest, s->compute[i]);
    return slowest;
}

/* The cell of what was looked at there: stages lie in their order, idle devices behind them. */
INLINE int32_t at_place(const annealing *s, int32_t f) {
    return f / s->wide < s->stages ? cell(s, f / s->wide, f % s->wide) : f;
}

/* Whether it makes no difference which of two devices lies where. */
INLINE int alike(const annealing *s, int32_t x, int32_t y) {
    int32_t unlike = s->compute[x] ^ s->compute[y];
    const int32_t *one = links(s, x), *two = links(s, y), *pull_one = pulls(s, x), *pull_two = pulls(s, y);
    EACH_LANE(k, 0, s->cells) {
        const int32_t here = (one[k] ^ two[k]) | (pull_one[k] ^ pull_two[k]);
        unlike |= k == x || k == y ? 0 : here;
    }
    return !unlike;
}

/* Trades with what lies at f, if that costs at most the limit. */
INLINE int take(annealing *s, const seat *me, int32_t f, int64_t limit) {
    const int32_t v = f / s->wide, idle = v >= s->stages, c = idle ? -1 : s->at[v], x = me->x;
    const int32_t y = at_place(s, f);
    if (c == me->b) {
        swap_cells(s, x, y);
        SWAP(s->row[x], s->row[y]);
    } else {
        const int32_t others = but(&s->rows, me->b, idle ? me->b : c), slowest = idle ? slowest_with(s, x, y) : s->slowest;
        const int32_t one = stage_with(s, me->b, x, y), two = idle ? 0 : stage_with(s, c, y, x);
        const int64_t more = idle ? s->compute[y] - s->compute[x] : two - s->most[c];
        const int64_t sum = s->sum + one - s->most[me->b] + more;
        if (total(s, max2(max2(one, two), others), s->path_with[f], slowest, sum) > limit) return 0;
        if (idle) s->sum += more;
        s->slowest = slowest;
        trade(s, me->b, x, c, y);
        set_rows(s);
    }
    set_edge(s, me->u), set_edge(s, me->u + 1);
    if (!idle && c != me->b) set_edge(s, v), set_edge(s, v + 1);
    return 1;
}

INLINE int one_device(annealing *s, int32_t u, int32_t p, uint64_t bits, int64_t limit) {
    const int32_t S = s->stages, b = s->at[u], x = b * s->wide + p, placed = S * s->d;
    const seat me = {
        u, p, b, x, links(s, x), pulls(s, x), reach(s, b),
        u ? links(s, cell(s, u - 1, p)) : s->nobody, u + 1 < S ? links(s, cell(s, u + 1, p)) : s->nobody,
        s->other[u * s->wide + p], s->other[(u + 1) * s->wide + p],
    };
    but_slots(s, u, p, s->but_above);
    but_slots(s, u + 1, p, s->but_under);
    for (int32_t v = 0; v < u - 1; v++) look_far(s, &me, v, limit);
    for (int32_t v = u + 2; v < S; v++) look_far(s, &me, v, limit);
    look_within(s, &me, limit);
    if (u) look_near(s, &me, u - 1, limit);
    if (u + 1 < S) look_near(s, &me, u + 1, limit);
    if (s->idle) look_idle(s, &me, limit);
    int32_t least = FAR_AWAY;
    EACH_LANE(k, 0, s->cells) least = min2(least, s->over[k]);
    if (least > 0) return 0;
    const int32_t from = (int32_t)(((bits & 0xFFFFFF) * (uint64_t)(placed + s->idle)) >> 24);
    int32_t f = from < placed ? from / s->d * s->wide + from % s->d : S * s->wide + from - placed;
    for (int32_t chosen = 0; chosen >= 0;) {
        chosen = -1, least = 1;
        for (int32_t i = 0; i < s->cells; i++, f = f + 1 < s->cells ? f + 1 : 0)
            if (s->over[f] < least && !alike(s, x, at_place(s, f))) chosen = f, least = s->over[f];
        if (chosen >= 0 && take(s, &me, chosen, limit)) return 1;
        if (chosen >= 0) s->over[chosen] = FAR_AWAY;
    }
    return 0;
}

/* --------------------------------------------------------------------------------------------- other turns */

/* Pipelines p and q change places in stages from … to. */
INLINE void cross(annealing *s, int32_t from, int32_t to, int32_t p, int32_t q) {
    for (int32_t r = from; r <= to; r++) {
        swap_cells(s, cell(s, r, p), cell(s, r, q));
        SWAP(s->row[cell(s, r, p)], s->row[cell(s, r, q)]);
    }
    for (int32_t e = from; e <= to + 1; e++) set_edge(s, e);
}

/* Pipeline p looks whether to go on from stage e as another does: only one edge changes. The shorter ends move. */
INLINE int tails(annealing *s, int32_t e, int32_t p, int32_t q, int64_t limit) {
    const int32_t *one = links(s, cell(s, e - 1, p)) + cell(s, e, 0), *two = links(s, cell(s, e, p)) + cell(s, e - 1, 0);
    const int32_t room = (int32_t)((limit - s->sum) >> s->shift) - s->slowest - s->rows.link[0];
    const int32_t base = s->path - s->dear[e];
    int32_t least = FAR_AWAY;
    but_slots(s, e, p, s->but_above);
    EACH_LANE(k, 0, s->wide) {
        const int32_t then = 2 * (base + max2(max2(one[k], two[k]), s->but_above[k])) - room;
        s->over[k] = k == p ? FAR_AWAY : then;
        least = min2(least, s->over[k]);
    }
    if (least > 0) return 0;
    while (s->over[q] > least) q = q + 1 < s->d ? q + 1 : 0;
    if (2 * e > s->stages)
        cross(s, e, s->stages - 1, p, q);
    else
        cross(s, 0, e - 1, p, q);
    return 1;
}

/* Pipelines p and q change places in stages u …: the edges before and behind change. */
INLINE int run_within(annealing *s, int32_t u, int32_t p, int32_t q, int32_t length, int64_t limit) {
    int32_t path = s->path;
    for (int32_t e = u; e <= u + length; e += length) {
        if (e < 1 || e >= s->stages) continue;
        const int32_t l = max2(links(s, cell(s, e - 1, p))[cell(s, e, q)], links(s, cell(s, e - 1, q))[cell(s, e, p)]);
        path += max2(l, but(s->tops + e, p, q)) - s->dear[e];
    }
    if (p == q || total(s, s->rows.link[0], path, s->slowest, s->sum) > limit) return 0;
    cross(s, u, u + length - 1, p, q);
    return 1;
}

/* What the path costs if pipeline p's stages u … and q's v … change places, u + length <= v. */
INLINE int32_t path_with_runs(const annealing *s, int32_t u, int32_t p, int32_t v, int32_t q, int32_t length) {
    const int32_t mine = cell(s, u, p), mine_last = cell(s, u + length - 1, p), meet = u + length == v;
    const int32_t theirs = cell(s, v, q), theirs_last = cell(s, v + length - 1, q);
    int32_t path = s->path;
    for (int32_t i = 0; i <= length; i++) {
        const int32_t e = u + i, f = v + i; /* edge e gets what f has, and the reverse */
        int32_t at_e = s->link[f * s->wide + q], at_f = s->link[e * s->wide + p];
        if (i == 0 && e) at_e = links(s, cell(s, e - 1, p))[theirs];
        if (i == 0) at_f = links(s, cell(s, f - 1, q))[mine];
        if (i == length) at_e = links(s, cell(s, e, p))[theirs_last];
        if (i == length && f < s->stages) at_f = links(s, cell(s, f, q))[mine_last];
        if (e && !(meet && i == length)) path += max2(at_e, s->other[e * s->wide + p]) - s->dear[e];
        if (f < s->stages && !(meet && i == 0)) path += max2(at_f, s->other[f * s->wide + q]) - s->dear[f];
    }
    if (!meet) return path;
    int32_t between = links(s, theirs_last)[mine]; /* in one pipeline theirs comes first now */
    if (p != q) between = max2(links(s, theirs_last)[cell(s, v, p)], links(s, cell(s, v - 1, q))[mine]);
    return path + max2(between, but(s->tops + v, p, q)) - s->dear[v];
}

INLINE int runs(annealing *s, int32_t u, int32_t p, int32_t v, int32_t q, int32_t length, int64_t limit) {
    const int32_t path = path_with_runs(s, u, p, v, q, length);
    int32_t rows = 0;
    int64_t sum = s->sum;
    for (int32_t r = 0; r < s->stages; r++)
        if (r < u || (r >= u + length && r < v) || r >= v + length) rows = max2(rows, s->most[s->at[r]]);
    for (int32_t i = 0; i < length; i++) {
        if (total(s, rows, path, s->slowest, 0) > limit) return 0;
        const int32_t b = s->at[u + i], c = s->at[v + i], x = b * s->wide + p, y = c * s->wide + q;
        const int32_t one = stage_with(s, b, x, y), two = stage_with(s, c, y, x);
        sum += one + two - s->most[b] - s->most[c];
        rows = max2(rows, max2(one, two));
    }
    if (total(s, rows, path, s->slowest, sum) > limit) return 0;
    for (int32_t i = 0; i < length; i++) trade(s, s->at[u + i], cell(s, u + i, p), s->at[v + i], cell(s, v + i, q));
    for (int32_t i = 0; i <= length; i++) set_edge(s, u + i), set_edge(s, v + i);
    set_rows(s);
    return 1;
}

INLINE int32_t edge_between(const annealing *s, int32_t one, int32_t two) {
    int32_t most = 0;
    for (int32_t p = 0; p < s->d; p++) most = max2(most, links(s, cell(s, one, p))[cell(s, two, p)]);
    return most;
}

/* Stages x … y are turned around, or moved to stand behind z of the others. */
INLINE int reorder(annealing *s, int32_t x, int32_t y, int32_t z, int turned, int64_t limit) {
    const int32_t n = s->stages;
    int32_t *then = s->stages_then, count = 0, path = 0;
    if (x > y) SWAP(x, y);
    z %= n - (y - x);
    for (int32_t i = 0, others = 0; i <= n; i++) {
        if (turned && i < n) then[count++] = i < x || i > y ? i : x + y - i;
        if (turned || (i >= x && i <= y)) continue;
        if (others++ == z)
            for (int32_t j = x; j <= y; j++) then[count++] = j;
        if (i < n) then[count++] = i;
    }
    for (int32_t e = 1; e < n; e++) {
        const int32_t one = then[e - 1], two = then[e];
        path += two == one + 1 ? s->dear[two] : one == two + 1 ? s->dear[one] : edge_between(s, one, two);
    }
    if (total(s, s->rows.link[0], path, s->slowest, s->sum) > limit) return 0;
    for (int32_t i = 0; i < n; i++) then[i] = s->at[then[i]];
    memcpy(s->at, then, sizeof(int32_t) * (size_t)n);
    for (int32_t e = 1; e < n; e++) set_edge(s, e);
    return 1;
}

INLINE int turn(annealing *s, enum turn kind, int64_t limit, uint64_t z) {
    const int32_t S = s->stages, d = s->d;
    if (kind == ONE_DEVICE) {
        s->whose = s->whose + 1 < S ? s->whose + 1 : 0;
        return one_device(s, s->whose, below(z >> 24, d), z >> 36, limit);
    }
    if (kind == TAILS) return tails(s, 1 + below(z >> 12, S - 1), below(z >> 24, d), below(z >> 36, d), limit);
    if (kind == REORDER)
        return reorder(s, below(z >> 12, S), below(z >> 24, S), below(z >> 36, S), (int)(z >> 63), limit);
    const uint64_t more = draw(s);
    const int32_t length = 1 + below(z >> 12, S / 2), p = below(z >> 24, d), q = below(z >> 36, d);
    const int32_t one = below(more, S - length + 1), two = below(more >> 12, S - length + 1);
    const int32_t u = min2(one, two), v = max2(one, two);
    return v - u < length ? run_within(s, u, p, q, length, limit) : runs(s, u, p, v, q, length, limit);
}

INLINE annealing begin(const anneal_job *job) {
    const int32_t S = job->stages, wide = job->wide, cells = job->cells;
    annealing s = {.gradient = job->gradient, .activation = job->activation, .compute = job->compute};
    s.device = job->device, s.random = job->seed, s.rows = NONE;
    s.stages = S, s.d = job->replicas, s.idle = job->idle, s.wide = wide, s.cells = cells, s.shift = job->shift;
    int32_t *free = job->work; /* (cells · (S + 3) + wide · (3 S + 4) + 10 S + 7) */
    s.reach = free, free += S * cells;
    s.nobody = free, s.over = s.nobody + cells, s.path_with = s.over + cells, free += 3 * cells;
    s.row = free, s.link = s.row + S * wide, s.other = s.link + (S + 1) * wide, free += (3 * S + 2) * wide;
    s.but_above = free, s.but_under = s.but_above + wide, free += 2 * wide;
    s.most = free, s.at = s.most + S, s.stages_then = s.at + S, s.dear = s.stages_then + S, free += 4 * S + 1;
    s.tops = (dearest_three *)free;
    for (int32_t e = 0; e <= S; e++) s.tops[e] = NONE;
    for (int32_t b = 0; b < S; b++) {
        s.at[b] = b;
        for (int32_t p = 0; p < s.d; p++) {
            const int32_t x = b * wide + p, *pull = pulls(&s, x);
            for (int32_t i = 0; i < cells; i++) reach(&s, b)[i] += pull[i];
            s.sum += s.compute[x];
            s.slowest = max2(s.slowest, s.compute[x]);
        }
        for (int32_t i = 0; i < cells; i++) reach(&s, b)[i] = s.device[i] < 0 ? FAR_AWAY : reach(&s, b)[i];
    }
    for (int32_t i = 0; i < cells; i++) s.nobody[i] = s.device[i] < 0 ? FAR_AWAY : 0;
    for (int32_t b = 0; b < S; b++) set_stage(&s, b);
    for (int32_t e = 1; e < S; e++) set_edge(&s, e);
    set_rows(&s);
    return s;
}

CLONES API void geotrain_anneal(const anneal_job *job) {
    const int32_t S = job->stages, wide = job->wide;
    annealing s = begin(job);
    double heat = job->heat;
    int64_t best = INT64_MAX;
    for (int64_t step = 0; step < job->steps; step++) {
        if (step % AT_ONE_HEAT == 0) heat *= job->cool;
        const uint64_t z = draw(&s);
        const double more = heat * job->luck[z % LUCK];
        const int64_t cost = total(&s, s.rows.link[0], s.path, s.slowest, s.sum);
        const int64_t limit = cost + ((int64_t)(more < MOST_HEAT ? more : MOST_HEAT) << s.shift);
        if (!turn(&s, job->turns[step % TURNS], limit, z) && step) continue;
        const int64_t now = s.rows.link[0] + 2 * (int64_t)s.path + s.slowest;
        if (now >= best) continue;
        best = now;
        memcpy(job->best, s.device, sizeof(int32_t) * (size_t)job->cells);
        for (int32_t r = 0; r < S; r++)
            memcpy(job->best + r * wide, s.device + s.at[r] * wide, sizeof(int32_t) * (size_t)wide);
    }
}
