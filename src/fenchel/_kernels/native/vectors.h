// Vectors of the machine in the compilers' own notation, and the few operations that it lacks.
// Included once for each instruction set, inside a namespace of its own.

template <class T>
struct Lanes {
    static constexpr int W = FENCHEL_VECTOR_BYTES / sizeof(T);
    typedef T type __attribute__((vector_size(FENCHEL_VECTOR_BYTES)));
    typedef T loose __attribute__((vector_size(FENCHEL_VECTOR_BYTES), aligned(sizeof(T)), may_alias));
    using Whole = typename std::conditional<sizeof(T) == 4, std::int32_t, std::int64_t>::type;
    typedef Whole mask __attribute__((vector_size(FENCHEL_VECTOR_BYTES)));
};
template <class T>
using Vec = typename Lanes<T>::type;
template <class T>
using Mask = typename Lanes<T>::mask;

template <class T>
inline Vec<T> load(const T* p) {
    return *reinterpret_cast<const typename Lanes<T>::loose*>(p);
}
template <class T>
inline void store(T* p, Vec<T> v) {
    *reinterpret_cast<typename Lanes<T>::loose*>(p) = v;
}
template <class T>
inline Vec<T> fill(T x) {
    return Vec<T>{} + x;
}
template <class T>
inline Vec<T> pick(Mask<T> m, Vec<T> yes, Vec<T> no) {
    return m ? yes : no;
}
// The bound where v is NaN. AVX2 has an instruction for just that; the compiler makes two of the notation.
template <class T>
inline Vec<T> at_least(Vec<T> v, T low) {
    const Vec<T> bound = fill<T>(low);
#if defined(__AVX2__) && !defined(__AVX512F__)
    if constexpr (sizeof(T) == 4) return (Vec<T>)_mm256_max_ps((__m256)v, (__m256)bound);
#endif
    return v > bound ? v : bound;
}
template <class T>
inline Vec<T> at_most(Vec<T> v, T high) {
    const Vec<T> bound = fill<T>(high);
#if defined(__AVX2__) && !defined(__AVX512F__)
    if constexpr (sizeof(T) == 4) return (Vec<T>)_mm256_min_ps((__m256)v, (__m256)bound);
#endif
    return v < bound ? v : bound;
}

// In a fixed tree, so that the same numbers give the same bits.
template <class T>
inline T sum(Vec<T> v) {
#if defined(__AVX2__)
    if constexpr (sizeof(T) == 4) {
#if defined(__AVX512F__)
        const __m256 whole = _mm256_add_ps(_mm512_castps512_ps256((__m512)v), _mm512_extractf32x8_ps((__m512)v, 1));
#else
        const __m256 whole = (__m256)v;
#endif
        __m128 half = _mm_add_ps(_mm256_castps256_ps128(whole), _mm256_extractf128_ps(whole, 1));
        half = _mm_add_ps(half, _mm_movehl_ps(half, half));
        return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
    }
#endif
    constexpr int W = Lanes<T>::W;
    T part[W];
    store<T>(part, v);
    for (int step = W / 2; step > 0; step /= 2)
        for (int i = 0; i < step; ++i) part[i] += part[i + step];
    return part[0];
}
template <class T>
inline T largest(Vec<T> v) {
#if defined(__AVX512F__)
    if constexpr (sizeof(T) == 4)
        return _mm512_reduce_max_ps((__m512)v);
    else
        return _mm512_reduce_max_pd((__m512d)v);
#endif
    constexpr int W = Lanes<T>::W;
    T best = v[0];
    for (int i = 1; i < W; ++i) best = v[i] > best ? v[i] : best;
    return best;
}

// One bit for each lane that is not <= cut; NaN counts, so that it is noticed later.
template <class T>
inline unsigned above(Vec<T> v, Vec<T> cut) {
#if defined(__AVX512F__)
    if constexpr (sizeof(T) == 4)
        return _mm512_cmp_ps_mask((__m512)v, (__m512)cut, _CMP_NLE_UQ);
    else
        return _mm512_cmp_pd_mask((__m512d)v, (__m512d)cut, _CMP_NLE_UQ);
#elif defined(__AVX2__)
    if constexpr (sizeof(T) == 4)
        return _mm256_movemask_ps(_mm256_cmp_ps((__m256)v, (__m256)cut, _CMP_NLE_UQ));
    else
        return _mm256_movemask_pd(_mm256_cmp_pd((__m256d)v, (__m256d)cut, _CMP_NLE_UQ));
#else
    const Mask<T> within = v <= cut;
    unsigned bits = 0;
    for (int i = 0; i < Lanes<T>::W; ++i) bits |= (within[i] ? 0u : 1u) << i;
    return bits;
#endif
}

