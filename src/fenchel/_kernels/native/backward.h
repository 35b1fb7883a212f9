// Backward. With g_i = <dO, v_i> and r = dp/ds on the support,
//   ds_i = r_i (g_i - sum r g / sum r),  dq = sum ds_i k_i,  dk_i += ds_i q,  dv_i += p_i dO.
// A block of queries whose supports were saved works on them alone. Supports that had no room are found again from the
// thresholds, the same to the bit; where they hold most of the keys, dense tiles are faster.
//
// What a row adds is a sum over its support, whichever way it goes: NaN and infinity reach the keys of that support and
// no others. A row without an answer has no support, and makes all keys in its range NaN, as a dense product would.

// Derivatives in the terms of a score, of one head and one part: null where nobody asks.
template <class T>
struct Terms {
    T *relative = nullptr, *relative_log_mass = nullptr;  // at key - query
    T *of_key = nullptr, *of_key_log_mass = nullptr;      // at the key

    void enter(const Sequence& s, std::int64_t h, std::int64_t part, const AttentionGradient& out) {
        const std::int64_t position = part * s.positions() + s.position(h) + s.queries - 1;
        const std::int64_t key = part * s.key_rows(s.p.heads) + s.key_row_of(h, s.p.heads, 0);
        relative = at(out.relative, position);
        relative_log_mass = at(out.relative_log_mass, position);
        of_key = at(out.of_key, key);
        of_key_log_mass = at(out.of_key_log_mass, key);
    }
    static T* at(void* data, std::int64_t start) { return data ? static_cast<T*>(data) + start : nullptr; }

    bool of_mass() const { return relative_log_mass || of_key_log_mass; }
    void add_score(std::int64_t query, std::int64_t key, T x) {
        if (relative) relative[key - query] += x;
        if (of_key) of_key[key] += x;
    }
    void add_log_mass(std::int64_t query, std::int64_t key, T x) {
        if (relative_log_mass) relative_log_mass[key - query] += x;
        if (of_key_log_mass) of_key_log_mass[key] += x;
    }
};

template <class T>
struct Backward {
    const AttentionProblem& p;
    const AttentionGradient& out;
    Scores<T> scores;
    Terms<T> terms;
    Panels<T> key_panels, value_panels;
    Rows<T> keys, values, queries, gradients;
    Buffer<T> key_sum, value_sum, query_sum, wide_distance, wide_gain, cap_slopes;
    Buffer<T> distance, mass, weight, slope, gain, recalled_distance;
    Buffer<std::int32_t> recalled_key;
    std::int64_t wide, value_wide, ld = 0;
    bool packed = false, finite_keys = true, finite_values = true;

    static constexpr std::int64_t kGroup = 4;   // blocks of queries worked on together
    static constexpr std::int64_t kDense = 5;   // one key in so many carries weight: tiles are faster
    std::int64_t lines = 0, entries = 0, recalled = 0;
    Range seen[kGroup * kBlock];

    Backward(const AttentionProblem& problem, const AttentionGradient& gradient)
        : p(problem), out(gradient), scores(problem) {
        wide = padded(p.dim, kColumns<T>);
        value_wide = padded(p.value_dim, kColumns<T>);
    }

    std::int64_t repeats() const { return p.heads / p.kv_heads; }

    // How many parts a sequence has depends on itself alone.
    std::int64_t parts(const Sequence& s) const {
        return std::max<std::int64_t>(1, std::min(out.parts, s.blocks() * repeats() / 2));
    }

