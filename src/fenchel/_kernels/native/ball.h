// Expectations of Gaussians under truncated paraboloids, one pair at a time: `continuous/ball.py` and
// `continuous/expectations.py` say what is computed. Here the nodes of an axis are the lanes, and
// their number follows from how much of the Gaussian a piece of the window holds.

// Integrals of N, u N and u u' N over a ball.
template <int D>
struct Moments {
    double zeroth = 0, first[D] = {}, second[D][D] = {};
};

// Over [-radius, radius], of N(x; centre, deviation^2): (Farinhas, 2021, eqs. A.18 to A.20).
struct Interval {
    double b, deviation, inverse, sign, far;

    // far: deviations after which the rest of the Gaussian is nothing against what came before.
    Interval(double centre, double size, double reach)
        : b(std::fabs(centre)), deviation(size), inverse(1 / size), sign(centre > 0 ? -1 : 1), far(reach + 1) {}

    struct Values {
        Vec<double> zeroth, first, second;
    };

    __attribute__((always_inline)) Values operator()(Vec<double> radius) const {
        const Vec<double> low = (b - radius) * inverse, high = (b + radius) * inverse;
        const Mask<double> left = low < Vec<double>{};
        const Vec<double> distance = left ? -low : low;
        Vec<double> low_bell{}, high_bell{}, beyond{}, past{};
        if (above<double>(fill<double>(far), -low)) {
            low_bell = exponential(low * low * -0.5);
            beyond = tail(distance, low_bell);
        }
        if (above<double>(fill<double>(far), left ? high : high - low)) {
            high_bell = exponential(high * high * -0.5);
            past = tail(high, high_bell);
        }
        const double size = deviation * 0.3989422804014327;
        Values v;
        v.zeroth = (left ? 1.0 - beyond : beyond) - past;
        v.first = (low_bell - high_bell) * size - v.zeroth * b;
        v.second = v.zeroth * (b * b + deviation * deviation) -
                   ((b + radius) * low_bell - (b - radius) * high_bell) * size;
        // Over a short piece of a wide Gaussian those are differences of equal numbers.
        const Vec<double> change = (high - low) * (high + 1.0);
        if (above<double>(change, fill<double>(kShort)) != (1u << Lanes<double>::W) - 1) few(radius, change <= kShort, v);
        v.first *= sign;
        return v;
    }

    static constexpr double kShort = 0.05;

    // By Gauss's rule with four nodes, where `chosen`.
    void few(Vec<double> radius, Mask<double> chosen, Values& v) const {
        static constexpr double x[] = {0.3399810435848563, 0.8611363115940526};
        static constexpr double w[] = {0.6521451548625461, 0.3478548451374538};
        Values s{};
        for (int i = 0; i < 4; ++i) {
            const Vec<double> y = radius * (i % 2 ? x[i / 2] : -x[i / 2]), z = (y + b) * inverse;
            const Vec<double> value = exponential(z * z * -0.5) * w[i / 2];
            s.zeroth += value;
            s.first += value * y;
            s.second += value * y * y;
        }
        const Vec<double> size = radius * (0.3989422804014327 * inverse);
        v.zeroth = pick<double>(chosen, s.zeroth * size, v.zeroth);
        v.first = pick<double>(chosen, s.first * size, v.first);
        v.second = pick<double>(chosen, s.second * size, v.second);
    }
};

// Angles between which an axis is integrated, cut where the other axes' Gaussian begins to leave the ball.
struct Window {
    double sine[4], angle[4];  // of the ends of the pieces
    int pieces;
    bool whole;  // one piece, in which that Gaussian is nowhere all inside

    static double within(double x, double low, double high) { return x < low ? low : x > high ? high : x; }
    // The sine of the angle where the ball that is left has this radius, of 1.
    static double sine_at(double rest) { return std::sqrt(1 - rest * rest); }

