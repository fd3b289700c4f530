/* What the complete search of placements over classes of devices asks most (geotrain/plan/placement/exact.py): how fast
 * devices of one stage can reach those of the next, the bottleneck of a transport between counts by class, and which
 * stages may follow a beginning. `reference_transport.py` finds the same in numpy, transports by Hall's condition. */
#include "common.h"

enum { MAX_CLASSES = 16 };

typedef struct {
    /* (count, classes), (classes); ranks of links by time, (classes, classes); the highest rank allowed, (count) */
    const int32_t *vectors, *sizes, *rank, *most;
    int32_t *found;  /* (count, count) */
    uint32_t *masks; /* (2 · count) */
    int32_t count, classes, never;
} transport_job;

typedef struct {
    const int32_t *vectors, *sizes, *used, *last; /* (count, classes), (classes), (labels, classes), (labels) */
    const double *edges, *stage, *label_stage, *label_path; /* (count, count), (count), (labels), (labels) */
    int32_t *one, *two, *found;                             /* (room), (room), (1) */
    double limit;
    int32_t count, classes, labels, first, room;
} extend_job;

typedef struct {
    const int32_t *vectors, *sizes, *used, *last; /* as above */
    const double *spare, *over;                   /* (labels), (merges) */
    const int32_t *part;                          /* (merges, classes): the part of the cluster that a class lies in */
    uint8_t *alive;                               /* (labels) */
    int32_t classes, labels, merges, rest, replicas, uses_all;
} possible_job;

typedef struct {
    int32_t supply[MAX_CLASSES], demand[MAX_CLASSES], flow[MAX_CLASSES][MAX_CLASSES];
    int32_t classes, level;
    uint32_t left, right; /* classes seen by the last search for a way */
} transport;

/* Sends one way's worth from class k of the one stage, perhaps by sending others elsewhere; 0 if there is no way. */
static int32_t send(transport *t, const int32_t *rank, int32_t k, int32_t most) {
    t->left |= 1u << k;
    for (int32_t j = 0; j < t->classes; j++) {
        if (t->right >> j & 1 || rank[k * t->classes + j] > t->level) continue;
        t->right |= 1u << j;
        int32_t sent = most < t->demand[j] ? most : t->demand[j];
        t->demand[j] -= sent;
        for (int32_t i = 0; !sent && i < t->classes; i++) {
            if (!t->flow[i][j] || t->left >> i & 1) continue;
            sent = send(t, rank, i, most < t->flow[i][j] ? most : t->flow[i][j]);
            t->flow[i][j] -= sent;
        }
        if (sent) {
            t->flow[k][j] += sent;
            return sent;
        }
    }
    return 0;
}

static int32_t bottleneck(const int32_t *one, const int32_t *two, const int32_t *rank, int32_t k, int32_t most) {
    transport t = {.classes = k};
    for (int32_t i = 0; i < k; i++) { /* no less than the nearest partner of every class */
        int32_t from = one[i] ? most + 1 : 0, to = two[i] ? most + 1 : 0;
        for (int32_t j = 0; j < k; j++) {
            if (two[j] && rank[i * k + j] < from) from = rank[i * k + j];
            if (one[j] && rank[i * k + j] < to) to = rank[i * k + j];
        }
        t.level = from > t.level ? from : t.level;
        t.level = to > t.level ? to : t.level;
    }
    memcpy(t.supply, one, sizeof(int32_t) * (size_t)k);
    memcpy(t.demand, two, sizeof(int32_t) * (size_t)k);
    for (int32_t i = 0; i < k && t.level <= most;) {
        if (!t.supply[i]) {
            i++;
            continue;
        }
        t.left = t.right = 0;
        const int32_t sent = send(&t, rank, i, t.supply[i]);
        t.supply[i] -= sent;
        if (sent) continue;
        int32_t next = most + 1; /* the nearest class that was not reached */
        for (int32_t x = 0; x < k; x++)
            for (int32_t y = 0; y < k && t.left >> x & 1; y++)
                if (two[y] && !(t.right >> y & 1) && rank[x * k + y] < next) next = rank[x * k + y];
        t.level = next;
    }
    return t.level;
}

