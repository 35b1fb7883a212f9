// The offset (or threshold) of one row, from the few keys that can carry mass.

template <class T>
struct Candidates {
    T* score;           // padded with -inf to whole vectors
    std::int32_t* key;
    T* mass;            // null: all ones
    std::int64_t count = 0;
    std::int64_t tightened = 0;  // count after the last tightening

    void pad() {
        for (int i = 0; i < Lanes<T>::W; ++i) {
            score[count + i] = -std::numeric_limits<T>::infinity();
            if (mass) mass[count + i] = 0;
        }
    }
};

// offset = centre + rest; the centre is a score, so that s - centre is exact next to it.
template <class T>
struct Offset {
    T centre = 0;
    double rest = 0;
    bool known = false;

    T high() const { return T(rest); }
    T low() const { return T(rest - double(high())); }
    double value() const { return double(centre) + rest; }
};

struct Sums {
    double mass = 0, slope = 0, bend = 0;  // sums of p = y^(1/eps), p / y and p / y^2
};

template <class T, Kind K, bool Rough>
inline Sums sums(const Family<T>& family, const Candidates<T>& c, const Offset<T>& at) {
    constexpr int W = Lanes<T>::W;
    const Vec<T> centre = fill<T>(at.centre), high = fill<T>(at.high()), low = fill<T>(at.low());
    Sums total;
    for (std::int64_t start = 0; start < c.count; start += 32 * W) {
        Vec<T> mass{}, slope{}, bend{};  // short sums in T, long ones in double
        const std::int64_t stop = start + 32 * W < c.count ? start + 32 * W : c.count;
        for (std::int64_t i = start; i < stop; i += W) {
            Vec<T> p, r;
            const Vec<T> d = ((load<T>(c.score + i) - centre) - high) - low;
            Rough ? weigh_roughly<T, K>(family, d, p, r) : weigh<T, K>(family, d, p, r);
            if (c.mass) {
                const Vec<T> m = load<T>(c.mass + i);
                p *= m;
                r *= m;
            }
            mass += p;
            slope += r;
            if constexpr (!Rough && (K == Kind::gentle || K == Kind::edge))
                bend += pick<T>(p > fill<T>(std::numeric_limits<T>::min()), r * r / p, Vec<T>{});
        }
        total.mass += sum<T>(mass);
        total.slope += sum<T>(slope);
        total.bend += sum<T>(bend);
    }
    return total;
}

template <class T>
inline Sums sums(const Family<T>& family, const Candidates<T>& c, const Offset<T>& at, bool rough) {
    return by_kind(family, [&](auto kind) {
        constexpr Kind K = decltype(kind)::value;
        return rough ? sums<T, K, true>(family, c, at) : sums<T, K, false>(family, c, at);
    });
}

// The best lower bound that one key alone gives; the key becomes the centre.
template <class T>
inline void bound_below(const Family<T>& family, const Candidates<T>& c, Offset<T>& at) {
    if (!c.mass) {
        Vec<T> best = load<T>(c.score);
        for (std::int64_t i = Lanes<T>::W; i < c.count; i += Lanes<T>::W) {
            const Vec<T> s = load<T>(c.score + i);
            best = s > best ? s : best;
        }
        const T top = largest<T>(best);
        const double room = family.room(1);
        const double rest = at.known ? at.rest + (double(at.centre) - double(top)) : -room;
        at = {top, rest > -room ? rest : -room, true};
        return;
    }
    for (std::int64_t i = c.tightened; i < c.count; ++i) {  // the others were asked before
        const double room = family.room(double(c.mass[i]));
        const double rest = double(c.score[i]) - double(at.centre) - room;
        if (!at.known || rest > at.rest) at = {c.score[i], -room, true};
    }
}

// Solve norm = 1 for the norm (sum nu y^(1/eps))^eps, which is convex in the offset for eps <= 1: from
// the left every step of Newton stays left of the root. As eps goes to 0 it becomes log sum exp,
// solved at once. Where only the root matters and not the side (`to_root`), general powers, which are
// dear, take Halley's step, whose error is of the third order, after a first one from rough powers.
template <class T>
inline void newton(const Family<T>& family, const Candidates<T>& c, Offset<T>& at, int steps, bool to_root) {
    const double eps = family.eps;
    const bool halley = to_root && !family.cheap() && eps > 0 && eps <= 0.5;
    // Relative to the distances, the error after a step is of the order of its square (Halley: its
    // cube), or of its power 1 / eps where it made a key leave the support.
    const double order = std::max(eps, halley ? 1. / 3 : 0.5), ulp = double(std::numeric_limits<T>::epsilon());
    const double tolerance = 0.25 * (order == 0.5 ? std::sqrt(ulp) : order == 1 ? ulp : std::pow(ulp, order));
    double before = 0;
    for (int k = 0; k < steps; ++k) {
        const bool rough = family.has_rough() && (k == 0 || !to_root);
        const Sums now = sums(family, c, at, rough);
        if (!(now.slope > 0)) {  // NaN
            at.rest = std::numeric_limits<double>::quiet_NaN();
            return;
        }
        const double gain = family.gain(now.mass);
        double step = now.mass * gain / now.slope;
        // Newton covers at most the part 1 - 1 / norm of the way to the largest score, so that for a
        // norm below 2 a step longer by a third cannot reach it, where no mass is left.
        if (rough) {
            at.rest += std::max(0.0, step - kRough * now.mass / now.slope);  // stays on the left
            continue;
        }
        if (halley && eps * gain < 0.5) {
            const double curve = gain * (1 - eps) * (now.mass * now.bend / (now.slope * now.slope) - 1);
            if (curve < 0.5) step /= 1 - curve / 2;
        }
        at.rest += step;
        if (!(std::fabs(step) * now.slope > tolerance * now.mass)) return;
        if (family.kind == Kind::ramp && now.slope == before) return;  // the same keys again: the sum is linear
        before = now.slope;
    }
}

