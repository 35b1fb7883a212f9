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
    bool packed = false, poisoned = false;

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
        const std::int64_t all = blocks() * repeats();
        for (std::int64_t k = all * part / out.parts; k < all * (part + 1) / out.parts; ++k)
            block(b, kv * repeats() + k / blocks(), k % blocks());
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

    void block(std::int64_t b, std::int64_t h, std::int64_t k) {
        const std::int64_t first = k * kBlock;
        const std::int64_t rows = p.queries - first < kBlock ? p.queries - first : kBlock;
        const Place at{b, h, first, rows, (b * p.heads + h) * p.queries + first};
        std::int64_t total = 0;
        for (std::int64_t i = 0; i < rows; ++i) total += p.count[at.number + i];
        queries.take(p.query, b, h, first, rows, p.dim, T(p.scale));
        gradients.take(out.output, b, h, first, rows, p.value_dim, T(1));
        T* dq = query_sum.reserve(kBlock * wide);
        std::memset(dq, 0, rows * wide * sizeof(T));
        if (total > p.capacity)
            dense(at);
        else
            sparse(at, ((b * p.heads + h) * blocks() + k) * p.capacity);
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
        return true;
    }

    // ---- on the saved support

    void sparse(const Place& at, std::int64_t pool) {
        for (std::int64_t i = 0; i < at.rows; ++i) {
            const std::int64_t n = p.count[at.number + i];
            if (!unanswered(at, i) && n > 0)
                sparse_row(at, i, n, p.saved_key + pool, static_cast<const T*>(p.saved_distance) + pool);
            pool += n;
        }
    }

    void sparse_row(const Place& at, std::int64_t i, std::int64_t n, const std::int32_t* key, const T* saved) {
        const Family<T> f = family(at, i);
        Candidates<T> c{distance.reserve(n + 64), const_cast<std::int32_t*>(key), nullptr, n};
        std::memcpy(c.score, saved, n * sizeof(T));
        if (p.mass.data) {
            c.mass = mass.reserve(n + 64);
            for (std::int64_t e = 0; e < n; ++e) c.mass[e] = scores.mass(at.b, at.h, at.first + i, key[e]);
        }
        c.pad();
        T* w = weight.reserve(n + 64);
        T* r = slope.reserve(n + 64);
        T* g = gain.reserve(n + 64);
        weights(f, c, w, r);
        const Dropout dropout(p, at.b, at.h, at.first + i);
        for (std::int64_t e = 0; e < n; ++e) g[e] = dot(gradients.row(i), values.row(key[e]));
        if (dropout.active())
            for (std::int64_t e = 0; e < n; ++e) g[e] *= dropout.operator()<T>(key[e]);
        const double mean = centre(n, r, g);
        if (out.eps) {
            double total = 0;
            for (std::int64_t e = 0; e < n; ++e) total += double(w[e]) * log_slope(f, double(c.score[e])) * (double(g[e]) - mean);
            out.eps[at.number + i] = total;
        }
        if (out.log_mass)
            for (std::int64_t e = 0; e < n; ++e) wide_entry(out.log_mass, at, i)[key[e]] = w[e] * (g[e] - T(mean));
        differentiate(f, n, r, g, mean);
        if (out.scores)
            for (std::int64_t e = 0; e < n; ++e) wide_entry(out.scores, at, i)[key[e]] = g[e];
        if (dropout.active())
            for (std::int64_t e = 0; e < n; ++e) w[e] *= dropout.operator()<T>(key[e]);
        gather(n, g, key, keys, wide, query_sum.get() + i * wide);
        for (std::int64_t e = 0; e < n; ++e) {
            add_row(key_sum.get() + key[e] * wide, g[e], queries.row(i), wide);
            add_row(value_sum.get() + key[e] * value_wide, w[e], gradients.row(i), value_wide);
        }
    }

    T* wide_entry(void* data, const Place& at, std::int64_t i) const {
        return static_cast<T*>(data) + (at.number + i) * p.keys;
    }

    T dot(const T* left, const T* right) const {
        constexpr int W = Lanes<T>::W;
        Vec<T> a{}, b{};
        for (std::int64_t j = 0; j < value_wide; j += 2 * W) {
            a += load<T>(left + j) * load<T>(right + j);
            b += load<T>(left + j + W) * load<T>(right + j + W);
        }
        return sum<T>(a + b);
    }

    static void add_row(T* to, T factor, const T* from, std::int64_t n) {
        for (std::int64_t j = 0; j < n; j += Lanes<T>::W) store<T>(to + j, load<T>(to + j) + factor * load<T>(from + j));
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

    void dense(const Place& at) {
        if (!packed) {
            scores.panels.pack(keys.data, keys.ld, p.keys, p.dim);
            value_panels.pack(values.data, values.ld, p.keys, p.value_dim);
            packed = true;
        }
        const std::int64_t last = scores.limit(at.first + at.rows - 1);
        T* d = wide_distance.reserve(kBlock * ld);
        T* g = wide_gain.reserve(kBlock * ld);
        scores.panels.scores(at.rows, queries.data, queries.ld, 0, last, d, ld);
        value_panels.scores(at.rows, gradients.data, gradients.ld, 0, last, g, ld);
        for (std::int64_t i = 0; i < at.rows; ++i) dense_row(at, i, d + i * ld, g + i * ld, padded(last, kColumns<T>));
        T* dq = query_sum.get();
        for (std::int64_t from = 0; from < last; from += kChunk) {
            const std::int64_t n = last - from < kChunk ? last - from : kChunk;
            product<T>(at.rows, wide, n, g + from, ld, 1, keys.row(from), keys.ld, dq, wide, true);
            product<T>(n, wide, at.rows, g + from, 1, ld, queries.data, queries.ld, key_sum.get() + from * wide, wide, true);
            product<T>(n, value_wide, at.rows, d + from, 1, ld, gradients.data, gradients.ld,
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
