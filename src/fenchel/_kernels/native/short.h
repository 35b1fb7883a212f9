// Short rows: the thresholds of many rows at once, one row in each lane of a vector. A row of some hundred scores
// costs little to read and much to branch about, so that every key is visited in every step and no row waits for
// another's sums. What happens in a lane depends on its own row alone.

constexpr std::int64_t kShortRow = 256;  // keys

template <class T>
struct ShortRows {
    static constexpr int W = Lanes<T>::W, kTogether = 3;  // vectors at once hide each other's latency
    static constexpr std::int64_t kLanes = kBlock + 16;  // no power of two between two keys of a row
    static constexpr std::int64_t kFewRows = kLanes * kShort / kShortRow;  // whose short sums have a lane each

    Buffer<T> column;  // scores below the row's largest, then distances: [key][row]
    T top[kLanes];
    double rest[kLanes];
    bool broken[kLanes];

    // Memory for the scores of rows of up to n keys, [key][row].
    T* reserve(std::int64_t n) { return column.reserve((n + 8) * kLanes); }

    // Of the scores that were put there, -inf where a key is hidden. `top` is the largest score, and the threshold
    // top + rest; rows without any key have top = -inf. Square and ramp only.
    void solve(const Family<T>& family, std::int64_t rows, std::int64_t n, const std::int64_t* sizes) {
        T* u = column.get();
        for (std::int64_t i = 0; i < padded(rows, W); ++i)
            for (std::int64_t j = i < rows ? sizes[i] : 0; j < n; ++j) u[j * kLanes + i] = -std::numeric_limits<T>::infinity();
        for (std::int64_t first = 0; first < rows; first += kTogether * W)
            family.kind == Kind::square ? lanes<Kind::square>(family, n, u + first, first, rows - first)
                                        : lanes<Kind::ramp>(family, n, u + first, first, rows - first);
    }
    // Weights of all keys, [key][row]; NaN in rows without an answer.
    const T* weigh(const Family<T>& family, std::int64_t rows, std::int64_t n) {
        T* u = column.get();
        for (std::int64_t first = 0; first < rows; first += W) {
            Vec<T> extra{}, high, low;
            split<1>(rest + first, &high, &low);
            for (int i = 0; i < W; ++i)
                if (broken[first + i]) extra[i] = std::numeric_limits<T>::quiet_NaN();
            for (std::int64_t j = 0; j < n; ++j) {
                T* at = u + j * kLanes + first;
                Vec<T> p, r;
                const Vec<T> d = (load<T>(at) - high) - low;
                family.kind == Kind::square ? weigh_lane<Kind::square>(family, d, p, r) : weigh_lane<Kind::ramp>(family, d, p, r);
                store<T>(at, p + extra);
            }
        }
        return u;
    }
    // Distances from the threshold of what lies above it, and their keys, from a row of n scores.
    std::int64_t collect(std::int64_t lane, const T* x, std::int64_t n, std::int32_t first, T* distance, std::int32_t* key) const {
        const Vec<T> centre = fill<T>(top[lane]), none{};
        const T whole = T(rest[lane]);
        const Vec<T> high = fill<T>(whole), low = fill<T>(T(rest[lane] - double(whole)));
        std::int64_t found = 0;
        for (std::int64_t j = 0; j < n; j += W) {
            const Vec<T> d = ((load<T>(x + j) - centre) - high) - low;
            unsigned bits = above<T>(d, none);
            if (n - j < W) bits &= (1u << (n - j)) - 1;
            found += append<T>(bits, d, first + std::int32_t(j), distance + found, key + found);  // a branch is guessed wrong
        }
        return found;
    }
    // Few rows would leave most lanes empty. Every sum over a row is made of short ones over kShort keys: here each of
    // those has a lane, and the sums are the same.
    void solve_few(const Family<T>& family, std::int64_t rows, const T* const* x, const std::int64_t* sizes) {
        std::int64_t n = 0;
        for (std::int64_t i = 0; i < rows; ++i) n = std::max(n, sizes[i]);
        const std::int64_t parts = ceil_div(n, kShort);
        T* u = column.reserve(kShort * kLanes);
        for (std::int64_t i = 0; i < rows; ++i) lay_out(i, x[i], sizes[i], parts, u);
        family.kind == Kind::square ? threshold_of_few<Kind::square>(family, rows, parts, u)
                                    : threshold_of_few<Kind::ramp>(family, rows, parts, u);
    }
    // Weights of one of them; NaN where there is no answer. Written up to a whole vector.
    void weigh_row(const Family<T>& family, std::int64_t i, const T* x, std::int64_t n, T* w) const {
        const T whole = T(rest[i]);
        const Vec<T> best = fill<T>(top[i] > -std::numeric_limits<T>::infinity() ? top[i] : T(0));
        const Vec<T> high = fill<T>(whole), low = fill<T>(T(rest[i] - double(whole)));
        const Vec<T> extra = fill<T>(broken[i] ? std::numeric_limits<T>::quiet_NaN() : T(0));
        for (std::int64_t j = 0; j < n; j += W) {
            Vec<T> p, r;
            const Vec<T> d = ((load<T>(x + j) - best) - high) - low;
            family.kind == Kind::square ? weigh_lane<Kind::square>(family, d, p, r) : weigh_lane<Kind::ramp>(family, d, p, r);
            store<T>(w + j, p + extra);
        }
    }