    // A fixed share of the blocks of queries that read this key head.
    void run(const Sequence& s, std::int64_t kv, std::int64_t part) {
        if (part >= parts(s)) return;
        ld = padded(s.keys, kColumns<T>) + kColumns<T>;  // with room for the sink
        keys.take(p.key, s.batch, kv, s.first_key, s.keys, p.dim, T(1));
        values.take(p.value, s.batch, kv, s.first_key, s.keys, p.value_dim, T(1));
        std::memset(key_sum.reserve(ld * wide), 0, ld * wide * sizeof(T));
        std::memset(value_sum.reserve(ld * value_wide), 0, ld * value_wide * sizeof(T));
        packed = false;
        const std::int64_t blocks = s.blocks(), all = blocks * repeats(), stop = all * (part + 1) / parts(s);
        for (std::int64_t k = all * part / parts(s); k < stop;) {
            const std::int64_t h = kv * repeats() + k / blocks, first = k % blocks;
            const std::int64_t n = std::min({kGroup, blocks - first, stop - k});
            scores.enter(s, h);
            terms.enter(s, h, part, out);
            group(s, h, first, n);
            k += n;
        }
        const std::int64_t number = part * s.key_rows(p.kv_heads) + s.key_row(kv, 0);
        deliver(s, key_sum.get(), wide, p.dim, static_cast<T*>(out.key) + number * p.dim);
        deliver(s, value_sum.get(), value_wide, p.value_dim, static_cast<T*>(out.value) + number * p.value_dim);
    }

    static void deliver(const Sequence& s, const T* from, std::int64_t from_ld, std::int64_t columns, T* to) {
        for (std::int64_t i = 0; i < s.keys; ++i, from += from_ld, to += columns)
            std::memcpy(to, from, columns * sizeof(T));
    }

    struct Place {
        const Sequence& s;
        std::int64_t h, first, rows, number;  // number: of the first row among all
    };

    // Blocks of one head, worked on together so that keys are fetched once for all of them.
    void group(const Sequence& s, std::int64_t h, std::int64_t block, std::int64_t n) {
        const std::int64_t first = block * kBlock, rows = std::min((block + n) * kBlock, s.queries) - first;
        const Place at{s, h, first, rows, s.row(h, first)};
        queries.take(p.query, s.batch, h, s.first_query + first, rows, p.dim, T(p.scale));
        gradients.take(out.output, s.batch, h, s.first_query + first, rows, p.value_dim, T(1));
        std::memset(query_sum.reserve(kGroup * kBlock * wide), 0, rows * wide * sizeof(T));
        const Range near = scores.near();
        for (std::int64_t i = 0; i < rows; ++i) seen[i] = scores.visible(first + i, near);
        lines = entries = recalled = 0;
        std::int64_t total = 0;
        for (std::int64_t i = 0; i < rows; ++i) {
            const std::int64_t count = p.count[at.number + i];
            if (count < 0 || count > seen[i].size() + scores.has_sink()) throw Foreign();
            total += count;
        }
        recalled_key.reserve(total + 64);
        recalled_distance.reserve(total + 64);
        for (std::int64_t k = 0; k < n; ++k) {
            const std::int64_t from = k * kBlock, to = std::min(from + kBlock, rows), pool = s.block(h, block + k) * p.capacity;
            std::int64_t area = 0;
            total = 0;
            for (std::int64_t i = from; i < to; ++i) {
                total += p.count[at.number + i];
                area += seen[i].size();
            }
            if (total <= s.capacity()) {
                enlist(at, from, to, p.saved_key + pool, static_cast<const T*>(p.saved_distance) + pool);
                continue;
            }
            pack(s);
            const bool tiles = kDense * total >= area && tiles_are_safe(from, to);
            if (tiles || !recall(at, from, to, wide_distance.reserve(kBlock * ld))) dense(at, from, to);
        }
        sparse(at);
        const T* dq = query_sum.get();
        for (std::int64_t i = 0; i < rows; ++i) {
            T* to = static_cast<T*>(out.query) + (at.number + i) * p.dim;
            for (std::int64_t j = 0; j < p.dim; ++j) to[j] = T(p.scale) * dq[i * wide + j];
        }
    }

    Family<T> family(const Place& at, std::int64_t i) const {
        return Family<T>(static_cast<const double*>(p.eps.data)[p.eps.at(at.s.batch, at.h, at.s.first_query + at.first + i)]);
    }