// Newton inside a bracket, in double, on the mass above the threshold centre + t.
template <class T>
inline double solve_bracket(const Family<T>& family, const Candidates<T>& c, double centre, double low,
                            double high) {
    const double power = 1 / family.eps;
    double t = low;
    for (int k = 0; k < 200; ++k) {
        double mass = 0, slope = 0;
        for (std::int64_t i = 0; i < c.count; ++i) {
            const double y = family.eps * ((double(c.score[i]) - centre) - t);
            if (!(y > 0)) continue;
            const double p = std::pow(y, power) * (c.mass ? double(c.mass[i]) : 1);
            mass += p;
            slope += p / y;
        }
        (mass >= 1 ? low : high) = t;
        double next = t + (mass - 1) / slope;
        if (!(next > low && next < high)) next = low + (high - low) / 2;
        if (next == t || next <= low || next >= high) break;
        t = next;
    }
    return t;
}

// For eps > 1 the sum has vertical tangents, and an ulp of the threshold may move a weight by
// ulp^(1/eps): it is solved a second time, measured from the key nearest to it.
template <class T>
inline void bracketed(const Family<T>& family, const Candidates<T>& c, Offset<T>& at) {
    double total = 0, top = -HUGE_VAL;
    for (std::int64_t i = 0; i < c.count; ++i) {
        const double s = double(c.score[i]) - double(at.centre);
        total += c.mass ? double(c.mass[i]) : 1;
        top = s > top ? s : top;
        if (!(s < HUGE_VAL)) {
            at.rest = std::numeric_limits<double>::quiet_NaN();
            return;
        }
    }
    const double t = solve_bracket(family, c, double(at.centre), at.rest, top - family.room(total));
    std::int64_t nearest = 0;
    double distance = HUGE_VAL;
    for (std::int64_t i = 0; i < c.count; ++i) {
        const double far = std::fabs((double(c.score[i]) - double(at.centre)) - t);
        if (far < distance) distance = far, nearest = i;
    }
    const double moved = t - (double(c.score[nearest]) - double(at.centre));
    const double reach = 16 * std::numeric_limits<double>::epsilon() * (std::fabs(t) + std::fabs(moved));
    at.centre = c.score[nearest];
    at.rest = solve_bracket(family, c, double(at.centre), moved - reach, moved + reach);
}

template <class T>
inline std::int64_t keep_above(Candidates<T>& c, T cut) {
    constexpr int W = Lanes<T>::W;
    const Vec<T> limit = fill<T>(cut);
    std::int64_t kept = 0;
    for (std::int64_t i = 0; i < c.count; i += W) {
        const Vec<T> s = load<T>(c.score + i);
        const unsigned bits = above<T>(s, limit);
        if (!bits) continue;
        if (kept == i && bits == (1u << W) - 1) {
            kept += W;
            continue;
        }
        if (c.mass) {
            std::int32_t same_keys[W];
            squeeze<T>(bits, load<T>(c.mass + i), c.key + i, c.mass + kept, same_keys);
        }
        kept += squeeze<T>(bits, s, c.key + i, c.score + kept, c.key + kept);
    }
    return kept;
}

// Append the scores above the cut, of n padded with -inf to whole vectors, with their keys. Where most
// vectors hold one, a branch would be guessed wrong too often.
template <class T>
inline std::int64_t collect_above(const T* s, std::int64_t n, T cut, std::int32_t first, T* score, std::int32_t* key) {
    constexpr int W = Lanes<T>::W;
    const Vec<T> limit = fill<T>(cut);
    std::int64_t found = 0, j = 0;
    for (; j < n && 12 * found < j + 64; j += W) {
        const Vec<T> v = load<T>(s + j);
        const unsigned bits = above<T>(v, limit);
        if (__builtin_expect(bits != 0, 0)) found += append<T>(bits, v, first + std::int32_t(j), score + found, key + found);
    }
    for (; j < n; j += W) {
        const Vec<T> v = load<T>(s + j);
        found += append<T>(above<T>(v, limit), v, first + std::int32_t(j), score + found, key + found);
    }
    return found;
}