    template <Kind K>
    static void weigh_lane(const Family<T>& family, Vec<T> d, Vec<T>& p, Vec<T>& r) {
        fenchel::FENCHEL_VARIANT::weigh<T, K>(family, d, p, r);
    }

    template <Kind K>
    void lanes(const Family<T>& family, std::int64_t n, T* u, std::int64_t first, std::int64_t rows) {
        if (rows > 2 * W) return lanes<K, 3>(family, n, u, first);
        if (rows > W) return lanes<K, 2>(family, n, u, first);
        lanes<K, 1>(family, n, u, first);
    }
    template <Kind K, int V>
    void lanes(const Family<T>& family, std::int64_t n, T* u, std::int64_t first) {
        const Vec<T> hidden = fill<T>(-std::numeric_limits<T>::infinity()), most = fill<T>(std::numeric_limits<T>::max());
        Vec<T> best[V];
        Mask<T> bad[V] = {};
        for (int v = 0; v < V; ++v) best[v] = hidden;
        for (std::int64_t j = 0; j < n; ++j)
            for (int v = 0; v < V; ++v) {
                const Vec<T> s = load<T>(u + j * kLanes + v * W);
                best[v] = s > best[v] ? s : best[v];
                bad[v] |= ~(s <= most);
            }
        for (int v = 0; v < V; ++v) {
            store<T>(top + first + v * W, best[v]);
            for (int i = 0; i < W; ++i) broken[first + v * W + i] = bad[v][i] != 0;
            best[v] = best[v] > hidden ? best[v] : Vec<T>{};
        }
        for (std::int64_t j = 0; j < n; ++j)
            for (int v = 0; v < V; ++v) store<T>(u + j * kLanes + v * W, load<T>(u + j * kLanes + v * W) - best[v]);
        threshold<K, V>(family, n, u, rest + first);
    }

    template <int V>
    static void split(const double* at, Vec<T>* high, Vec<T>* low) {
        T whole[V * W], left[V * W];
        for (int i = 0; i < V * W; ++i) {
            whole[i] = T(at[i]);
            left[i] = T(at[i] - double(whole[i]));
        }
        for (int v = 0; v < V; ++v) {
            high[v] = load<T>(whole + v * W);
            low[v] = load<T>(left + v * W);
        }
    }

    // Newton's steps from the left, as in `newton`; a row that has arrived stays where it is.
    template <Kind K>
    struct Newton {
        static constexpr double ulp = std::numeric_limits<T>::epsilon();
        static constexpr int kMost = 60;  // steps
        const double tolerance = K == Kind::square ? 0.25 * std::sqrt(ulp) : 0.25 * ulp;

        void step(double& at, double& running, double mass, double slope, double& before) const {
            const double gain = K == Kind::square ? 2 - 2 / std::sqrt(mass) : 1 - 1 / mass;
            const double step = mass * gain / slope;
            const double taken = step == step ? step : 0;  // a row without keys, or with NaN
            at += running * taken;
            const bool arrived = K == Kind::ramp && slope == before;  // the same keys again: the sum is linear
            running = !arrived && std::fabs(taken) * slope > tolerance * mass ? running : 0;
            before = slope;
        }
        // What short sums add to the long ones, which are double.
        static void add(T short_mass, T short_slope, double& mass, double& slope) {
            mass += double(short_mass) * (K == Kind::square ? 0.25 : 1);
            slope += double(short_slope) * (K == Kind::square ? 0.5 : 1);
        }
    };