    bool answered(const Place& at, std::int64_t i) const {
        return p.offset[2 * (at.number + i) + 1] == p.offset[2 * (at.number + i) + 1];
    }
    // A row without an answer makes every derivative it touches NaN.
    bool unanswered(const Place& at, std::int64_t i) {
        if (answered(at, i)) return false;
        const T nan = std::numeric_limits<T>::quiet_NaN();
        std::fill_n(query_sum.get() + i * wide, wide, nan);
        std::fill_n(key_sum.get() + seen[i].from * wide, seen[i].size() * wide, nan);
        std::fill_n(value_sum.get() + seen[i].from * value_wide, seen[i].size() * value_wide, nan);
        for (double* of_rows : {out.eps, out.sink, out.sink_log_mass})
            if (of_rows) of_rows[at.number + i] = nan;
        for (void* of_keys : {out.scores, out.log_mass})
            if (of_keys) std::fill_n(wide_entry(of_keys, at, i), p.keys, nan);
        for (std::int64_t key = seen[i].from; key < seen[i].to; ++key) {
            terms.add_score(at.first + i, key, nan);
            terms.add_log_mass(at.first + i, key, nan);
        }
        return true;
    }

    // ---- on the saved support

    struct Line {  // a row and its entries
        std::int64_t row, count, start;
        const std::int32_t* key;
        const T* distance;
        std::int64_t sink;  // entries that are no key: the first, or none
        std::int64_t next;  // entry to be visited
    };

    void enlist(const Place& at, std::int64_t from, std::int64_t to, const std::int32_t* key, const T* far) {
        for (std::int64_t i = from; i < to; ++i) {
            const std::int64_t n = p.count[at.number + i];
            if (!unanswered(at, i) && n > 0) {
                const std::int64_t sink = scores.has_sink() && key[0] == -1;
                check(at.s, n - sink, key + sink);
                line[lines++] = {i, n, entries, key, far, sink, 0};
                entries += n;
            }
            key += n;
            far += n;
        }
    }

    // What another call saved would lead outside of these keys.
    static void check(const Sequence& s, std::int64_t n, const std::int32_t* key) {
        bool inside = true;
        for (std::int64_t e = 0; e < n; ++e) inside &= key[e] >= 0 && key[e] < s.keys;
        if (!inside) throw Foreign();
    }

    Line line[kGroup * kBlock];

    // Few enough keys to stay in the cache, enough for several entries of a row.
    std::int64_t chunk_of_keys(std::int64_t span) const {
        std::int64_t near = 256;
        while (near < 1024 && near * entries < 8 * span * lines) near *= 2;
        return near;
    }

    // visit(line, entries from, to) for every row, keys in chunks.
    template <class Visit>
    void sweep(Visit&& visit) {
        Range all{p.keys, 0};
        for (std::int64_t i = 0; i < lines; ++i) {
            Line& l = line[i];
            l.next = l.sink;
            if (l.count == l.sink) continue;
            all.from = std::min<std::int64_t>(all.from, l.key[l.sink]);
            all.to = std::max<std::int64_t>(all.to, l.key[l.count - 1] + 1);
        }
        if (all.empty()) return;
        const std::int64_t near = chunk_of_keys(all.size());
        for (std::int64_t end = all.from + near; end < all.to + near; end += near)
            for (std::int64_t i = 0; i < lines; ++i) {
                Line& l = line[i];
                const std::int64_t from = l.next;
                while (l.next < l.count && l.key[l.next] < end) ++l.next;
                if (l.next > from) visit(l, from, l.next);
            }
    }

