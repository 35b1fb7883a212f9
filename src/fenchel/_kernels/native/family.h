// Weights from distances. With eps = alpha - 1 a key of score s has, before its mass,
//   p = y^(1/eps),  dp/ds = r = y^(1/eps - 1),
// where y = eps d for the edge kinds (d = s - threshold) and y = 1 + eps d for the gentle ones
// (d = s - offset, smooth through eps = 0). See tsallis.py for why there are two.

enum class Kind { softmax, gentle, edge, square, ramp };

template <class T>
struct Family {
    double eps;
    T e, inverse;
    Kind kind;

    explicit Family(double value) : eps(value), e(T(value)), inverse(value > 0 ? T(1 / value) : T(0)) {
        kind = value == 0      ? Kind::softmax
               : value == 0.5  ? Kind::square
               : value == 1    ? Kind::ramp
               : value <= 0.25 ? Kind::gentle
                               : Kind::edge;
    }
    bool from_threshold() const { return kind != Kind::softmax && kind != Kind::gentle; }
    bool steep() const { return eps > 1; }
    bool has_rough() const { return kind == Kind::edge && sizeof(T) == 4; }
    bool cheap() const { return kind == Kind::square || kind == Kind::ramp; }

    // How far below a key of this mass, carrying everything alone, the threshold or offset lies.
    double room(double mass) const {
        if (kind == Kind::softmax) return -std::log(mass);
        if (kind == Kind::gentle) return std::expm1(-eps * std::log(mass)) / eps;
        if (kind == Kind::square) return 2 / std::sqrt(mass);
        if (kind == Kind::ramp) return 1 / mass;
        return mass == 1 ? 1 / eps : std::pow(mass, -eps) / eps;
    }
    // (1 - 1 / norm) / eps, norm = mass^eps; log mass for eps = 0.
    double gain(double mass) const {
        if (kind == Kind::ramp) return 1 - 1 / mass;
        if (kind == Kind::square) return 2 - 2 / std::sqrt(mass);
        return eps > 0 ? -std::expm1(-eps * std::log(mass)) / eps : std::log(mass);
    }
    // From the offset or threshold as it is kept, down to the score that gets nothing.
    double reach() const {
        if (kind == Kind::softmax) return HUGE_VAL;
        return kind == Kind::gentle ? 1 / eps : 0;
    }
};

// `room` of several masses, roughly; infinite for no mass.
template <class T>
inline Vec<T> rooms(const Family<T>& family, Vec<T> mass) {
    const Mask<T> on = mass > fill<T>(std::numeric_limits<T>::min());
    const Vec<T> power = exponential(logarithm(pick<T>(on, mass, fill<T>(1))) * -family.e);
    const Vec<T> room = (family.kind == Kind::gentle ? power - T(1) : power) * family.inverse;
    return pick<T>(on, room, fill<T>(std::numeric_limits<T>::infinity()));
}

template <class T, Kind K>
inline void weigh(const Family<T>& family, Vec<T> d, Vec<T>& p, Vec<T>& r) {
    const Vec<T> none{}, one = fill<T>(1);
    if constexpr (K == Kind::square) {
        r = at_least<T>(d * family.e, 0);
        p = r * r;
    } else if constexpr (K == Kind::ramp) {
        p = at_least<T>(d, 0);
        r = pick<T>(d > none, one, none);
    } else if constexpr (K == Kind::softmax) {
        p = r = pick<T>(d > fill<T>(-std::numeric_limits<T>::max()), exponential(d), none);
    } else if constexpr (K == Kind::gentle) {
        const Vec<T> z = d * family.e, y = z + T(1);
        const Mask<T> on = y > none;
        p = pick<T>(on, exponential(logarithm_one_plus<T>(pick<T>(on, z, none)) * family.inverse), none);
        r = pick<T>(on, p / pick<T>(on, y, one), none);
    } else {
        const Vec<T> y = d * family.e;
        const Mask<T> on = y > fill<T>(std::numeric_limits<T>::min());
        const Vec<T> safe = pick<T>(on, y, one);
        r = pick<T>(on, exponential(logarithm(safe) * (family.inverse - T(1))), none);
        p = r * safe;
    }
}

// The same for a first approach to the offset; see kRough.
template <class T, Kind K>
inline void weigh_roughly(const Family<T>& family, Vec<T> d, Vec<T>& p, Vec<T>& r) {
    if constexpr (K == Kind::edge && sizeof(T) == 4) {
        const Vec<T> y = d * family.e;
        const Mask<T> on = y > fill<T>(std::numeric_limits<T>::min());
        const Vec<T> safe = pick<T>(on, y, fill<T>(1));
        r = pick<T>(on, rough_power(safe, family.inverse - T(1)), Vec<T>{});
        p = r * safe;
    } else {
        weigh<T, K>(family, d, p, r);
    }
}

// With p and r wrong by 4e-4 and eps >= 1/4, Newton's step is wrong by less than this times mass / slope.
constexpr double kRough = 4e-3;

// Call work.template operator()<Kind>() for the family's kind.
template <class T, class Work>
inline auto by_kind(const Family<T>& family, Work&& work) {
    switch (family.kind) {
        case Kind::softmax: return work(std::integral_constant<Kind, Kind::softmax>{});
        case Kind::gentle: return work(std::integral_constant<Kind, Kind::gentle>{});
        case Kind::square: return work(std::integral_constant<Kind, Kind::square>{});
        case Kind::ramp: return work(std::integral_constant<Kind, Kind::ramp>{});
        default: return work(std::integral_constant<Kind, Kind::edge>{});
    }
}

// d log p / d eps at fixed score and offset. For the edge kinds its part -1 / (eps^2 y) is left out:
// it multiplies p (g - mean), and sum p / y (g - mean) = sum r (g - mean) = 0 exactly.
template <class T>
inline double log_slope(const Family<T>& family, double d) {
    const double eps = family.eps;
    if (family.from_threshold()) {
        const double y = eps * d;
        return (1 - std::log(y)) / (eps * eps);
    }
    const double z = eps * d;
    if (std::fabs(z) < 1e-2)  // the series of z / (1 + z) - log(1 + z), by z^2
        return d * d * (-1. / 2 + z * (2. / 3 + z * (-3. / 4 + z * (4. / 5 + z * (-5. / 6 + z * (6. / 7 - z * 7. / 8))))));
    return (z / (1 + z) - std::log1p(z)) / (eps * eps);
}