    template <Kind K, int V>
    static void threshold(const Family<T>& family, std::int64_t n, const T* u, double* at) {
        const Newton<K> newton;
        double running[V * W], mass[V * W], slope[V * W], before[V * W] = {};
        for (int i = 0; i < V * W; ++i) running[i] = 1, at[i] = -family.room(1);
        for (int k = 0; k < newton.kMost; ++k) {
            for (int i = 0; i < V * W; ++i) at[i] = running[i] != 0 ? double(T(at[i])) : at[i];  // where sums are taken
            sums<K, V>(n, u, at, mass, slope);
            double any = 0;
            for (int i = 0; i < V * W; ++i) {
                newton.step(at[i], running[i], mass[i], slope[i], before[i]);
                any += running[i];
            }
            if (any == 0) return;
        }
    }
    template <Kind K, int V>
    static void sums(std::int64_t n, const T* u, const double* at, double* mass, double* slope) {
        Vec<T> high[V], low[V];
        split<V>(at, high, low);
        for (int i = 0; i < V * W; ++i) mass[i] = slope[i] = 0;
        for (std::int64_t start = 0; start < n; start += kShort) {
            T short_mass[V * W], short_slope[V * W];
            short_sums<K, V>(std::min(kShort, n - start), u + start * kLanes, high, short_mass, short_slope);
            for (int i = 0; i < V * W; ++i) Newton<K>::add(short_mass[i], short_slope[i], mass[i], slope[i]);
        }
    }
    template <Kind K, int V>
    static void short_sums(std::int64_t n, const T* u, const Vec<T>* high, T* mass, T* slope) {
        const Vec<T> none{}, one = fill<T>(1);
        Vec<T> p[V] = {}, r[V] = {};
        for (std::int64_t j = 0; j < n; ++j)
            for (int v = 0; v < V; ++v) {
                const Vec<T> d = at_least<T>(load<T>(u + j * kLanes + v * W) - high[v], 0);
                if constexpr (K == Kind::square) {  // of y = d / 2; see `add`
                    p[v] += d * d;
                    r[v] += d;
                } else {
                    p[v] += d;
                    r[v] += d > none ? one : none;
                }
            }
        for (int v = 0; v < V; ++v) {
            store<T>(mass + v * W, p[v]);
            store<T>(slope + v * W, r[v]);
        }
    }

    // u[j][i * parts + part] = score of key part * kShort + j of row i below its largest
    void lay_out(std::int64_t i, const T* x, std::int64_t n, std::int64_t parts, T* u) {
        const T hidden = -std::numeric_limits<T>::infinity(), most = std::numeric_limits<T>::max();
        Vec<T> largest = fill<T>(hidden);
        Mask<T> above{};
        std::int64_t whole = 0;
        for (; whole + W <= n; whole += W) {
            const Vec<T> s = load<T>(x + whole);
            largest = s > largest ? s : largest;
            above |= ~(s <= fill<T>(most));
        }
        T best = hidden;
        bool bad = false;
        for (int k = 0; k < W; ++k) {
            best = largest[k] > best ? largest[k] : best;
            bad |= above[k] != 0;
        }
        for (std::int64_t j = whole; j < n; ++j) {
            best = x[j] > best ? x[j] : best;
            bad |= !(x[j] <= most);
        }
        top[i] = best;
        broken[i] = bad;
        best = best > hidden ? best : T(0);
        for (std::int64_t part = 0; part < parts; ++part) {
            T* to = u + i * parts + part;
            for (std::int64_t j = 0; j < kShort; ++j)
                to[j * kLanes] = part * kShort + j < n ? x[part * kShort + j] - best : hidden;
        }
    }
    template <Kind K>
    void threshold_of_few(const Family<T>& family, std::int64_t rows, std::int64_t parts, const T* u) {
        const Newton<K> newton;
        const std::int64_t lanes = rows * parts;
        double running[kFewRows], before[kFewRows] = {};
        T high[kLanes] = {}, short_mass[kLanes], short_slope[kLanes];
        for (std::int64_t i = 0; i < rows; ++i) running[i] = 1, rest[i] = -family.room(1);
        for (int k = 0; k < newton.kMost; ++k) {
            for (std::int64_t i = 0; i < rows; ++i) {
                rest[i] = running[i] != 0 ? double(T(rest[i])) : rest[i];
                for (std::int64_t part = 0; part < parts; ++part) high[i * parts + part] = T(rest[i]);
            }
            for (std::int64_t first = 0; first < lanes; first += 2 * W) {
                const Vec<T> at[2] = {load<T>(high + first), load<T>(high + std::min(first + W, kLanes - W))};
                lanes - first > W ? short_sums<K, 2>(kShort, u + first, at, short_mass + first, short_slope + first)
                                  : short_sums<K, 1>(kShort, u + first, at, short_mass + first, short_slope + first);
            }
            double any = 0;
            for (std::int64_t i = 0; i < rows; ++i) {
                double mass = 0, slope = 0;
                for (std::int64_t part = i * parts; part < (i + 1) * parts; ++part)
                    newton.add(short_mass[part], short_slope[part], mass, slope);
                newton.step(rest[i], running[i], mass, slope, before[i]);
                any += running[i];
            }
            if (any == 0) return;
        }
    }

    // Rows to lanes. Memory of a row may be read as far as the longest one goes.
    static void flip(const T* const* x, std::int64_t rows, std::int64_t n, T* u) {
        std::int64_t i = 0;
#if defined(__AVX2__)
        if constexpr (sizeof(T) == 4)
            for (; i + 8 <= rows; i += 8)
                for (std::int64_t j = 0; j < n; j += 8) {
                    __m256 r[8];
                    for (int k = 0; k < 8; ++k) r[k] = _mm256_loadu_ps(x[i + k] + j);
                    transpose(r);
                    for (int k = 0; k < 8; ++k) _mm256_storeu_ps(u + (j + k) * kLanes + i, r[k]);
                }
#endif
        for (; i < rows; ++i)
            for (std::int64_t j = 0; j < n; ++j) u[j * kLanes + i] = x[i][j];
    }
};
