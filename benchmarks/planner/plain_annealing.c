/* A plain annealer, to compare with: two devices exchange places, the true cost is what is annealed, evaluated by
 * differences. Temperatures fall geometrically. */
#include <math.h>
#include <stdint.h>
#include <string.h>

static uint64_t draw(uint64_t *random) { /* splitmix64 */
    uint64_t z = *random += 0x9E3779B97F4A7C15u;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
}

/* Moves `steps` times; `order` is changed, and the cheapest cost seen returned.
 * gradient, activation: (n, n); compute: (n); order: (n), the table row by row, then idle devices; work: 2·S·D + 2·S. */
double plain_annealing(int stages, int d, int n, const double *gradient, const double *activation, const double *compute,
                       int32_t *order, double *work, int64_t steps, double hot, double cold, uint64_t random) {
    const int placed = stages * d;
    double *row = work, *kept = work + placed, *edge = work + 2 * placed, best = INFINITY, cost = INFINITY;
    const double cool = pow(cold / hot, 1.0 / (double)steps);
    double heat = hot, kept_edge[4];
    for (int64_t step = -1; step < steps; step++, heat *= cool) {
        int x = 0, y = 0, edges[4], count = 0;
        if (step >= 0) {
            x = (int)(((draw(&random) >> 32) * (uint64_t)placed) >> 32);
            y = (int)(((draw(&random) >> 32) * (uint64_t)n) >> 32);
            if (x == y) continue;
        }
        const int above = x / d, under = y < placed ? y / d : -1, one = order[x], two = order[y];
        order[x] = two, order[y] = one;
        if (step % 4096 == 0 || step < 0) { /* rows anew: differences gather rounding */
            order[x] = one, order[y] = two;
            for (int i = 0; i < placed; i++) {
                row[i] = 0;
                for (int j = i / d * d; j < i / d * d + d; j++) row[i] += gradient[(int64_t)order[i] * n + order[j]];
            }
            order[x] = two, order[y] = one;
        }
        memcpy(kept, row + above * d, sizeof(double) * (size_t)d);
        if (under >= 0) memcpy(kept + d, row + under * d, sizeof(double) * (size_t)d);
        if (above == under) {
            const double swapped = row[x];
            row[x] = row[y], row[y] = swapped;
        } else {
            for (int side = 0; side < (under >= 0 ? 2 : 1); side++) {
                const int cell = side ? y : x, first = cell / d * d;
                const double *in = gradient + (int64_t)order[cell] * n, *out = gradient + (int64_t)(side ? two : one) * n;
                double sum = 0;
                for (int i = first; i < first + d; i++) {
                    sum += in[order[i]];
                    row[i] += in[order[i]] - out[order[i]];
                }
                row[cell] = sum;
            }
        }
        const int around[4] = {above - 1, above, under - 1, under};
        for (int k = 0; k < 4; k++) {
            const int e = around[k];
            int known = e < 0 || e + 1 >= stages;
            for (int c = 0; c < count; c++) known |= edges[c] == e;
            if (!known) edges[count] = e, kept_edge[count++] = edge[e];
        }
        for (int c = 0; c < (step < 0 ? stages - 1 : count); c++) {
            const int e = step < 0 ? c : edges[c];
            edge[e] = 0;
            for (int i = e * d; i < e * d + d; i++) {
                const double link = activation[(int64_t)order[i] * n + order[i + d]];
                edge[e] = link > edge[e] ? link : edge[e];
            }
        }
        double rows = 0, slowest = 0, path = 0;
        for (int i = 0; i < placed; i++) {
            rows = row[i] > rows ? row[i] : rows;
            slowest = compute[order[i]] > slowest ? compute[order[i]] : slowest;
        }
        for (int e = 0; e + 1 < stages; e++) path += edge[e];
        const double then = rows + 2 * path + slowest;
        const double luck = ((double)(draw(&random) >> 11) + 0.5) * 0x1p-53;
        if (step < 0 || then <= cost - heat * log(luck)) {
            cost = then;
            best = then < best ? then : best;
            continue;
        }
        order[x] = one, order[y] = two;
        memcpy(row + above * d, kept, sizeof(double) * (size_t)d);
        if (under >= 0) memcpy(row + under * d, kept + d, sizeof(double) * (size_t)d);
        for (int c = 0; c < count; c++) edge[edges[c]] = kept_edge[c];
    }
    return best;
}