    Window(double centre, double deviation, double inner, double inner_deviation, double radius, double reach) {
        const double outside = std::fabs(centre) > radius ? std::fabs(centre) - radius : 0;
        const double half = std::sqrt(outside * outside + reach * reach * deviation * deviation);
        const double past = inner > radius ? inner - radius : 0;
        const double spread = std::sqrt(past * past + reach * reach * inner_deviation * inner_deviation);
        const double stop = sine_at(within((inner - spread) / radius, 0, 1));
        const double start = sine_at(within((inner + spread) / radius, 0, 1));
        const double low = within((centre - half) / radius, -stop, stop);
        const double high = within((centre + half) / radius, -stop, stop);
        whole = !(start > 0);
        pieces = whole ? 1 : 3;
        sine[0] = low;
        sine[1] = whole ? high : within(-start, low, high);
        sine[2] = within(start, low, high);
        sine[3] = high;
        for (int i = 0; i <= pieces; ++i) angle[i] = i && sine[i] == sine[i - 1] ? angle[i - 1] : std::asin(sine[i]);
    }
};

struct Ball {
    const BallProblem& p;

    explicit Ball(const BallProblem& problem) : p(problem) {}

    // Nodes of a piece, fitted to what 6,000 pairs of all shapes need for a hundredth of the tolerance:
    // `half` and `turn` are half the piece in deviations of this axis' Gaussian and of the others'.
    std::int64_t nodes(const Window& window, int piece, double half, double turn) const {
        const double d = p.digits;
        double n = 7 + d * (2.0 / 3) + (2.4 + 0.3 * d) * half;
        if (!window.whole)
            n = 4.5 + (piece == 1 ? (2.6 + 0.15 * d) * half : (3.2 + 0.15 * d) * std::sqrt(half * half + turn * turn));
        if (!(n < kMostNodes)) return kMostNodes;
        return (std::int64_t(n / kNodeStep) + 1) * kNodeStep;
    }

    // visit(angles, weights) for all nodes of the window, a vector at a time.
    template <class Visit>
    __attribute__((always_inline)) void sweep(const Window& window, double deviation, double inner_deviation, double radius,
                                              Visit&& visit) const {
        for (int piece = 0; piece < window.pieces; ++piece) {
            const double low = window.angle[piece], high = window.angle[piece + 1];
            if (high <= low) continue;  // NaN goes on, and makes the sums NaN
            const double from = window.sine[piece], to = window.sine[piece + 1];
            const double half = radius * (to - from) / (2 * deviation);
            const double turn = radius * (Window::sine_at(to) - Window::sine_at(from)) / (2 * inner_deviation);
            const std::int64_t n = nodes(window, piece, half, turn);
            const double* x = p.nodes + (n / kNodeStep - 1) * kMostNodes;
            const double* w = p.weights + (n / kNodeStep - 1) * kMostNodes;
            const double middle = (low + high) / 2, span = (high - low) / 2;
            for (std::int64_t i = 0; i < n; i += Lanes<double>::W)
                visit(load<double>(x + i) * span + middle, load<double>(w + i) * span);
        }
    }

    // Of N(u; a, diag(m^2)) over the ball of this radius; the widest axis first.
    Moments<1> moments(const double (&a)[1], const double (&m)[1], double radius) const {
        const auto v = Interval(a[0], m[0], p.reach)(fill<double>(radius));
        return {v.zeroth[0], {v.first[0]}, {{v.second[0]}}};
    }

    Moments<2> moments(const double (&a)[2], const double (&m)[2], double radius) const {
        const Window window(a[1], m[1], std::fabs(a[0]), m[0], radius, p.reach);
        const Interval interval(a[0], m[0], p.reach);
        const double across = a[1], inverse = 1 / m[1], size = 0.3989422804014327 / m[1];
        Vec<double> s0{}, sx{}, sy{}, sxx{}, sxy{}, syy{};
        sweep(window, m[1], m[0], radius, [&](Vec<double> angle, Vec<double> w) __attribute__((always_inline)) {
            const Vec<double> y = sine(angle) * radius, rest = cosine(angle) * radius, z = (y - across) * inverse;
            const Vec<double> weight = exponential(z * z * -0.5) * w * rest * size;
            const auto v = interval(rest);
            const Vec<double> zeroth = weight * v.zeroth, first = weight * v.first, line = zeroth * y;
            s0 += zeroth;
            sx += first;
            sy += line;
            sxx += weight * v.second;
            sxy += first * y;
            syy += line * y;
        });
        const double mixed = sum<double>(sxy);
        return {sum<double>(s0), {sum<double>(sx), sum<double>(sy)}, {{sum<double>(sxx), mixed}, {mixed, sum<double>(syy)}}};
    }