    void sparse(const Place& at) {
        T* g = gain.reserve(entries + 64);
        T* w = weight.reserve(entries + 64);
        for (std::int64_t i = 0; i < lines; ++i) g[line[i].start] = 0;  // the sink's value
        sweep([&](const Line& l, std::int64_t from, std::int64_t to) {
            dots(to - from, l.key + from, gradients.row(l.row), values, value_wide, g + l.start + from);
        });
        for (std::int64_t i = 0; i < lines; ++i) sparse_row(at, line[i], w + line[i].start, g + line[i].start);
        sweep([&](const Line& l, std::int64_t from, std::int64_t to) {
            const std::int64_t n = to - from, e = l.start + from;
            gather(n, g + e, l.key + from, keys, wide, query_sum.get() + l.row * wide);
            scatter(n, g + e, l.key + from, queries.row(l.row), wide, key_sum.get());
            scatter(n, w + e, l.key + from, gradients.row(l.row), value_wide, value_sum.get());
        });
    }

    // Gains become ds, and w the weights as the values saw them.
    void sparse_row(const Place& at, const Line& l, T* w, T* g) {
        const std::int64_t n = l.count, query = at.first + l.row;
        const Family<T> f = family(at, l.row);
        Candidates<T> c{distance.reserve(n + 64), const_cast<std::int32_t*>(l.key), nullptr, n};
        std::memcpy(c.score, l.distance, n * sizeof(T));
        if (scores.has_mass()) {
            c.mass = mass.reserve(n + 64);
            for (std::int64_t e = 0; e < n; ++e) c.mass[e] = scores.mass(query, l.key[e]);
        }
        c.pad();
        T* r = slope.reserve(n + 64);
        weights(f, c, w, r);
        const Dropout dropout(at.s, at.h, query);
        if (dropout.active())
            for (std::int64_t e = 0; e < n; ++e) g[e] *= dropout.operator()<T>(l.key[e]);
        const double mean = centre(n, r, g);
        if (out.eps) out.eps[at.number + l.row] = eps_slope(f, n, c.score, w, g, mean);
        if (out.log_mass)
            for (std::int64_t e = l.sink; e < n; ++e) wide_entry(out.log_mass, at, l.row)[l.key[e]] = w[e] * (g[e] - T(mean));
        if (out.sink_log_mass && l.sink) out.sink_log_mass[at.number + l.row] = double(w[0]) * (double(g[0]) - mean);
        if (terms.of_mass())
            for (std::int64_t e = l.sink; e < n; ++e) terms.add_log_mass(query, l.key[e], w[e] * (g[e] - T(mean)));
        differentiate(f.steep() || c.mass, n, r, g, mean);
        if (out.scores)
            for (std::int64_t e = l.sink; e < n; ++e) wide_entry(out.scores, at, l.row)[l.key[e]] = g[e];
        if (out.sink && l.sink) out.sink[at.number + l.row] = double(g[0]);
        if (terms.relative || terms.of_key)
            for (std::int64_t e = l.sink; e < n; ++e) terms.add_score(query, l.key[e], g[e]);
        if (p.softcap > 0) {
            T* product = slope.get();  // no longer needed
            dots(n - l.sink, l.key + l.sink, queries.row(l.row), keys, wide, product + l.sink);
            for (std::int64_t e = l.sink; e < n; ++e) g[e] *= scores.cap_slope(product[e]);
        }
        if (dropout.active())
            for (std::int64_t e = 0; e < n; ++e) w[e] *= dropout.operator()<T>(l.key[e]);
    }

    T* wide_entry(void* data, const Place& at, std::int64_t i) const {
        return static_cast<T*>(data) + (at.number + i) * p.keys;
    }

    static double eps_slope(const Family<T>& f, std::int64_t n, const T* d, const T* w, const T* g, double mean) {
        double total = 0;
        for (std::int64_t e = 0; e < n; ++e)
            if (w[e] > 0) total += double(w[e]) * log_slope(f, double(d[e])) * (double(g[e]) - mean);
        return total;
    }

    // sum r g / sum r
    static double centre(std::int64_t n, const T* r, const T* g) {
        double above = 0, below = 0;
        for (std::int64_t e = 0; e < n; ++e) {
            above += double(r[e]) * double(g[e]);
            below += double(r[e]);
        }
        return above / below;
    }

