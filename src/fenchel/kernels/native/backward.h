// Backward. With g_i = <dO, v_i> and r = dp/ds on the support,
//   ds_i = r_i (g_i - sum r g / sum r),  dq = sum ds_i k_i,  dk_i += ds_i q,  dv_i += p_i dO.
// A block of queries whose support was saved works on it alone; one that overflowed its room is made
// again from the thresholds, as dense tiles: there supports are so large that tiles are faster.

template <class T>
struct Backward {
    const AttentionProblem& p;
    const AttentionGradient& out;
    Scores<T> scores;
    Panels<T> value_panels;
    Rows<T> keys, values, queries, gradients;
    Buffer<T> key_sum, value_sum, query_sum, wide_distance, wide_gain;
    Buffer<T> distance, mass, weight, slope, gain;
    std::int64_t wide, value_wide, ld;
    bool packed = false, poisoned = false, finite_values = true;

    static constexpr std::int64_t kGroup = 4;   // blocks of queries worked on together
    std::int64_t lines = 0, entries = 0;

    Backward(const AttentionProblem& problem, const AttentionGradient& gradient)
        : p(problem), out(gradient), scores(problem) {
        wide = padded(p.dim, kColumns<T>);
        value_wide = padded(p.value_dim, kColumns<T>);
        ld = padded(p.keys, kColumns<T>);
    }

    std::int64_t repeats() const { return p.heads / p.kv_heads; }
    std::int64_t blocks() const { return (p.queries + kBlock - 1) / kBlock; }

    // A fixed share of the blocks of queries that read this key head.
    void run(std::int64_t b, std::int64_t kv, std::int64_t part) {
        keys.take(p.key, b, kv, 0, p.keys, p.dim, T(1));
        values.take(p.value, b, kv, 0, p.keys, p.value_dim, T(1));
        std::memset(key_sum.reserve(ld * wide), 0, ld * wide * sizeof(T));
        std::memset(value_sum.reserve(ld * value_wide), 0, ld * value_wide * sizeof(T));
        packed = poisoned = false;
        const std::int64_t all = blocks() * repeats(), stop = all * (part + 1) / out.parts;
        for (std::int64_t k = all * part / out.parts; k < stop;) {
            const std::int64_t h = k / blocks(), first = k % blocks();
            std::int64_t n = blocks() - first < kGroup ? blocks() - first : kGroup;
            n = n < stop - k ? n : stop - k;
            group(b, kv * repeats() + h, first, n);
            k += n;
        }
        const std::int64_t number = (part * p.batch + b) * p.kv_heads + kv;
        deliver(key_sum.get(), wide, p.dim, static_cast<T*>(out.key) + number * p.keys * p.dim);
        deliver(value_sum.get(), value_wide, p.value_dim, static_cast<T*>(out.value) + number * p.keys * p.value_dim);
    }

    void deliver(const T* from, std::int64_t from_ld, std::int64_t columns, T* to) const {
        for (std::int64_t i = 0; i < p.keys; ++i, from += from_ld, to += columns)
            for (std::int64_t j = 0; j < columns; ++j)
                to[j] = poisoned ? std::numeric_limits<T>::quiet_NaN() : from[j];
    }

    struct Place {
        std::int64_t b, h, first, rows, number;  // number: of the first row among all
    };

    // Blocks of one head, worked on together so that keys are fetched once for all of them.
    void group(std::int64_t b, std::int64_t h, std::int64_t block, std::int64_t n) {
        const std::int64_t first = block * kBlock, limit = (block + n) * kBlock;
        const std::int64_t rows = (limit < p.queries ? limit : p.queries) - first;
        const Place at{b, h, first, rows, (b * p.heads + h) * p.queries + first};
        queries.take(p.query, b, h, first, rows, p.dim, T(p.scale));
        gradients.take(out.output, b, h, first, rows, p.value_dim, T(1));
        std::memset(query_sum.reserve(kGroup * kBlock * wide), 0, rows * wide * sizeof(T));
        lines = entries = 0;
        for (std::int64_t k = 0; k < n; ++k) {
            std::int64_t total = 0;
            const std::int64_t from = k * kBlock, to = from + kBlock < rows ? from + kBlock : rows;
            for (std::int64_t i = from; i < to; ++i) {
                if (p.count[at.number + i] < 0) throw Foreign();
                total += p.count[at.number + i];
            }
            if (total > p.capacity)
                dense(at, from, to);
            else
                enlist(at, from, to, ((b * p.heads + h) * blocks() + block + k) * p.capacity);
        }
        sparse(at);
        const T* dq = query_sum.get();
        for (std::int64_t i = 0; i < rows; ++i) {
            T* to = static_cast<T*>(out.query) + (at.number + i) * p.dim;
            for (std::int64_t j = 0; j < p.dim; ++j) to[j] = T(p.scale) * dq[i * wide + j];
        }
    }