#if defined(__AVX2__) && !defined(__AVX512F__)
// For each byte of bits: the lanes that are set, first to last.
struct Squeeze {
    alignas(32) std::int32_t lane[256][8];
    constexpr Squeeze() : lane() {
        for (int bits = 0; bits < 256; ++bits) {
            int n = 0;
            for (int i = 0; i < 8; ++i) lane[bits][i] = 0;
            for (int i = 0; i < 8; ++i)
                if (bits >> i & 1) lane[bits][n++] = i;
        }
    }
};
static constexpr Squeeze kSqueeze{};  // at compile time: no AVX2 code may run at loading
#endif

// Append the chosen lanes and their positions; writes up to W entries past the end.
template <class T>
inline int append(unsigned bits, Vec<T> v, std::int32_t first, T* values, std::int32_t* keys) {
#if defined(__AVX512F__)
    if constexpr (sizeof(T) == 4) {
        const __m512i iota = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
        _mm512_storeu_ps(values, _mm512_maskz_compress_ps((__mmask16)bits, (__m512)v));
        _mm512_storeu_si512(keys, _mm512_maskz_compress_epi32(
                                      (__mmask16)bits, _mm512_add_epi32(iota, _mm512_set1_epi32(first))));
        return __builtin_popcount(bits);
    }
#elif defined(__AVX2__)
    if constexpr (sizeof(T) == 4) {
        const __m256i lanes = _mm256_load_si256((const __m256i*)kSqueeze.lane[bits]);
        _mm256_storeu_ps(values, _mm256_permutevar8x32_ps((__m256)v, lanes));
        _mm256_storeu_si256((__m256i*)keys, _mm256_add_epi32(lanes, _mm256_set1_epi32(first)));
        return __builtin_popcount(bits);
    }
#endif
    T lane[Lanes<T>::W];
    store<T>(lane, v);
    int n = 0;
    for (unsigned rest = bits; rest; rest &= rest - 1) {
        const int i = __builtin_ctz(rest);
        values[n] = lane[i];
        keys[n++] = first + i;
    }
    return n;
}

// The chosen lanes with their keys, moved to the front; the targets may overlap what is read.
template <class T>
inline int squeeze(unsigned bits, Vec<T> v, const std::int32_t* from, T* values, std::int32_t* keys) {
#if defined(__AVX512F__)
    if constexpr (sizeof(T) == 4) {
        const __m512i key = _mm512_loadu_si512(from);
        _mm512_storeu_ps(values, _mm512_maskz_compress_ps((__mmask16)bits, (__m512)v));
        _mm512_storeu_si512(keys, _mm512_maskz_compress_epi32((__mmask16)bits, key));
        return __builtin_popcount(bits);
    }
#elif defined(__AVX2__)
    if constexpr (sizeof(T) == 4) {
        const __m256i lanes = _mm256_load_si256((const __m256i*)kSqueeze.lane[bits]);
        const __m256i key = _mm256_loadu_si256((const __m256i*)from);
        _mm256_storeu_ps(values, _mm256_permutevar8x32_ps((__m256)v, lanes));
        _mm256_storeu_si256((__m256i*)keys, _mm256_permutevar8x32_epi32(key, lanes));
        return __builtin_popcount(bits);
    }
#endif
    T lane[Lanes<T>::W];
    store<T>(lane, v);
    int n = 0;
    for (unsigned rest = bits; rest; rest &= rest - 1) {
        const int i = __builtin_ctz(rest);
        values[n] = lane[i];
        keys[n++] = from[i];
    }
    return n;
}