    // g becomes ds. For eps > 1, and for masses of very different size, the steepest key's own product is
    // slope times a difference that rounds to zero; sum ds = 0 gives it without that loss.
    static void differentiate(bool uneven, std::int64_t n, const T* r, T* g, double mean) {
        for (std::int64_t e = 0; e < n; ++e) g[e] = r[e] * (g[e] - T(mean));
        if (!uneven) return;
        std::int64_t steepest = 0;
        double others = 0;
        for (std::int64_t e = 1; e < n; ++e) steepest = r[e] > r[steepest] ? e : steepest;
        for (std::int64_t e = 0; e < n; ++e) others += e == steepest ? 0 : double(g[e]);
        g[steepest] = T(-others);
    }

    // ---- supports that had no room

    // False where they are not those of the forward pass. `x` has room for a tile.
    bool recall(const Place& at, std::int64_t first, std::int64_t stop, T* x) {
        const Range all = seen_by_any(at, first, stop);
        key_panels.scores(stop - first, queries.row(first), queries.ld, all.from, all.to, x, ld);
        std::int32_t* key = recalled_key.get() + recalled;
        T* far = recalled_distance.get() + recalled;
        std::int64_t total = 0;
        for (std::int64_t i = first; i < stop; ++i, x += ld) {
            const std::int64_t n = p.count[at.number + i];
            if (n > 0 && answered(at, i) && recall_row(at, i, x + (seen[i].from - all.from), n, key + total, far + total) != n)
                return false;
            total += n;
        }
        enlist(at, first, stop, key, far);
        recalled += total;
        return true;
    }
    // How many keys lie above the threshold, as far as there is room for them.
    std::int64_t recall_row(const Place& at, std::int64_t i, T* x, std::int64_t room, std::int32_t* key, T* far) {
        constexpr int W = Lanes<T>::W;
        const std::int64_t query = at.first + i, size = seen[i].size();
        if (!scores.plain())
            for (std::int64_t from = 0; from < size; from += kChunk)
                scores.finish(x + from, query, seen[i].from + from, seen[i].from + std::min(from + kChunk, size));
        const Offset<T> at_row{T(p.offset[2 * (at.number + i)]), p.offset[2 * (at.number + i) + 1], true};
        const Family<T> f = family(at, i);
        const T reach = T(-f.reach());
        const Vec<T> centre = fill<T>(at_row.centre), high = fill<T>(at_row.high()), low = fill<T>(at_row.low());
        std::int64_t n = 0;
        if (scores.has_sink()) {
            const T d = ((scores.sink() - at_row.centre) - at_row.high()) - at_row.low();
            if (!(d <= reach)) key[n] = -1, far[n++] = d;
        }
        for (std::int64_t j = 0; j < size; j += W) {
            const Vec<T> d = ((load<T>(x + j) - centre) - high) - low;
            unsigned bits = above<T>(d, fill<T>(reach));
            if (size - j < W) bits &= (1u << (size - j)) - 1;
            if (!bits) continue;
            if (n + __builtin_popcount(bits) > room) return room + 1;
            n += append<T>(bits, d, std::int32_t(seen[i].from + j), far + n, key + n);
        }
        return n;
    }

    // ---- dense tiles: rows of a block against the keys that any of them sees

    Range seen_by_any(const Place& at, std::int64_t first, std::int64_t stop) const {
        Range all{at.s.keys, 0};
        for (std::int64_t i = first; i < stop; ++i) Forward<T>::widen(all, seen[i]);
        if (all.empty()) return {0, 0};
        return {all.from / kShortChunk * kShortChunk, all.to};
    }

    // A tile multiplies by 0 where a row has no support, which only what is finite survives. Keys that are not have no
    // score that carries weight, and are cleaned, unless a cap gives them one.
    bool tiles_are_safe(std::int64_t first, std::int64_t stop) const {
        return (finite_keys || !(p.softcap > 0)) && queries.finite(first, stop, p.dim) && gradients.finite(first, stop, p.value_dim);
    }