    Family<T> family(const Place& at, std::int64_t i) const {
        return Family<T>(static_cast<const double*>(p.eps.data)[p.eps.at(at.b, at.h, at.first + i)]);
    }

    // A row without an answer makes every derivative it touches NaN, as dense arithmetic would.
    bool unanswered(const Place& at, std::int64_t i) {
        if (p.offset[2 * (at.number + i) + 1] == p.offset[2 * (at.number + i) + 1]) return false;
        poisoned = true;
        for (std::int64_t j = 0; j < wide; ++j) query_sum.get()[i * wide + j] = std::numeric_limits<T>::quiet_NaN();
        if (out.eps) out.eps[at.number + i] = std::numeric_limits<double>::quiet_NaN();
        for (void* of_keys : {out.scores, out.log_mass})
            for (std::int64_t j = 0; of_keys && j < p.keys; ++j)
                wide_entry(of_keys, at, i)[j] = std::numeric_limits<T>::quiet_NaN();
        return true;
    }

    // ---- on the saved support

    struct Line {  // a row and its entries
        std::int64_t row, count, start;
        const std::int32_t* key;
        const T* distance;
        std::int64_t next;  // entry to be visited
    };

    void enlist(const Place& at, std::int64_t from, std::int64_t to, std::int64_t pool) {
        for (std::int64_t i = from; i < to; ++i) {
            const std::int64_t n = p.count[at.number + i];
            check(n, p.saved_key + pool);
            if (!unanswered(at, i) && n > 0) {
                line[lines++] = {i, n, entries, p.saved_key + pool, static_cast<const T*>(p.saved_distance) + pool, 0};
                entries += n;
            }
            pool += n;
        }
    }

    // What another call saved would lead outside of these keys.
    void check(std::int64_t n, const std::int32_t* key) const {
        bool inside = true;
        for (std::int64_t e = 0; e < n; ++e) inside &= key[e] >= 0 && key[e] < p.keys;
        if (!inside) throw Foreign();
    }

    Line line[kGroup * kBlock];

    // Few enough keys to stay in the cache, enough for several entries of a row.
    std::int64_t chunk_of_keys() const {
        std::int64_t near = 256;
        while (near < 1024 && near * entries < 8 * p.keys * lines) near *= 2;
        return near;
    }

    // visit(line, entries from, to) for every row, keys in chunks.
    template <class Visit>
    void sweep(Visit&& visit) {
        for (std::int64_t i = 0; i < lines; ++i) line[i].next = 0;
        const std::int64_t near = chunk_of_keys();
        for (std::int64_t end = near; end < p.keys + near; end += near)
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
        if (p.mass.data) {
            c.mass = mass.reserve(n + 64);
            for (std::int64_t e = 0; e < n; ++e) c.mass[e] = scores.mass(at.b, at.h, query, l.key[e]);
        }
        c.pad();
        T* r = slope.reserve(n + 64);
        weights(f, c, w, r);
        const Dropout dropout(p, at.b, at.h, query);
        if (dropout.active())
            for (std::int64_t e = 0; e < n; ++e) g[e] *= dropout.operator()<T>(l.key[e]);
        const double mean = centre(n, r, g);
        if (out.eps) {
            double total = 0;
            for (std::int64_t e = 0; e < n; ++e) total += double(w[e]) * log_slope(f, double(c.score[e])) * (double(g[e]) - mean);
            out.eps[at.number + l.row] = total;
        }
        if (out.log_mass)
            for (std::int64_t e = 0; e < n; ++e) wide_entry(out.log_mass, at, l.row)[l.key[e]] = w[e] * (g[e] - T(mean));
        differentiate(f, n, r, g, mean);
        if (out.scores)
            for (std::int64_t e = 0; e < n; ++e) wide_entry(out.scores, at, l.row)[l.key[e]] = g[e];
        if (dropout.active())
            for (std::int64_t e = 0; e < n; ++e) w[e] *= dropout.operator()<T>(l.key[e]);
    }