// Exponential and logarithm: polynomials of Cephes (Moshier) for float, the library's logarithm for double.
// Summed in pairs, because the time is that of the longest chain of products.
__attribute__((always_inline)) inline Vec<float> exponential(Vec<float> x) {
    using I = Mask<float>;
    x = at_most<float>(at_least<float>(x, -87.3f), 88.3f);
    const Vec<float> shifted = x * 1.44269504f + 12582912.0f;  // rounds to a whole number
    const I exponent = ((I)shifted - (I)fill<float>(12582912.0f)) << 23;
    const Vec<float> whole = shifted - 12582912.0f;
    const Vec<float> r = (x - whole * 0.693359375f) + whole * 2.12194440e-4f;
    const Vec<float> r2 = r * r;
    Vec<float> y = (r * 1.9875691500e-4f + 1.3981999507e-3f) * r2 + (r * 8.3334519073e-3f + 4.1665795894e-2f);
    y = y * r2 + (r * 1.6666665459e-1f + 5.0000001201e-1f);
    y = (y * r2 + r) + 1.0f;
    return (Vec<float>)((I)y + exponent);
}
// Of positive, normal numbers.
__attribute__((always_inline)) inline Vec<float> logarithm(Vec<float> x) {
    using I = Mask<float>;
    I exponent = (((I)x >> 23) & 255) - 126;
    Vec<float> m = (Vec<float>)(((I)x & 0x007FFFFF) | 0x3F000000);  // in [1/2, 1)
    const I small = m < fill<float>(0.707106781f);
    exponent += small;  // a mask is -1
    m = (small ? m + m : m) - 1.0f;
    const Vec<float> e = __builtin_convertvector(exponent, Vec<float>);
    const Vec<float> z = m * m, z2 = z * z;
    const Vec<float> high = (m * 7.0376836292e-2f - 1.1514610310e-1f) * z + (m * 1.1676998740e-1f - 1.2420140846e-1f);
    const Vec<float> middle = (m * 1.4249322787e-1f - 1.6668057665e-1f) * z + (m * 2.0000714765e-1f - 2.4999993993e-1f);
    Vec<float> y = (high * z2 + middle) * m + 3.3333331174e-1f;
    y = y * m * z + e * -2.12194440e-4f - 0.5f * z;
    return (m + y) + e * 0.693359375f;
}
// x^k of positive, normal numbers for 0 < k < 3, to a relative error of 4e-4 and a third of the time.
__attribute__((always_inline)) inline Vec<float> rough_power(Vec<float> x, float k) {
    using I = Mask<float>;
    const Vec<float> e = __builtin_convertvector(((I)x >> 23) - 127, Vec<float>);
    const Vec<float> m = (Vec<float>)(((I)x & 0x007FFFFF) | 0x3F800000), m2 = m * m;  // in [1, 2)
    const Vec<float> log2 = (m * 0.62603218f - 2.07833517f - m2 * 0.07844068f) * m2 + (m * 4.02921139f - 2.49835315f) + e;
    const Vec<float> y = at_least<float>(log2 * k, -126.0f);
    const Vec<float> shifted = y + 12582912.0f;  // rounds to a whole number
    const I exponent = ((I)shifted - (I)fill<float>(12582912.0f)) << 23;
    const Vec<float> r = y - (shifted - 12582912.0f);
    const Vec<float> power = (r * 0.05583828f + 0.24263948f) * (r * r) + (r * 0.69313673f + 0.99992456f);
    return (Vec<float>)((I)power + exponent);
}
// Taylor's polynomial on |r| <= log(2) / 2; zero where the result would have no normal number.
__attribute__((always_inline)) inline Vec<double> exponential(Vec<double> x) {
    using I = Mask<double>;
    constexpr double kRound = 6755399441055744.0, kLeast = -708.0, kMost = 709.7;
    const Mask<double> none = x < fill<double>(kLeast), much = x > fill<double>(kMost);
    const Vec<double> y = none ? fill<double>(kLeast) : much ? fill<double>(kMost) : x;
    const Vec<double> shifted = y * 1.4426950408889634 + kRound, whole = shifted - kRound;
    const I exponent = ((I)shifted - (I)fill<double>(kRound)) << 52;
    const Vec<double> r = (y - whole * 6.93147180369123816490e-1) - whole * 1.90821492927058770002e-10;
    const Vec<double> r2 = r * r, r4 = r2 * r2, r8 = r4 * r4;
    const Vec<double> a = (r * 1.6666666666666667e-1 + 0.5) * r2 + r;
    const Vec<double> b = (r * 1.9841269841269841e-4 + 1.3888888888888889e-3) * r2 + (r * 8.3333333333333333e-3 + 4.1666666666666667e-2);
    const Vec<double> c = (r * 2.5052108385441719e-8 + 2.7557319223985891e-7) * r2 + (r * 2.7557319223985891e-6 + 2.4801587301587302e-5);
    const Vec<double> d = r * 1.6059043836821615e-10 + 2.0876756987868099e-9;
    const Vec<double> power = ((d * r4 + c) * r8 + (b * r4 + a)) + 1.0;
    const Vec<double> made = x == x ? (Vec<double>)((I)power + exponent) : x;
    return none ? Vec<double>{} : much ? fill<double>(std::numeric_limits<double>::infinity()) : made;
}
inline Vec<double> logarithm(Vec<double> x) {
    for (int i = 0; i < Lanes<double>::W; ++i) x[i] = std::log(x[i]);
    return x;
}
// log(1 + z) for z > -1: the digits that 1 + z drops are put back.
template <class T>
inline Vec<T> logarithm_one_plus(Vec<T> z) {
    const Vec<T> w = z + T(1);
    return logarithm(w) + (z - (w - T(1))) / w;
}
// Hyperbolic tangent: the polynomial of Cephes near zero, the exponential elsewhere; NaN stays NaN.
template <class T>
inline Vec<T> tangent(Vec<T> x) {
    if constexpr (sizeof(T) == 8) {
        for (int i = 0; i < Lanes<T>::W; ++i) x[i] = std::tanh(x[i]);
        return x;
    } else {
        const Vec<T> far = x < Vec<T>{} ? -x : x, z = x * x;
        const Vec<T> left = exponential(far * T(-2));
        const Vec<T> large = (T(1) - left) / (T(1) + left);
        const Vec<T> high = (z * -5.70498872745e-3f + 2.06390887954e-2f) * z - 5.37397155531e-2f;
        const Vec<T> small = ((high * z + 1.33314422036e-1f) * z - 3.33332819422e-1f) * (z * x) + x;
        const Vec<T> tail = x < Vec<T>{} ? -large : large;
        const Vec<T> value = far < fill<T>(0.625f) ? small : tail;
        return x == x ? value : x;
    }
}