    void dense(const Place& at, std::int64_t first, std::int64_t stop) {
        const Range all = seen_by_any(at, first, stop);
        const std::int64_t rows = stop - first, n = all.size();
        const T *q = queries.row(first), *grad = gradients.row(first);
        T* d = wide_distance.reserve(kBlock * ld);
        T* g = wide_gain.reserve(kBlock * ld);
        key_panels.scores(rows, q, queries.ld, all.from, all.to, d, ld);
        value_panels.scores(rows, grad, gradients.ld, all.from, all.to, g, ld);
        for (std::int64_t i = 0; i < rows; ++i)
            dense_row(at, first + i, {d + i * ld, g + i * ld, all.from, padded(n, kColumns<T>)});
        T* dq = query_sum.get() + first * wide;
        for (std::int64_t from = 0; from < n; from += kShortChunk) {
            const std::int64_t size = std::min(kShortChunk, n - from), key = all.from + from;
            product<T>(rows, wide, size, g + from, ld, 1, keys.row(key), keys.ld, dq, wide, true);
            product<T>(size, wide, rows, g + from, 1, ld, q, queries.ld, key_sum.get() + key * wide, wide, true);
            product<T>(size, value_wide, rows, d + from, 1, ld, grad, gradients.ld,
                       value_sum.get() + key * value_wide, value_wide, true);
        }
    }

    void pack(const Sequence& s) {
        if (packed) return;
        key_panels.pack_all(keys.data, keys.ld, s.keys, p.dim);
        value_panels.pack_all(values.data, values.ld, s.keys, p.value_dim);
        finite_keys = keys.finite(0, s.keys, p.dim);
        if (!finite_keys && !(p.softcap > 0)) keys.clean(s.keys, p.dim);
        finite_values = values.finite(0, s.keys, p.value_dim);
        packed = true;
    }

    struct Wide {  // a row of scores and of gains; after `end` columns (whole tiles) comes the sink
        T *d, *g;
        std::int64_t from, end;  // key of the first column
    };

    // Scores become weights, gains become ds.
    void dense_row(const Place& at, std::int64_t i, const Wide& x) {
        constexpr int W = Lanes<T>::W;
        const std::int64_t query = at.first + i;
        if (unanswered(at, i) || p.count[at.number + i] == 0) {
            std::memset(x.d, 0, x.end * sizeof(T));
            std::memset(x.g, 0, x.end * sizeof(T));
            return;
        }
        const Range mine{seen[i].from - x.from, seen[i].to - x.from};
        if (p.softcap > 0) slopes_of_cap(x, mine);
        if (!scores.plain())
            for (std::int64_t from = mine.from; from < mine.to; from += kChunk)
                scores.finish(x.d + from, query, x.from + from, x.from + std::min(from + kChunk, mine.to));
        const std::int64_t end = x.end + (scores.has_sink() ? W : 0);
        hide(x, mine, end);
        if (scores.has_sink()) x.d[x.end] = scores.sink();
        const Offset<T> offset{T(p.offset[2 * (at.number + i)]), p.offset[2 * (at.number + i) + 1], true};
        const T centre_score = offset.centre, high = offset.high(), low = offset.low();
        for (std::int64_t j = 0; j < end; j += W)
            store<T>(x.d + j, ((load<T>(x.d + j) - centre_score) - high) - low);
        Candidates<T> c{x.d, nullptr, nullptr, end};
        if (scores.has_mass()) {
            c.mass = mass.reserve(ld + 64);
            std::memset(c.mass, 0, end * sizeof(T));
            scores.masses(query, seen[i].from, seen[i].to, c.mass + mine.from);
            if (scores.has_sink()) c.mass[x.end] = scores.mass(query, -1);
        }
        finish_dense(at, i, c, x, mine, end);
    }

