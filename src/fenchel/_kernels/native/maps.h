// Row maps beside Tsallis': normmax, the budgeted projection, fusedmax on a line. Each has a worker
// for the weights of a row of scores, and one for the derivative, which the weights alone determine.
// A row with NaN or +inf becomes NaN, a row of -inf zeros, as `solve` has it.

// What is known of a row after one pass over it.
template <class T>
struct RowRange {
    T top = -std::numeric_limits<T>::infinity();
    std::int64_t live = 0;
    bool broken = false;

    RowRange(const T* s, std::int64_t n) {
        constexpr int W = Lanes<T>::W;
        const T lowest = -std::numeric_limits<T>::infinity(), most = std::numeric_limits<T>::max();
        Vec<T> best = fill<T>(lowest);
        Mask<T> alive{}, strange{};
        std::int64_t j = 0;
        for (; j + W <= n; j += W) {
            const Vec<T> v = load<T>(s + j);
            best = v > best ? v : best;
            alive -= v > fill<T>(lowest);  // a mask is -1
            strange |= ~(v <= fill<T>(most));
        }
        for (int i = 0; i < W; ++i) {
            live += alive[i];
            broken |= strange[i] != 0;
        }
        top = largest<T>(best);
        for (; j < n; ++j) {
            top = s[j] > top ? s[j] : top;
            live += s[j] > lowest;
            broken |= !(s[j] <= most);
        }
    }
};

// The score a step of one below, and a little more: the difference of large scores is rounded.
template <class T>
inline T one_below(T score) {
    return score - 1 - 4 * std::numeric_limits<T>::epsilon() * std::fabs(score);
}

template <class T>
inline void fill_row(T* w, std::int64_t n, T value) {
    for (std::int64_t j = 0; j < n; ++j) w[j] = value;
}

// The scores above a cut with their keys, padded to whole vectors.
template <class T>
struct Selection {
    Buffer<T> score;
    Buffer<std::int32_t> key;
    std::int64_t count = 0;

    void take(const T* s, std::int64_t n, T cut) {
        constexpr int W = Lanes<T>::W;
        T* to = score.reserve(n + 64);
        std::int32_t* keys = key.reserve(n + 64);
        const std::int64_t whole = n / W * W;
        count = collect_above<T>(s, whole, cut, 0, to, keys);
        for (std::int64_t j = whole; j < n; ++j)
            if (s[j] > cut) {
                to[count] = s[j];
                keys[count++] = std::int32_t(j);
            }
        for (int i = 0; i < W; ++i) to[count + i] = -std::numeric_limits<T>::infinity();
    }
};

// ---- |[s - t]_+|_q = 1, weights [s - t]_+^(q - 1) normalised; q - 1 = 1 / eps.

template <class T>
struct NormMap {
    const RowsProblem& p;
    Selection<T> chosen;

    explicit NormMap(const RowsProblem& problem) : p(problem) {}

    // [s - t]_+ and its power q - 1, t = top + rest.
    void powers(Vec<T> s, T top, double rest, T power, Vec<T>& y, Vec<T>& r) const {
        const T high = T(rest), low = T(rest - double(high));
        y = ((s - top) - high) - low;
        const Mask<T> on = y > fill<T>(std::numeric_limits<T>::min());
        const Vec<T> safe = pick<T>(on, y, fill<T>(1));
        r = pick<T>(on, power == 1 ? safe : exponential(logarithm(safe) * power), Vec<T>{});
        y = pick<T>(on, y, Vec<T>{});
    }

    // Newton on the norm from t = top - 1, where the largest key alone has norm one: a norm of an
    // affine function is convex, so that every step stays left of the root.
    double threshold(T top, double eps) const {
        constexpr int W = Lanes<T>::W;
        const double share = 1 / (1 + eps), ulp = std::numeric_limits<T>::epsilon();  // share = (q - 1) / q
        double rest = -1;
        for (int step = 0; step < 100; ++step) {
            double mass = 0, slope = 0;
            for (std::int64_t i = 0; i < chosen.count; i += W) {
                Vec<T> y, r;
                powers(load<T>(chosen.score.get() + i), top, rest, T(1 / eps), y, r);
                mass += sum<T>(r * y);
                slope += sum<T>(r);
            }
            const double move = (mass - std::pow(mass, share)) / slope;
            if (!(move > 0.25 * ulp * -rest)) break;
            rest += move;
        }
        return rest;
    }