// A score at or below which no key can carry mass, whatever keys are still to come: adding keys only
// raises the offset. A few ulps are left for rounding.
template <class T>
inline T cut_below(const Family<T>& family, const Offset<T>& at) {
    const double exact = at.value() - family.reach();
    if (!(std::fabs(exact) < HUGE_VAL)) return -std::numeric_limits<T>::infinity();  // or NaN
    const double ulp = double(std::numeric_limits<T>::epsilon());
    return T(exact - 8 * ulp * (std::fabs(double(at.centre)) + std::fabs(at.rest) + std::fabs(exact)));
}

// A NaN or +inf among the candidates: the row has no answer.
template <class T>
inline bool broken(const Candidates<T>& c) {
    const Vec<T> limit = fill<T>(std::numeric_limits<T>::max());
    unsigned bits = 0;
    for (std::int64_t i = 0; i < c.count; i += Lanes<T>::W)
        bits |= above<T>(load<T>(c.score + i), limit);
    return bits != 0;
}

constexpr int kCutGroups = 4;  // vectors, of the largest scores that give a first cut

// A cut from a whole number of vectors of scores, before any is a candidate. Some keys alone bound
// the offset of all from below, and `at` becomes that bound; the largest of each lane and group are a good choice.
template <class T>
inline T first_cut(const Family<T>& family, const T* s, std::int64_t n, Offset<T>& at) {
    constexpr int W = Lanes<T>::W, groups = kCutGroups;
    if (family.kind == Kind::softmax) return -std::numeric_limits<T>::infinity();
    const Vec<T> none = fill<T>(-std::numeric_limits<T>::infinity());
    Vec<T> best[groups] = {none, none, none, none};
    for (std::int64_t j = 0; j < n; j += groups * W)
        for (int g = 0; g < groups; ++g) {
            const Vec<T> v = j + g * W < n ? load<T>(s + j + g * W) : none;
            best[g] = v > best[g] ? v : best[g];
        }
    T score[(groups + 1) * W];
    std::int32_t key[(groups + 1) * W] = {};
    for (int g = 0; g < groups; ++g) store<T>(score + g * W, best[g]);
    Candidates<T> few{score, key, nullptr, groups * W};
    few.count = keep_above(few, -std::numeric_limits<T>::infinity());
    if (few.count == 0) return -std::numeric_limits<T>::infinity();
    few.pad();
    bound_below(family, few, at);
    if (!family.steep()) newton(family, few, at, 3, false);
    return cut_below(family, at);
}

// The same with masses: of each lane and group the key that alone bounds the offset best.
template <class T>
inline T first_cut(const Family<T>& family, const T* s, const T* mass, std::int64_t n, Offset<T>& at) {
    constexpr int W = Lanes<T>::W, groups = kCutGroups;
    if (family.kind == Kind::softmax) return -std::numeric_limits<T>::infinity();
    const T hidden = -std::numeric_limits<T>::infinity();
    Vec<T> best[groups], score[groups], of_best[groups];
    for (int g = 0; g < groups; ++g) best[g] = score[g] = fill<T>(hidden), of_best[g] = Vec<T>{};
    for (std::int64_t j = 0; j < n; j += groups * W)
        for (int g = 0; g < groups && j + g * W < n; ++g) {
            const Vec<T> v = load<T>(s + j + g * W), m = load<T>(mass + j + g * W);
            const Vec<T> alone = v - rooms(family, m);
            const Mask<T> better = alone > best[g];
            best[g] = better ? alone : best[g];
            score[g] = better ? v : score[g];
            of_best[g] = better ? m : of_best[g];
        }
    T few_score[(groups + 1) * W], few_mass[(groups + 1) * W];
    std::int32_t key[(groups + 1) * W] = {};
    for (int g = 0; g < groups; ++g) {
        store<T>(few_score + g * W, score[g]);
        store<T>(few_mass + g * W, of_best[g]);
    }
    Candidates<T> few{few_score, key, few_mass, groups * W};
    few.count = keep_above(few, hidden);
    if (few.count == 0) return hidden;
    few.pad();
    bound_below(family, few, at);
    if (!family.steep()) newton(family, few, at, 3, false);
    return cut_below(family, at);
}

// Raise the lower bound on the offset and drop the keys below its reach. Returns the new cut.
template <class T>
inline T tighten(const Family<T>& family, Candidates<T>& c, Offset<T>& at, bool finish) {
    if (c.count == 0) return -std::numeric_limits<T>::infinity();
    c.pad();
    if (finish && broken(c)) {
        at.rest = std::numeric_limits<double>::quiet_NaN();
        return -std::numeric_limits<T>::infinity();
    }
    bound_below(family, c, at);
    if (family.kind == Kind::softmax) {
        if (finish) newton(family, c, at, 60, true);
        c.tightened = c.count;
        return -std::numeric_limits<T>::infinity();
    }
    c.count = keep_above(c, cut_below(family, at));
    c.pad();
    if (family.steep())
        bracketed(family, c, at);
    else
        newton(family, c, at, finish ? 60 : family.cheap() ? 2 : 1, finish);
    const T cut = cut_below(family, at);
    if (!finish) {
        c.count = keep_above(c, cut);
        c.tightened = c.count;
    }
    return cut;
}
