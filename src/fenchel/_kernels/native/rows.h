// Row maps: weights of rows of scores, and their derivative.

template <class T>
struct RowMap {
    const RowsProblem& p;
    Buffer<T> score, zeros;
    Buffer<std::int32_t> key;

    explicit RowMap(const RowsProblem& problem) : p(problem) {}

    void run(std::int64_t row) {
        constexpr int W = Lanes<T>::W;
        const std::int64_t n = p.keys;
        const Family<T> family(p.parameter_of(row));
        const T* s = static_cast<const T*>(p.scores) + row * n;
        T* w = p.weights ? static_cast<T*>(p.weights) + row * n : zeros.reserve(n + 64);
        Candidates<T> c{score.reserve(n + 64), key.reserve(n + 64), nullptr};
        Offset<T> at;
        T cut = first_cut(family, s, n / W * W, at);  // NaN and +inf pass every cut
        std::int64_t j = 0;
        const Vec<T> limit = fill<T>(cut);
        for (j = 0; j + W <= n; j += W) {
            const Vec<T> v = load<T>(s + j);
            const unsigned bits = above<T>(v, limit);
            store<T>(w + j, Vec<T>{});
            if (bits) c.count += append<T>(bits, v, std::int32_t(j), c.score + c.count, c.key + c.count);
        }
        for (; j < n; ++j) {
            w[j] = 0;
            if (!(s[j] <= cut)) {
                c.score[c.count] = s[j];
                c.key[c.count++] = std::int32_t(j);
            }
        }
        tighten(family, c, at, true);
        write(row, family, c, at, w);
    }

    void write(std::int64_t row, const Family<T>& family, Candidates<T>& c, const Offset<T>& at, T* w) {
        constexpr int W = Lanes<T>::W;
        p.offset[2 * row] = double(at.centre);
        p.offset[2 * row + 1] = c.count ? at.rest : HUGE_VAL;
        if (c.count && !(at.rest == at.rest)) {
            for (std::int64_t j = 0; j < p.keys; ++j) w[j] = std::numeric_limits<T>::quiet_NaN();
            return;
        }
        const T centre = at.centre, high = at.high(), low = at.low();
        for (std::int64_t i = 0; i < c.count; i += W)
            store<T>(c.score + i, ((load<T>(c.score + i) - centre) - high) - low);
        weights(family, c, c.score);
        if (c.count == 1) c.score[0] = 1;  // not 1 - 1e-16: a loss beyond its margin moves nothing
        for (std::int64_t i = 0; i < c.count; ++i) w[c.key[i]] = c.score[i];
    }
};

// ds = r (g - sum r g / sum r), r = p^(1 - eps) on the support.
template <class T>
struct RowMapGradient {
    const RowsGradient& p;
    Buffer<T> slope;

    explicit RowMapGradient(const RowsGradient& problem) : p(problem) {}

    Vec<T> response(Vec<T> w) const {
        const Vec<T> none{}, one = fill<T>(1);
        const Mask<T> on = w > none;  // a row without an answer, NaN, passes nothing on
        if (p.parameter == 1) return pick<T>(on, one, none);
        if (p.parameter == 0) return pick<T>(on, w, none);
        Vec<T> r = pick<T>(on, w, one);
        if (p.parameter == 0.5)
            for (int i = 0; i < Lanes<T>::W; ++i) r[i] = std::sqrt(r[i]);
        else
            r = exponential(logarithm(r) * T(1 - p.parameter));
        return pick<T>(on, r, none);
    }

    void run(std::int64_t row) {
        constexpr int W = Lanes<T>::W;
        const std::int64_t n = p.keys, whole = n / W * W;
        const T* w = static_cast<const T*>(p.weights) + row * n;
        const T* g = static_cast<const T*>(p.gradient) + row * n;
        T* out = static_cast<T*>(p.scores) + row * n;
        T* r = slope.reserve(n + 64);
        for (std::int64_t j = 0; j < whole; j += W) store<T>(r + j, response(load<T>(w + j)));
        for (std::int64_t j = whole; j < n; ++j) r[j] = response(fill<T>(w[j]))[0];
        double above = 0, below = 0;
        for (std::int64_t start = 0; start < whole; start += 32 * W) {
            Vec<T> a{}, b{};
            for (std::int64_t j = start; j < whole && j < start + 32 * W; j += W) {
                // a zero response must also silence an infinite gradient
                const Vec<T> x = load<T>(r + j);
                a += x > Vec<T>{} ? x * load<T>(g + j) : x;
                b += x;
            }
            above += sum<T>(a);
            below += sum<T>(b);
        }
        for (std::int64_t j = whole; j < n; ++j) {
            above += r[j] > 0 ? double(r[j]) * double(g[j]) : double(r[j]);
            below += r[j];
        }
        const T mean = below > 0 ? T(above / below) : T(0);
        for (std::int64_t j = 0; j < whole; j += W) {
            const Vec<T> x = load<T>(r + j);
            store<T>(out + j, x == Vec<T>{} ? x : x * (load<T>(g + j) - mean));
        }
        for (std::int64_t j = whole; j < n; ++j) out[j] = r[j] == 0 ? T(0) : r[j] * (g[j] - mean);
    }
};