    void run(std::int64_t row) {
        constexpr int W = Lanes<T>::W;
        const std::int64_t n = p.keys;
        const double eps = p.parameter_of(row);
        const T* s = static_cast<const T*>(p.scores) + row * n;
        T* w = static_cast<T*>(p.weights) + row * n;
        const RowRange<T> range(s, n);
        fill_row<T>(w, n, range.broken ? std::numeric_limits<T>::quiet_NaN() : T(0));
        if (range.broken || range.live == 0) return;
        chosen.take(s, n, one_below(range.top));
        const double rest = threshold(range.top, eps);
        T* score = chosen.score.get();
        double total = 0;
        for (std::int64_t i = 0; i < chosen.count; i += W) {
            Vec<T> y, r;
            powers(load<T>(score + i), range.top, rest, T(1 / eps), y, r);
            total += sum<T>(r);
            store<T>(score + i, r);
        }
        const T factor = T(1 / total);
        for (std::int64_t i = 0; i < chosen.count; ++i) w[chosen.key.get()[i]] = score[i] * factor;
    }
};

// ds = m - p sum m with m = r (g - <p, g>), r = p^(1 - eps) |p|^eps / eps.
template <class T>
struct NormMapGradient {
    const RowsGradient& p;
    Selection<T> chosen;

    explicit NormMapGradient(const RowsGradient& problem) : p(problem) {}

    void run(std::int64_t row) {
        const std::int64_t n = p.keys;
        const double eps = p.parameter;
        const T* w = static_cast<const T*>(p.weights) + row * n;
        const T* g = static_cast<const T*>(p.gradient) + row * n;
        T* out = static_cast<T*>(p.scores) + row * n;
        fill_row<T>(out, n, T(0));
        if (n && w[0] != w[0]) return;  // a row without an answer passes nothing on
        chosen.take(w, n, 0);
        const T* weight = chosen.score.get();
        const std::int32_t* key = chosen.key.get();
        double mean = 0, powers = 0;
        for (std::int64_t i = 0; i < chosen.count; ++i) {
            mean += double(weight[i]) * double(g[key[i]]);
            powers += eps == 1 ? double(weight[i]) * weight[i] : std::pow(double(weight[i]), 1 + eps);
        }
        const double size = std::pow(powers, eps / (1 + eps)) / eps;  // |p|^eps / eps
        double total = 0;
        for (std::int64_t i = 0; i < chosen.count; ++i) {
            const double r = eps == 1 ? size : std::pow(double(weight[i]), 1 - eps) * size;
            const double move = r * (double(g[key[i]]) - mean);
            total += move;
            out[key[i]] = T(move);
        }
        for (std::int64_t i = 0; i < chosen.count; ++i) out[key[i]] -= T(double(weight[i]) * total);
    }
};

// ---- sum clip(s - t, 0, 1) = k.

template <class T>
struct BudgetMap {
    const RowsProblem& p;
    Selection<T> chosen;

    explicit BudgetMap(const RowsProblem& problem) : p(problem) {}

    // A cut that leaves every key which can get anything: t is at least the ceil(k)-th largest score
    // less one. The largest of a few dozen stretches of the row bound that score from below.
    static T first_cut(const T* s, std::int64_t n, std::int64_t rank) {
        constexpr int W = Lanes<T>::W, groups = 4;
        const T lowest = -std::numeric_limits<T>::infinity();
        if (rank > groups * W) return lowest;
        Vec<T> best[groups] = {fill<T>(lowest), fill<T>(lowest), fill<T>(lowest), fill<T>(lowest)};
        for (std::int64_t j = 0, g = 0; j + W <= n; j += W, g = (g + 1) % groups) {
            const Vec<T> v = load<T>(s + j);
            best[g] = v > best[g] ? v : best[g];
        }
        T top[groups * W];
        for (int g = 0; g < groups; ++g) store<T>(top + g * W, best[g]);
        std::nth_element(top, top + (rank - 1), top + groups * W, [](T a, T b) { return a > b; });
        return one_below(top[rank - 1]);
    }

    struct Piece {
        double filled = 0, inside = 0;  // sum of clips, sum of the free scores
        std::int64_t free = 0, full = 0;
    };

