// Reading tensors of any layout and precision into scratch memory of the computation's precision.

inline float from_bfloat(std::uint16_t x) {
    const std::uint32_t bits = std::uint32_t(x) << 16;
    float y;
    std::memcpy(&y, &bits, 4);
    return y;
}
inline std::uint16_t to_bfloat(float x) {
    std::uint32_t bits;
    std::memcpy(&bits, &x, 4);
    if ((bits & 0x7FFFFFFF) > 0x7F800000) return std::uint16_t((bits >> 16) | 64);  // NaN stays NaN
    return std::uint16_t((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);               // to even
}
inline float from_half(std::uint16_t x) {
    const std::uint32_t sign = std::uint32_t(x & 0x8000) << 16, rest = x & 0x7FFF;
    if (rest < 0x0400) {  // zero or subnormal
        const float y = float(rest) * 5.9604644775390625e-8f;
        return sign ? -y : y;
    }
    const std::uint32_t bits = sign | (rest >= 0x7C00 ? 0x7F800000 | (rest & 0x3FF) << 13 : (rest << 13) + 0x38000000);
    float y;
    std::memcpy(&y, &bits, 4);
    return y;
}
inline std::uint16_t to_half(float x) {
    std::uint32_t bits;
    std::memcpy(&bits, &x, 4);
    const std::uint16_t sign = std::uint16_t(bits >> 16 & 0x8000);
    bits &= 0x7FFFFFFF;
    if (bits > 0x7F800000) return sign | 0x7E00;
    if (bits >= 0x477FF000) return sign | 0x7C00;  // rounds to infinity
    if (bits < 0x38800000) {                       // subnormal: adding 1/2 rounds to its last place
        float y;
        std::memcpy(&y, &bits, 4);
        y += 0.5f;
        std::memcpy(&bits, &y, 4);
        return sign | std::uint16_t(bits - 0x3F000000);
    }
    return sign | std::uint16_t((bits + 0xFFF + (bits >> 13 & 1) - 0x38000000) >> 13);
}

template <class T>
inline T read(const View& v, std::int64_t i) {
    switch (v.dtype) {
        case kFloat32: return T(static_cast<const float*>(v.data)[i]);
        case kFloat64: return T(static_cast<const double*>(v.data)[i]);
        case kBFloat16: return T(from_bfloat(static_cast<const std::uint16_t*>(v.data)[i]));
        default: return T(from_half(static_cast<const std::uint16_t*>(v.data)[i]));
    }
}

// to[0 .. n) = from[start + j * step]
template <class T>
inline void read_row(const View& v, std::int64_t start, std::int64_t step, std::int64_t n, T* to) {
    const auto own = sizeof(T) == 4 ? kFloat32 : kFloat64;
    if (v.dtype == own && step == 1) {
        std::memcpy(to, static_cast<const T*>(v.data) + start, n * sizeof(T));
        return;
    }
    if (v.dtype == kBFloat16 && step == 1) {  // without asking for the precision at each number
        const auto* from = static_cast<const std::uint16_t*>(v.data) + start;
        for (std::int64_t j = 0; j < n; ++j) to[j] = T(from_bfloat(from[j]));
        return;
    }
    for (std::int64_t j = 0; j < n; ++j) to[j] = read<T>(v, start + j * step);
}

// to[start + j * step] = from[j]
template <class T>
inline void write_row(const View& v, std::int64_t start, std::int64_t step, std::int64_t n, const T* from) {
    switch (v.dtype) {
        case kFloat32:
            for (std::int64_t j = 0; j < n; ++j) static_cast<float*>(v.data)[start + j * step] = float(from[j]);
            return;
        case kFloat64:
            for (std::int64_t j = 0; j < n; ++j) static_cast<double*>(v.data)[start + j * step] = double(from[j]);
            return;
        case kBFloat16:
            for (std::int64_t j = 0; j < n; ++j)
                static_cast<std::uint16_t*>(v.data)[start + j * step] = to_bfloat(float(from[j]));
            return;
        default:
            for (std::int64_t j = 0; j < n; ++j)
                static_cast<std::uint16_t*>(v.data)[start + j * step] = to_half(float(from[j]));
    }
}

inline std::int64_t padded(std::int64_t n, std::int64_t unit) { return (n + unit - 1) / unit * unit; }

// Rows first .. first + n - 1 of one head, times a factor, columns padded with zeros to whole tiles.
template <class T>
struct Rows {
    Buffer<T> own;
    const T* data = nullptr;
    std::int64_t ld = 0;
    std::int64_t origin = 0;  // number of the first row; `row` and the keys of supports count from zero

    // Rows that can be read where they are.
    static bool direct(const View& v, std::int64_t columns) {
        return v.dtype == (sizeof(T) == 4 ? kFloat32 : kFloat64) && v.stride[3] == 1 && padded(columns, kColumns<T>) == columns;
    }

    void take(const View& v, std::int64_t b, std::int64_t h, std::int64_t first, std::int64_t n,
              std::int64_t columns, T factor) {
        const std::int64_t wide = padded(columns, kColumns<T>);
        origin = 0;
        if (direct(v, columns) && factor == T(1)) {
            data = static_cast<const T*>(v.data) + v.at(b, h, first);
            ld = v.stride[2];
            return;
        }
        T* to = own.reserve(n * wide);
        for (std::int64_t i = 0; i < n; ++i, to += wide) {
            read_row<T>(v, v.at(b, h, first + i), v.stride[3], columns, to);
            for (std::int64_t j = 0; j < columns; ++j) to[j] *= factor;
            for (std::int64_t j = columns; j < wide; ++j) to[j] = 0;
        }
        data = own.get();
        ld = wide;
    }
    // Keys or values of a sequence, by their own numbers.
    void take_keys(const Sequence& s, const View& v, std::int64_t kv, const Range& part, std::int64_t columns) {
        const std::int64_t wide = padded(columns, kColumns<T>);
        origin = part.from;
        if (direct(v, columns) && s.in_one_piece(v, part)) {
            data = static_cast<const T*>(v.data) + s.place(v, kv, part.from);
            ld = v.stride[2];
            return;
        }
        T* to = own.reserve(part.size() * wide);
        for (std::int64_t key = part.from; key < part.to; ++key, to += wide) {
            read_row<T>(v, s.place(v, kv, key), v.stride[3], columns, to);
            for (std::int64_t j = columns; j < wide; ++j) to[j] = 0;
        }
        data = own.get();
        ld = wide;
    }
    const T* row(std::int64_t i) const { return data + (i - origin) * ld; }

    bool finite(std::int64_t first, std::int64_t stop, std::int64_t columns) const {
        constexpr int W = Lanes<T>::W;
        Vec<T> zero[4] = {};  // x * 0 is NaN for what is not finite; rows are whole vectors, and several sums need not wait
        for (std::int64_t i = first; i < stop; ++i) {
            const T* from = data + i * ld;
            std::int64_t j = 0;
            for (; j + 4 * W <= columns; j += 4 * W)
                for (int k = 0; k < 4; ++k) zero[k] += load<T>(from + j + k * W) * T(0);
            for (; j < columns; j += W) zero[0] += load<T>(from + j) * T(0);
        }
        return sum<T>((zero[0] + zero[1]) + (zero[2] + zero[3])) == 0;
    }
    // Numbers that are not finite become 0: for products with weights that are 0 there.
    void clean(std::int64_t n, std::int64_t columns) {
        const std::int64_t wide = padded(columns, kColumns<T>);
        T* to = own.reserve(n * wide);  // in place, or from a tensor without padding
        for (std::int64_t i = 0; i < n; ++i)
            for (std::int64_t j = 0; j < columns; ++j) {
                const T x = data[i * ld + j];
                to[i * wide + j] = std::isfinite(x) ? x : T(0);
            }
        data = to;
        ld = wide;
    }
};

// The hash of dropout.py on 32-bit words.
inline std::uint32_t mix(std::uint32_t word) {
    word = (word ^ word >> 16) * 0x7FEB352Du;
    word = (word ^ word >> 15) * 0x846CA68Bu;
    return word ^ word >> 16;
}

struct Dropout {
    std::uint64_t limit = 0;
    double factor = 1;
    std::uint32_t row = 0;

    Dropout(const Sequence& s, std::int64_t h, std::int64_t query) {
        const AttentionProblem& p = s.p;
        if (p.dropout <= 0) return;
        limit = std::uint64_t(std::nearbyint(p.dropout * 4294967296.0));
        factor = p.dropout < 1 ? 1 / (1 - p.dropout) : 0;
        const std::int64_t number =
            s.packed() ? s.row(h, query) : (s.number * p.heads + h) * p.queries_in_all + p.first + query;
        row = mix(std::uint32_t(std::uint64_t(number) * 0x9E3779B1u + std::uint64_t(p.seed)));
    }
    bool active() const { return limit > 0; }
    template <class T>
    T operator()(std::int32_t key) const {
        return mix(row ^ std::uint32_t(key) * 0x85EBCA77u) >= limit ? T(factor) : T(0);
    }
};