    void slopes_of_cap(const Wide& x, const Range& mine) {
        const T inverse = T(1 / p.softcap);
        T* slopes = cap_slopes.reserve(ld + 64);
        for (std::int64_t j = mine.from; j < mine.to; j += Lanes<T>::W) {
            const Vec<T> t = tangent<T>(load<T>(x.d + j) * inverse);
            store<T>(slopes + j, T(1) - t * t);
        }
    }

    static void hide(const Wide& x, const Range& mine, std::int64_t end) {
        const T hidden = -std::numeric_limits<T>::infinity();
        for (std::int64_t j = 0; j < mine.from; ++j) x.d[j] = hidden, x.g[j] = 0;
        for (std::int64_t j = mine.to; j < end; ++j) x.d[j] = hidden, x.g[j] = 0;
    }

    void finish_dense(const Place& at, std::int64_t i, const Candidates<T>& c, const Wide& x, const Range& mine,
                      std::int64_t end) {
        const Family<T> f = family(at, i);
        const std::int64_t query = at.first + i, number = at.number + i;
        T *w = weight.reserve(ld + 64), *r = slope.reserve(ld + 64), *g = x.g;
        const Dropout dropout(at.s, at.h, query);
        if (dropout.active())
            for (std::int64_t j = mine.from; j < mine.to; ++j) g[j] *= dropout.operator()<T>(std::int32_t(x.from + j));
        weights(f, c, w, r);
        if (!finite_values)
            for (std::int64_t j = 0; j < end; ++j) g[j] = c.score[j] > T(-f.reach()) ? g[j] : T(0);
        const double mean = wide_centre(end, r, g);
        if (!std::isfinite(mean)) return set_apart(at, i, x);
        if (out.eps) out.eps[number] = eps_slope(f, end, c.score, w, g, mean);
        if (out.sink_log_mass) out.sink_log_mass[number] = double(w[x.end]) * (double(g[x.end]) - mean);
        if (out.log_mass)
            for (std::int64_t j = mine.from; j < mine.to; ++j) wide_entry(out.log_mass, at, i)[x.from + j] = w[j] * (g[j] - T(mean));
        if (terms.of_mass())
            for (std::int64_t j = mine.from; j < mine.to; ++j) terms.add_log_mass(query, x.from + j, w[j] * (g[j] - T(mean)));
        differentiate(f.steep() || c.mass, end, r, g, mean);
        if (out.scores) std::memcpy(wide_entry(out.scores, at, i) + seen[i].from, g + mine.from, mine.size() * sizeof(T));
        if (out.sink) out.sink[number] = double(g[x.end]);
        if (terms.relative || terms.of_key)
            for (std::int64_t j = mine.from; j < mine.to; ++j) terms.add_score(query, x.from + j, g[j]);
        if (p.softcap > 0)
            for (std::int64_t j = mine.from; j < mine.to; ++j) g[j] *= cap_slopes.get()[j];
        if (dropout.active())
            for (std::int64_t j = mine.from; j < mine.to; ++j) w[j] *= dropout.operator()<T>(std::int32_t(x.from + j));
        std::memcpy(c.score, w, x.end * sizeof(T));
    }

    // A row whose gains are not finite works on its support, before any of it is handed out.
    void set_apart(const Place& at, std::int64_t i, const Wide& x) {
        if (!recall(at, i, i + 1, x.d)) throw Foreign();
        std::memset(x.d, 0, x.end * sizeof(T));
        std::memset(x.g, 0, x.end * sizeof(T));
    }

    static double wide_centre(std::int64_t n, const T* r, const T* g) {
        constexpr int W = Lanes<T>::W;
        double above = 0, below = 0;
        for (std::int64_t start = 0; start < n; start += 32 * W) {
            Vec<T> a{}, b{};
            for (std::int64_t j = start; j < n && j < start + 32 * W; j += W) {
                a += load<T>(r + j) * load<T>(g + j);
                b += load<T>(r + j);
            }
            above += sum<T>(a);
            below += sum<T>(b);
        }
        return above / below;
    }
};