    // Of the chosen keys at the threshold centre + t.
    Piece at(double centre, double t) const {
        Piece piece;
        for (std::int64_t i = 0; i < chosen.count; ++i) {
            const double z = double(chosen.score.get()[i]) - centre, y = z - t;
            if (y >= 1) {
                ++piece.full;
            } else if (y > 0) {
                ++piece.free;
                piece.inside += z;
                piece.filled += y;
            }
        }
        piece.filled += double(piece.full);
        return piece;
    }

    // The sum is piecewise linear and falls with t. Solving the piece at hand is Newton's step; it
    // ends when it meets its own piece again, and halves the bracket where it would leave it.
    double threshold(double centre, double low, double high, double k) const {
        double t = low + (high - low) / 2;
        for (int step = 0; step < 200; ++step) {
            const Piece piece = at(centre, t);
            (piece.filled >= k ? low : high) = t;
            double next = piece.free ? (piece.inside + double(piece.full) - k) / double(piece.free) : HUGE_VAL;
            if (std::fabs(next - t) <= 2 * std::numeric_limits<double>::epsilon()) return next;
            if (!(next > low && next < high)) next = low + (high - low) / 2;
            if (next <= low || next >= high) return next;
            t = next;
        }
        return t;
    }

    void run(std::int64_t row) {
        const std::int64_t n = p.keys;
        const double k = p.parameter_of(row);
        const T* s = static_cast<const T*>(p.scores) + row * n;
        T* w = static_cast<T*>(p.weights) + row * n;
        const RowRange<T> range(s, n);
        const bool unsolved = range.broken || (range.live && double(range.live) < k);
        fill_row<T>(w, n, unsolved ? std::numeric_limits<T>::quiet_NaN() : T(0));
        if (unsolved || range.live == 0) return;
        chosen.take(s, n, first_cut(s, n, std::int64_t(std::ceil(k))));
        const T* score = chosen.score.get();
        // Differences from the ceil(k)-th largest score are exact for the keys that are free.
        T* ranked = order.reserve(chosen.count + 64);
        std::memcpy(ranked, score, chosen.count * sizeof(T));
        const std::int64_t rank = std::int64_t(std::ceil(k)) - 1;
        std::nth_element(ranked, ranked + rank, ranked + chosen.count, [](T a, T b) { return a > b; });
        const double centre = double(ranked[rank]);
        const double t = threshold(centre, -1, 0, k);
        for (std::int64_t i = 0; i < chosen.count; ++i) {
            const double y = (double(score[i]) - centre) - t;
            w[chosen.key.get()[i]] = T(y <= 0 ? 0 : y >= 1 ? 1 : y);
        }
    }

    Buffer<T> order;
};

// Full and empty keys stay where they are; the free ones move together.
template <class T>
struct BudgetMapGradient {
    const RowsGradient& p;

    explicit BudgetMapGradient(const RowsGradient& problem) : p(problem) {}

    void run(std::int64_t row) {
        const std::int64_t n = p.keys;
        const T* w = static_cast<const T*>(p.weights) + row * n;
        const T* g = static_cast<const T*>(p.gradient) + row * n;
        T* out = static_cast<T*>(p.scores) + row * n;
        double total = 0, count = 0;
        for (std::int64_t j = 0; j < n; ++j)
            if (w[j] > 0 && w[j] < 1) {
                total += g[j];
                ++count;
            }
        const T mean = count > 0 ? T(total / count) : T(0);
        for (std::int64_t j = 0; j < n; ++j)
            out[j] = w[j] > 0 && w[j] < 1 ? g[j] - mean : T(0);
    }
};

// ---- sparsemax of the chain's total-variation proximal point. Finite scores only.

// argmin_x |x - s|^2 / 2 + lam sum |x_{i+1} - x_i| by dynamic programming (Johnson, 2013): the
// derivative of the best cost of the first i keys, as a function of x_i, is piecewise linear; the
// penalty clips it to [-lam, lam], which cuts pieces off at both ends and adds one at each. What is
// cut off is cut once: the time is linear in the number of keys.
struct Chain {
    Buffer<double> knot, slope, shift;    // of the pieces: where one ends, and what changes there
    Buffer<double> lower, upper;          // where x_i stops following x_{i+1}
    Buffer<double> x;

