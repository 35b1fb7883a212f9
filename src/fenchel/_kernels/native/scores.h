// What the scores of a head hold beside the product: softcap, bias, mask, masses, and which keys a query sees.

struct Added {
    double most, size;  // the sum of two terms, and of their sizes: rounding goes by these
};

template <class T>
struct Scores {
    const AttentionProblem& p;
    const Sequence* s = nullptr;
    std::int64_t h = 0;
    const T *relative = nullptr, *relative_mass = nullptr;  // at key - query
    const T *of_key = nullptr, *of_key_mass = nullptr;      // at the key
    bool holes = false;                                     // some mass is zero where `near` looked
    Buffer<T> extra;

    // A smaller mass counts as none: alone, its key would need a weight before mass that is no number any more.
    static constexpr T kLeastMass = 4 * std::numeric_limits<T>::min();

    explicit Scores(const AttentionProblem& problem) : p(problem) {}

    // Structure alone: what `finish` and `mass` are about.
    bool has_mass() const { return p.mass.data || p.relative_mass.data || p.of_key_mass.data || p.sink_mass.data; }
    bool plain() const { return !p.mask.data && !p.bias.data && !p.relative.data && !p.of_key.data && !holes && !(p.softcap > 0); }

    void enter(const Sequence& sequence, std::int64_t head) {
        s = &sequence;
        h = head;
        const std::int64_t zero = p.queries - 1 + sequence.late, key = sequence.first_key;
        relative = table(p.relative, zero);
        relative_mass = table(p.relative_mass, zero);
        of_key = table(p.of_key, key);
        of_key_mass = table(p.of_key_mass, key);
    }
    const T* table(const View& v, std::int64_t start) const {
        return v.data ? static_cast<const T*>(v.data) + v.at(s->batch, h, 0) + start : nullptr;
    }

    // Relative positions of this head that hold mass, or a bias above -inf: nobody visits the others.
    Range near() {
        Range r{1 - s->queries, s->keys};
        if (r.to <= r.from) return r;
        const T hidden = -std::numeric_limits<T>::infinity();
        const auto off = [&](std::int64_t d) {
            return (relative && relative[d] == hidden) || (relative_mass && relative_mass[d] < kLeastMass);
        };
        while (!r.empty() && off(r.from)) ++r.from;
        while (!r.empty() && off(r.to - 1)) --r.to;
        T least = 1, least_of_key = 1;
        for (std::int64_t d = r.from; relative_mass && d < r.to; ++d) least = std::min(least, relative_mass[d]);
        for (std::int64_t key = 0; of_key_mass && key < s->keys; ++key) least_of_key = std::min(least_of_key, of_key_mass[key]);
        holes = holes || p.mass.data || least * least_of_key < kLeastMass;
        return r;
    }
    Range visible(std::int64_t query, const Range& near) const {
        const std::int64_t lowest = p.lowest - s->late, highest = p.highest - s->late;
        Range r{query + std::max(lowest, near.from), query + std::min(highest, near.to - 1) + 1};
        const std::int64_t row = s->first_query + query;
        if (p.start.data) r.from = std::max(r.from, static_cast<const std::int64_t*>(p.start.data)[p.start.at(s->batch, h, row)]);
        if (p.stop.data) r.to = std::min(r.to, static_cast<const std::int64_t*>(p.stop.data)[p.stop.at(s->batch, h, row)]);
        r.from = std::min(std::max<std::int64_t>(r.from, 0), s->keys);
        r.to = std::min(r.to, s->keys);
        return r.empty() ? Range{r.from, r.from} : trimmed(r);
    }
    // A mask that is the same for all queries may end early (padding): no query sees keys beyond.
    Range trimmed(Range r) const {
        if (!p.mask.data || p.mask.stride[2] != 0) return r;
        const auto* mask = static_cast<const std::uint8_t*>(p.mask.data) + p.mask.at(s->batch, h, 0);
        while (!r.empty() && !mask[(r.to - 1) * p.mask.stride[3]]) --r.to;
        return r;
    }

