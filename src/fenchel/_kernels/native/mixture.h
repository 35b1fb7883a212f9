// Expectation and maximisation for Gaussian mixtures: `continuous/em.py` says what is computed, this does
// all iterations of a row while its positions stay in the cache.

struct Mixture {
    const MixtureProblem& p;
    std::int64_t length;  // of a line of positions: a whole number of vectors, the rest without weight
    Buffer<double> lines, weight, joint;
    bool ready = false;

    explicit Mixture(const MixtureProblem& problem) : p(problem), length(padded(p.positions, Lanes<double>::W)) {}

    void run(std::int64_t row) {
        if (!ready) take_positions();
        double* w = weight.reserve(length);
        for (std::int64_t l = 0; l < length; ++l)
            w[l] = l < p.positions ? p.weights[row % p.batch * p.positions + l] : 0;
        for (std::int64_t k = 0; k < p.iterations; ++k)
            p.dim == 1 ? step<1>(row * p.modes) : step<2>(row * p.modes);
    }

  private:
    void take_positions() {
        double* line = lines.reserve(p.dim * length);
        joint.reserve(p.modes * length);
        for (std::int64_t i = 0; i < p.dim; ++i)
            for (std::int64_t l = 0; l < length; ++l)
                line[i * length + l] = p.position[i * p.positions + (l < p.positions ? l : 0)];
        ready = true;
    }

    template <int D>
    void step(std::int64_t first) {
        for (std::int64_t k = 0; k < p.modes; ++k) log_densities<D>(first + k, joint.get() + k * length);
        shares();
        for (std::int64_t k = 0; k < p.modes; ++k) maximise<D>(first + k, joint.get() + k * length);
    }

    // log mixing_k N(t_l; mean_k, covariance_k)
    template <int D>
    void log_densities(std::int64_t mode, double* to) {
        constexpr int W = Lanes<double>::W;
        const double *mean = p.mean + mode * D, *c = p.covariance + mode * D * D;
        const double l00 = std::sqrt(c[0]), l10 = D > 1 ? c[D] / l00 : 0;
        const double l11 = D > 1 ? std::sqrt(c[D * D - 1] - l10 * l10) : 1;
        const double constant = std::log(p.mixing[mode]) - std::log(l00 * l11) - D * 0.9189385332046727;
        const double* x = lines.get();
        for (std::int64_t l = 0; l < length; l += W) {
            const Vec<double> z = (load<double>(x + l) - mean[0]) / l00;
            Vec<double> squared = z * z;
            if constexpr (D > 1) {
                const Vec<double> other = (load<double>(x + length + l) - mean[1] - z * l10) / l11;
                squared += other * other;
            }
            store<double>(to + l, squared * -0.5 + constant);
        }
    }

    // joint becomes w_l times the softmax over the modes.
    void shares() {
        constexpr int W = Lanes<double>::W;
        for (std::int64_t l = 0; l < length; l += W) {
            Vec<double> top = load<double>(joint.get() + l), total{};
            for (std::int64_t k = 1; k < p.modes; ++k) {
                const Vec<double> v = load<double>(joint.get() + k * length + l);
                top = v > top ? v : top;
            }
            for (std::int64_t k = 0; k < p.modes; ++k) {
                double* at = joint.get() + k * length + l;
                const Vec<double> e = exponential(load<double>(at) - top);
                store<double>(at, e);
                total += e;
            }
            const Vec<double> scale = load<double>(weight.get() + l) / total;
            for (std::int64_t k = 0; k < p.modes; ++k) {
                double* at = joint.get() + k * length + l;
                store<double>(at, load<double>(at) * scale);
            }
        }
    }

    // A mode without mass keeps what it had.
    template <int D>
    void maximise(std::int64_t mode, const double* share) {
        constexpr int W = Lanes<double>::W;
        const double* x = lines.get();
        const double* y = x + (D - 1) * length;
        Vec<double> s{}, sx{}, sy{};
        for (std::int64_t l = 0; l < length; l += W) {
            const Vec<double> v = load<double>(share + l);
            s += v;
            sx += v * load<double>(x + l);
            sy += v * load<double>(y + l);
        }
        const double mass = sum<double>(s);
        p.mixing[mode] = mass;
        if (mass <= std::numeric_limits<double>::min()) return;
        const double mx = sum<double>(sx) / mass, my = sum<double>(sy) / mass;
        Vec<double> sxx{}, sxy{}, syy{};
        for (std::int64_t l = 0; l < length; l += W) {
            const Vec<double> v = load<double>(share + l), a = load<double>(x + l) - mx, b = load<double>(y + l) - my;
            sxx += v * a * a;
            sxy += v * a * b;
            syy += v * b * b;
        }
        const double xx = sum<double>(sxx) / mass, xy = sum<double>(sxy) / mass, yy = sum<double>(syy) / mass;
        double *mean = p.mean + mode * D, *c = p.covariance + mode * D * D;
        const double smallest = D == 1 ? xx : (xx + yy) / 2 - std::sqrt((xx - yy) * (xx - yy) / 4 + xy * xy);
        const double raised = p.least > smallest ? p.least - smallest : 0;
        mean[0] = mx;
        c[0] = xx + raised;
        if constexpr (D > 1) {
            mean[1] = my;
            c[1] = c[2] = xy;
            c[3] = yy + raised;
        }
    }
};