    Moments<3> moments(const double (&a)[3], const double (&m)[3], double radius) const {
        const Window window(a[2], m[2], std::sqrt(a[0] * a[0] + a[1] * a[1]), m[0], radius, p.reach);
        const double plane_a[2] = {a[0], a[1]}, plane_m[2] = {m[0], m[1]};
        const double size = 0.3989422804014327 / m[2];
        Moments<3> s;
        sweep(window, m[2], m[0], radius, [&](Vec<double> angle, Vec<double> w) {
            const Vec<double> y = sine(angle) * radius, rest = cosine(angle) * radius, z = (y - a[2]) / m[2];
            const Vec<double> weight = exponential(z * z * -0.5) * w * rest * size;
            for (int lane = 0; lane < Lanes<double>::W; ++lane)
                if (!(weight[lane] == 0)) add(s, moments(plane_a, plane_m, rest[lane]), weight[lane], y[lane]);
        });
        for (int i = 0; i < 2; ++i) s.second[2][i] = s.second[i][2];
        return s;
    }

    static void add(Moments<3>& s, const Moments<2>& plane, double weight, double y) {
        s.zeroth += weight * plane.zeroth;
        s.first[2] += weight * plane.zeroth * y;
        s.second[2][2] += weight * plane.zeroth * y * y;
        for (int i = 0; i < 2; ++i) {
            s.first[i] += weight * plane.first[i];
            s.second[i][2] += weight * plane.first[i] * y;
            for (int j = 0; j < 2; ++j) s.second[i][j] += weight * plane.second[i][j];
        }
    }

    void run(std::int64_t pair) const {
        if (p.dim == 1) expect<1>(pair);
        if (p.dim == 2) expect<2>(pair);
        if (p.dim == 3) expect<3>(pair);
    }

    template <int D>
    void expect(std::int64_t pair) const {
        double factor[D][D], inverse[D][D], other[D][D], axes[D][D], at[D], centre[D] = {}, deviation[D];
        factorise<D>(p.scale + pair * D * D, factor);
        factorise<D>(p.covariance + pair * D * D, other);
        double root = 1;
        for (int i = 0; i < D; ++i) root *= factor[i][i];
        // log peak of `continuous/tsallis.py` at eps = 1, log Gamma(2 + d/2) - d/2 log(2 pi) = c
        static constexpr double c[] = {-0.634255662731753, -1.1447298858494004, -1.5558419972669442};
        const double level = std::exp(2.0 / (2 + D) * (c[D - 1] - std::log(root)));
        const double radius = std::sqrt(2 * level);
        invert<D>(factor, inverse);
        for (int i = 0; i < D; ++i) {
            at[i] = 0;
            for (int k = 0; k < D; ++k) {
                at[i] += inverse[i][k] * (p.centre[pair * D + k] - p.mean[pair * D + k]) / radius;
                axes[i][k] = 0;
                for (int j = 0; j < D; ++j) axes[i][k] += inverse[i][j] * other[j][k] / radius;
            }
        }
        principal<D>(axes, deviation);
        for (int k = 0; k < D; ++k)
            for (int i = 0; i < D; ++i) centre[k] += axes[i][k] * at[i];
        const Moments<D> s = moments(centre, deviation, 1.0);
        double trace = 0;
        for (int i = 0; i < D; ++i) trace += s.second[i][i];
        p.value[pair] = level * (s.zeroth - trace);
        if (p.to_mean) derivatives<D>(pair, s, inverse, axes, level, radius);
    }