    // Keys from .. to - 1 of one row: products become scores, and hidden keys -inf. Writes whole vectors.
    void finish(T* x, std::int64_t query, std::int64_t from, std::int64_t to) {
        if (p.softcap > 0) cap(x, to - from);
        finish_capped(x, query, from, to);
    }
    void finish_capped(T* x, std::int64_t query, std::int64_t from, std::int64_t to) {
        constexpr int W = Lanes<T>::W;
        const T hidden = -std::numeric_limits<T>::infinity();
        const std::int64_t n = to - from;
        if (relative) add(x, relative + (from - query), n);
        if (of_key) add(x, of_key + from, n);
        if (p.bias.data) {
            T* bias = extra.reserve(kChunk);
            read_row<T>(p.bias, p.bias.at(s->batch, h, query) + from * p.bias.stride[3], p.bias.stride[3], n, bias);
            const T factor = T(p.bias_scale);
            const T least = std::numeric_limits<T>::lowest();
            for (std::int64_t j = 0; j < n; ++j) {
                const T sum = x[j] + factor * bias[j];
                x[j] = bias[j] < least ? bias[j] : sum < least ? std::min(x[j], least) : sum;  // only -inf hides a key
            }
        }
        if (p.mask.data) {
            const std::int64_t step = p.mask.stride[3];
            const auto* mask = static_cast<const std::uint8_t*>(p.mask.data) + p.mask.at(s->batch, h, query) + from * step;
            if (step == 1)
                for (std::int64_t j = 0; j < n; ++j) x[j] = mask[j] ? x[j] : hidden;
            else
                for (std::int64_t j = 0; j < n; ++j) x[j] = mask[j * step] ? x[j] : hidden;
        }
        if (holes) {
            T* m = extra.reserve(kChunk);
            masses(query, from, to, m);
            for (std::int64_t j = 0; j < n; j += W)
                store<T>(x + j, pick<T>(load<T>(m + j) == Vec<T>{}, fill<T>(hidden), load<T>(x + j)));
        }
    }

    // Sums of finite numbers stay finite, so that -inf alone hides a key; what is hidden already stays so.
    static void add(T* x, const T* bias, std::int64_t n) {
        constexpr int W = Lanes<T>::W;
        const Vec<T> least = fill<T>(std::numeric_limits<T>::lowest());
        std::int64_t j = 0;
        for (; j + W <= n; j += W) {
            const Vec<T> a = load<T>(x + j), b = load<T>(bias + j), sum = a + b;
            const Mask<T> low = (sum < least) & (b >= least);
            const Vec<T> finite = low ? at_most<T>(a, std::numeric_limits<T>::lowest()) : sum;
            store<T>(x + j, b < least ? b : finite);  // whatever the key holds
        }
        for (; j < n; ++j) x[j] = add(x[j], bias[j]);
    }
    static T add(T x, T bias) {
        const T least = std::numeric_limits<T>::lowest(), sum = x + bias;
        return bias < least ? bias : sum < least ? std::min(x, least) : sum;
    }

    // The same for bounds on products, from above (sign 1) or below (-1). A rounded sum does not fall when a term grows, so
    // that a bound stays one under a bias; the tangent is given room for its own rounding. Infinity says that nothing is
    // known, not even that the score is a number, and stays.
    void finish_bound(T* x, std::int64_t query, std::int64_t from, std::int64_t to, T sign) {
        if (plain()) return;
        if (p.softcap > 0) cap_bound(x, to - from, sign * T(p.softcap) * T(0x1p-20));
        finish_capped(x, query, from, to);
    }
    void cap_bound(T* x, std::int64_t n, T room) const {
        const Vec<T> unknown = fill<T>(std::numeric_limits<T>::infinity());
        const T limit = T(p.softcap), inverse = T(1 / p.softcap);
        for (std::int64_t j = 0; j < n; j += Lanes<T>::W) {
            const Vec<T> bound = load<T>(x + j);
            store<T>(x + j, pick<T>(bound == unknown, bound, tangent<T>(bound * inverse) * limit + room));
        }
    }