    const double* solve(std::int64_t n, double lam) {  // x holds the scores on entry
        double* value = x.get();
        if (n <= 1 || lam == 0) return value;
        double *at = knot.reserve(2 * n), *a = slope.reserve(2 * n), *b = shift.reserve(2 * n);
        double *down = lower.reserve(n), *up = upper.reserve(n);
        std::int64_t left = n, right = n - 1;  // no knots yet
        for (std::int64_t i = 0; i + 1 < n; ++i) {
            // The derivative of this key's own cost is x - s; at both ends the clipped rest is flat.
            const double edge = i ? lam : 0;
            double a_left = 1, b_left = -value[i] - edge, a_right = 1, b_right = -value[i] + edge;
            while (left <= right && a_left * at[left] + b_left <= -lam) {
                a_left += a[left];
                b_left += b[left++];
            }
            down[i] = (-lam - b_left) / a_left;
            while (right >= left && a_right * at[right] + b_right >= lam) {
                a_right -= a[right];
                b_right -= b[right--];
            }
            up[i] = (lam - b_right) / a_right;
            --left;
            at[left] = down[i];
            a[left] = a_left;
            b[left] = b_left + lam;
            ++right;
            at[right] = up[i];
            a[right] = -a_right;
            b[right] = lam - b_right;
        }
        double a_left = 1, b_left = -value[n - 1] - lam;
        while (left <= right && a_left * at[left] + b_left <= 0) {
            a_left += a[left];
            b_left += b[left++];
        }
        value[n - 1] = -b_left / a_left;
        for (std::int64_t i = n - 2; i >= 0; --i) {
            const double next = value[i + 1];
            value[i] = next < down[i] ? down[i] : next > up[i] ? up[i] : next;
        }
        return value;
    }
};

template <class T>
struct FusedMap {
    const RowsProblem& p;
    Chain chain;
    Selection<double> chosen;

    explicit FusedMap(const RowsProblem& problem) : p(problem) {}

    void run(std::int64_t row) {
        const std::int64_t n = p.keys;
        const T* s = static_cast<const T*>(p.scores) + row * n;
        T* w = static_cast<T*>(p.weights) + row * n;
        const RowRange<T> range(s, n);
        const bool finite = !range.broken && range.live == n;
        fill_row<T>(w, n, finite ? T(0) : std::numeric_limits<T>::quiet_NaN());
        if (!finite) return;
        double* x = chain.x.reserve(n + 64);
        for (std::int64_t j = 0; j < n; ++j) x[j] = double(s[j]) - double(range.top);
        chain.solve(n, p.parameter_of(row));
        const Family<double> ramp(1);
        const double top = RowRange<double>(x, n).top;
        chosen.take(x, n, one_below(top));
        Candidates<double> c{chosen.score.get(), chosen.key.get(), nullptr, chosen.count};
        Offset<double> at;
        tighten(ramp, c, at, true);
        for (std::int64_t i = 0; i < c.count; ++i) {
            const double y = (c.score[i] - at.centre) - at.rest;
            w[c.key[i]] = T(y > 0 ? y : 0);
        }
    }
};

// Runs of equal weight move together: each by its mean gradient, less that of the support.
template <class T>
struct FusedMapGradient {
    const RowsGradient& p;

    explicit FusedMapGradient(const RowsGradient& problem) : p(problem) {}

    void run(std::int64_t row) {
        const std::int64_t n = p.keys;
        const T* w = static_cast<const T*>(p.weights) + row * n;
        const T* g = static_cast<const T*>(p.gradient) + row * n;
        T* out = static_cast<T*>(p.scores) + row * n;
        double total = 0, count = 0;
        for (std::int64_t j = 0; j < n; ++j)
            if (w[j] > 0) {
                total += g[j];
                ++count;
            }
        const double mean = count > 0 ? total / count : 0;
        for (std::int64_t j = 0; j < n;) {
            std::int64_t stop = j + 1;
            double inside = g[j];
            for (; stop < n && w[stop] == w[j] && w[j] > 0; ++stop) inside += g[stop];
            const T move = w[j] > 0 ? T(inside / double(stop - j) - mean) : T(0);
            for (; j < stop; ++j) out[j] = move;
        }
    }
};