API void geotrain_transport(const transport_job *job) {
    const int32_t n = job->count, k = job->classes;
    uint32_t *drawn = job->masks, *near = job->masks + n; /* the classes that a stage has, and those it may reach */
    for (int32_t x = 0; x < n; x++) {
        drawn[x] = near[x] = 0;
        for (int32_t i = 0; i < k; i++) {
            if (!job->vectors[(size_t)x * (size_t)k + (size_t)i]) continue;
            drawn[x] |= 1u << i;
            for (int32_t j = 0; j < k; j++) near[x] |= (uint32_t)(job->rank[i * k + j] <= job->most[x]) << j;
        }
    }
    for (int32_t x = 0; x < n; x++) {
        const int32_t *one = job->vectors + (size_t)x * (size_t)k;
        for (int32_t y = 0; y <= x; y++) {
            const int32_t *two = job->vectors + (size_t)y * (size_t)k;
            const int32_t most = job->most[x] < job->most[y] ? job->most[x] : job->most[y];
            int32_t level = job->never, fits = !(drawn[x] & ~near[y]) && !(drawn[y] & ~near[x]);
            for (int32_t i = 0; fits && i < k; i++) fits = one[i] + two[i] <= job->sizes[i];
            if (fits && (level = bottleneck(one, two, job->rank, k, most)) > most) level = job->never;
            job->found[(size_t)x * (size_t)n + (size_t)y] = job->found[(size_t)y * (size_t)n + (size_t)x] = level;
        }
    }
}

/* Appends stages to the beginnings from `first` on, as long as there is room for a whole one's. Writes which beginning
 * and which stage, and how many into `found`; returns the beginning that is the next. */
API int32_t geotrain_extend(const extend_job *job) {
    const int32_t n = job->count, k = job->classes;
    int32_t label = job->first, found = 0;
    for (; label < job->labels && found + n <= job->room; label++) {
        const double *edge = job->edges + (size_t)job->last[label] * (size_t)n;
        const int32_t *used = job->used + (size_t)label * (size_t)k;
        const double own = job->label_stage[label], path = job->label_path[label];
        for (int32_t v = 0; v < n; v++) {
            const double stage = job->stage[v] > own ? job->stage[v] : own;
            if (!(stage + 4 * (path + edge[v]) < job->limit)) continue;
            const int32_t *more = job->vectors + (size_t)v * (size_t)k;
            int32_t fits = 1;
            for (int32_t i = 0; i < k; i++) fits &= used[i] + more[i] <= job->sizes[i];
            if (!fits) continue;
            job->one[found] = label;
            job->two[found++] = v;
        }
    }
    *job->found = found;
    return label;
}

/* Whether `rest` stages, of which only one is unlike the one before, can be made of what is wanted of each part. */
static int one_change(const possible_job *job, const int32_t *have, const int32_t *want) {
    for (int32_t stay = 0; stay < job->rest; stay++) { /* stages like the last one before the only change */
        int32_t each = 0, ok = 1;
        for (int32_t c = 0; ok && c < job->classes; c++) {
            const int32_t then = want[c] - stay * have[c];
            ok = then >= 0 && !(job->uses_all && then % (job->rest - stay));
            each += ok ? then / (job->rest - stay) : 0;
        }
        if (ok && (job->uses_all || each >= job->replicas)) return 1;
    }
    return 0;
}

/* Merges come dearest first. */
static int possible(const possible_job *job, const int32_t *used, const int32_t *last, double spare) {
    double first = 0; /* what the dearest edge to come takes above the least */
    for (int32_t m = 0; m < job->merges && spare > 0; m++) {
        int32_t have[MAX_CLASSES] = {0}, want[MAX_CLASSES] = {0}, wrong = 0;
        for (int32_t i = 0; i < job->classes; i++) {
            const int32_t c = job->part[m * job->classes + i];
            have[c] += last[i];
            want[c] += job->sizes[i] - used[i];
        }
        for (int32_t c = 0; c < job->classes; c++) {
            const int32_t more = want[c] - job->rest * have[c];
            wrong |= job->uses_all ? more != 0 : more < 0;
        }
        if (wrong && first == 0) first = job->over[m];
        if (first >= spare) return 0;
        if (wrong && first + job->over[m] >= spare && !one_change(job, have, want)) return 0;
    }
    return spare > 0;
}

API void geotrain_possible(const possible_job *job) {
    const size_t k = (size_t)job->classes;
    for (int32_t i = 0; i < job->labels; i++)
        job->alive[i] = (uint8_t)possible(job, job->used + (size_t)i * k, job->vectors + (size_t)job->last[i] * k, job->spare[i]);
}