    bool has_bias() const { return relative || of_key; }
    // Can single keys be finished, and their biases bounded without reading them all?
    bool screenable() const { return !p.bias.data && !holes && !(p.softcap > 0); }
    // The same as `finish` of one key.
    T finish_one(T x, std::int64_t query, std::int64_t key) const {
        if (p.softcap > 0) x = (tangent<T>(fill<T>(x) * T(1 / p.softcap)) * T(p.softcap))[0];
        if (relative) x = add(x, relative[key - query]);
        if (of_key) x = add(x, of_key[key]);
        if (!p.mask.data) return x;
        const auto* mask = static_cast<const std::uint8_t*>(p.mask.data) + p.mask.at(s->batch, h, query);
        return mask[key * p.mask.stride[3]] ? x : -std::numeric_limits<T>::infinity();
    }
    // The most that is added to a score of these keys; NaN where something is not finite.
    Added most_added(std::int64_t query, const Range& part) const {
        const double by_position = relative ? most(relative + (part.from - query), part.size()) : 0;
        const double by_key = of_key ? most(of_key + part.from, part.size()) : 0;
        return {by_position + by_key, std::fabs(by_position) + std::fabs(by_key)};
    }
    static double most(const T* x, std::int64_t n) {
        constexpr int W = Lanes<T>::W;
        Vec<T> best = fill<T>(std::numeric_limits<T>::lowest()), zero{};
        std::int64_t j = 0;
        for (; j + W <= n; j += W) {
            const Vec<T> v = load<T>(x + j);
            best = v > best ? v : best;
            zero += v - v;
        }
        T top = largest<T>(best), rest = sum<T>(zero);
        for (; j < n; ++j) {
            top = x[j] > top ? x[j] : top;
            rest += x[j] - x[j];
        }
        return double(top) + double(rest);
    }

    void cap(T* x, std::int64_t n) const {
        const T limit = T(p.softcap), inverse = T(1 / p.softcap);
        for (std::int64_t j = 0; j < n; j += Lanes<T>::W) store<T>(x + j, tangent<T>(load<T>(x + j) * inverse) * limit);
    }
    // d capped / d product at a product
    T cap_slope(T product) const {
        const double t = std::tanh(double(product) / p.softcap);
        return T(1 - t * t);
    }

    T mass(std::int64_t query, std::int64_t key) const {
        if (key < 0) return p.sink_mass.data ? T(static_cast<const double*>(p.sink_mass.data)[p.sink_mass.at(s->batch, h, 0)]) : T(1);
        T m = 1;
        if (p.mass.data) {
            m = read<T>(p.mass, p.mass.at(s->batch, h, query) + key * p.mass.stride[3]);
            if (p.mass_is_log) m = T(std::exp(m));
        }
        if (relative_mass) m *= relative_mass[key - query];
        if (of_key_mass) m *= of_key_mass[key];
        return m < kLeastMass ? T(0) : m;
    }
    void masses(std::int64_t query, std::int64_t from, std::int64_t to, T* out) const {
        const std::int64_t n = to - from;
        if (p.mass.data) {
            read_row<T>(p.mass, p.mass.at(s->batch, h, query) + from * p.mass.stride[3], p.mass.stride[3], n, out);
            if (p.mass_is_log)
                for (std::int64_t j = 0; j < n; ++j) out[j] = T(std::exp(out[j]));
        } else {
            for (std::int64_t j = 0; j < n; ++j) out[j] = 1;
        }
        if (relative_mass)
            for (std::int64_t j = 0; j < n; ++j) out[j] *= relative_mass[from + j - query];
        if (of_key_mass)
            for (std::int64_t j = 0; j < n; ++j) out[j] *= of_key_mass[from + j];
        for (std::int64_t j = 0; j < n; ++j) out[j] = out[j] < kLeastMass ? T(0) : out[j];
    }

    bool has_sink() const { return p.sink.data != nullptr; }
    T sink() const { return T(static_cast<const double*>(p.sink.data)[p.sink.at(s->batch, h, 0)]); }
};