    // See `_Paraboloid` in `continuous/expectations.py`.
    template <int D>
    void derivatives(std::int64_t pair, const Moments<D>& s, const double (&inverse)[D][D], const double (&axes)[D][D],
                     double level, double radius) const {
        double back[D][D] = {}, half[D][D] = {};  // L^-T axes, and times the inner matrix
        for (int i = 0; i < D; ++i)
            for (int k = 0; k < D; ++k)
                for (int j = 0; j < D; ++j) back[i][k] += inverse[j][i] * axes[j][k];
        for (int i = 0; i < D; ++i)
            for (int k = 0; k < D; ++k)
                for (int j = 0; j < D; ++j)
                    half[i][k] += back[i][j] * (s.second[j][k] - (j == k ? s.zeroth / (D + 2) : 0));
        for (int i = 0; i < D; ++i) {
            double along = 0;
            for (int k = 0; k < D; ++k) along += back[i][k] * s.first[k];
            p.to_mean[pair * D + i] = along * radius;
            for (int k = 0; k < D; ++k) {
                double entry = 0;
                for (int j = 0; j < D; ++j) entry += half[i][j] * back[k][j];
                p.to_scale[(pair * D + i) * D + k] = entry * level;
            }
        }
    }

    // Lower triangular, NaN where the matrix is not positive definite.
    template <int D>
    static void factorise(const double* matrix, double (&l)[D][D]) {
        for (int i = 0; i < D; ++i)
            for (int j = 0; j < D; ++j) {
                if (j > i) {
                    l[i][j] = 0;
                    continue;
                }
                double rest = (matrix[i * D + j] + matrix[j * D + i]) / 2;
                for (int k = 0; k < j; ++k) rest -= l[i][k] * l[j][k];
                l[i][j] = i == j ? std::sqrt(rest) : rest / l[j][j];
            }
    }

    template <int D>
    static void invert(const double (&l)[D][D], double (&inverse)[D][D]) {
        for (int column = 0; column < D; ++column)
            for (int i = 0; i < D; ++i) {
                double rest = i == column;
                for (int k = 0; k < i; ++k) rest -= l[i][k] * inverse[k][column];
                inverse[i][column] = rest / l[i][i];
            }
    }

    // a, a root of a covariance, becomes its axes, the widest first: its columns are turned until
    // they are orthogonal (one-sided Jacobi), which keeps the digits of a thin ellipse.
    template <int D>
    static void principal(double (&a)[D][D], double (&deviation)[D]) {
        for (int turns = D > 1 ? 16 : 0; turns && turn_columns<D>(a); --turns) {
        }
        for (int k = 0; k < D; ++k) {
            deviation[k] = std::sqrt(inner<D>(a, k, k));
            if (deviation[k] < std::numeric_limits<double>::min()) deviation[k] = std::numeric_limits<double>::min();
            for (int i = 0; i < D; ++i) a[i][k] /= deviation[k];
        }
        for (int last = D - 1; last > 0; --last)
            for (int k = 0; k < last; ++k)
                if (deviation[k] < deviation[k + 1]) {
                    exchange(deviation[k], deviation[k + 1]);
                    for (int i = 0; i < D; ++i) exchange(a[i][k], a[i][k + 1]);
                }
    }

    static void exchange(double& x, double& y) {
        const double kept = x;
        x = y;
        y = kept;
    }

    template <int D>
    static double inner(const double (&a)[D][D], int p, int q) {
        double total = 0;
        for (int i = 0; i < D; ++i) total += a[i][p] * a[i][q];
        return total;
    }

    template <int D>
    static bool turn_columns(double (&a)[D][D]) {
        bool turned = false;
        for (int p = 0; p < D; ++p)
            for (int q = p + 1; q < D; ++q) {
                const double pp = inner<D>(a, p, p), qq = inner<D>(a, q, q), pq = inner<D>(a, p, q);
                if (!(std::fabs(pq) > 1e-15 * std::sqrt(pp * qq))) continue;
                turned = true;
                const double zeta = (qq - pp) / (2 * pq);
                const double t = std::copysign(1.0, zeta) / (std::fabs(zeta) + std::sqrt(1 + zeta * zeta));
                const double c = 1 / std::sqrt(1 + t * t), s = c * t;
                for (int i = 0; i < D; ++i) {
                    const double x = a[i][p], y = a[i][q];
                    a[i][p] = c * x - s * y;
                    a[i][q] = s * x + c * y;
                }
            }
        return turned;
    }
};