    T* wide_entry(void* data, const Place& at, std::int64_t i) const {
        return static_cast<T*>(data) + (at.number + i) * p.keys;
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

    // g becomes ds. For eps > 1 the steepest key's own product is slope times a difference that
    // rounds to zero; sum ds = 0 gives it without that loss.
    static void differentiate(const Family<T>& f, std::int64_t n, const T* r, T* g, double mean) {
        for (std::int64_t e = 0; e < n; ++e) g[e] = r[e] * (g[e] - T(mean));
        if (!f.steep()) return;
        std::int64_t steepest = 0;
        double others = 0;
        for (std::int64_t e = 1; e < n; ++e) steepest = r[e] > r[steepest] ? e : steepest;
        for (std::int64_t e = 0; e < n; ++e) others += e == steepest ? 0 : double(g[e]);
        g[steepest] = T(-others);
    }

    // ---- dense tiles

    void dense(const Place& at, std::int64_t first, std::int64_t stop) {
        if (!packed) {
            scores.panels.pack(keys.data, keys.ld, p.keys, p.dim);
            value_panels.pack(values.data, values.ld, p.keys, p.value_dim);
            if (!keys.finite(p.keys, p.dim)) keys.clean(p.keys, p.dim);
            finite_values = values.finite(p.keys, p.value_dim);
            packed = true;
        }
        const std::int64_t last = scores.limit(at.first + stop - 1), rows = stop - first;
        const T *q = queries.row(first), *grad = gradients.row(first);
        T* d = wide_distance.reserve(kBlock * ld);
        T* g = wide_gain.reserve(kBlock * ld);
        scores.panels.scores(rows, q, queries.ld, 0, last, d, ld);
        value_panels.scores(rows, grad, gradients.ld, 0, last, g, ld);
        for (std::int64_t i = 0; i < rows; ++i)
            dense_row(at, first + i, d + i * ld, g + i * ld, padded(last, kColumns<T>));
        T* dq = query_sum.get() + first * wide;
        for (std::int64_t from = 0; from < last; from += kShortChunk) {
            const std::int64_t n = last - from < kShortChunk ? last - from : kShortChunk;
            product<T>(rows, wide, n, g + from, ld, 1, keys.row(from), keys.ld, dq, wide, true);
            product<T>(n, wide, rows, g + from, 1, ld, q, queries.ld, key_sum.get() + from * wide, wide, true);
            product<T>(n, value_wide, rows, d + from, 1, ld, grad, gradients.ld,
                       value_sum.get() + from * value_wide, value_wide, true);
        }
    }

    // Scores become weights, gains become ds; `end` is a whole number of tiles.
    void dense_row(const Place& at, std::int64_t i, T* d, T* g, std::int64_t end) {
        const std::int64_t query = at.first + i, seen = scores.limit(query);
        if (unanswered(at, i) || p.count[at.number + i] == 0) {
            std::memset(d, 0, end * sizeof(T));
            std::memset(g, 0, end * sizeof(T));
            return;
        }
        if (!scores.plain())
            for (std::int64_t from = 0; from < seen; from += kChunk)
                scores.finish(d + from, at.b, at.h, query, from, from + kChunk < seen ? from + kChunk : seen);
        for (std::int64_t j = seen; j < end; ++j) d[j] = -std::numeric_limits<T>::infinity();
        for (std::int64_t j = seen; j < end; ++j) g[j] = 0;
        const Family<T> f = family(at, i);
        const Offset<T> offset{T(p.offset[2 * (at.number + i)]), p.offset[2 * (at.number + i) + 1], true};
        const T centre_score = offset.centre, high = offset.high(), low = offset.low();
        for (std::int64_t j = 0; j < end; j += Lanes<T>::W)
            store<T>(d + j, ((load<T>(d + j) - centre_score) - high) - low);
        Candidates<T> c{d, nullptr, nullptr, end};
        if (p.mass.data) {
            c.mass = mass.reserve(ld + 64);
            scores.masses(at.b, at.h, query, 0, seen, c.mass);
            for (std::int64_t j = seen; j < end; ++j) c.mass[j] = 0;
        }
        const Dropout dropout(p, at.b, at.h, query);
        if (dropout.active())
            for (std::int64_t j = 0; j < seen; ++j) g[j] *= dropout.operator()<T>(std::int32_t(j));
        finish_dense(at, i, f, c, g, end, seen, dropout);
    }

    void finish_dense(const Place& at, std::int64_t i, const Family<T>& f, const Candidates<T>& c, T* g,
                      std::int64_t end, std::int64_t seen, const Dropout& dropout) {
        T* w = weight.reserve(ld + 64);
        T* r = slope.reserve(ld + 64);
        weights(f, c, w, r);
        if (!finite_values)
            for (std::int64_t j = 0; j < end; ++j) g[j] = r[j] > 0 ? g[j] : T(0);
        const double mean = wide_centre(end, r, g);
        if (out.eps) {
            double total = 0;
            for (std::int64_t j = 0; j < seen; ++j)
                if (w[j] > 0) total += double(w[j]) * log_slope(f, double(c.score[j])) * (double(g[j]) - mean);
            out.eps[at.number + i] = total;
        }
        if (out.log_mass)
            for (std::int64_t j = 0; j < seen; ++j) wide_entry(out.log_mass, at, i)[j] = w[j] * (g[j] - T(mean));
        differentiate(f, end, r, g, mean);
        if (out.scores) std::memcpy(wide_entry(out.scores, at, i), g, seen * sizeof(T));
        if (dropout.active())
            for (std::int64_t j = 0; j < seen; ++j) w[j] *= dropout.operator()<T>(std::int32_t(j));
        std::memcpy(c.score, w, end * sizeof(T));
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
