// Sums over a support: weights from distances, and rows of a matrix added up.

template <class T>
inline void weights(const Family<T>& family, const Candidates<T>& c, T* w, T* slope = nullptr) {
    by_kind(family, [&](auto kind) {
        for (std::int64_t i = 0; i < c.count; i += Lanes<T>::W) {
            Vec<T> p, r;
            weigh<T, decltype(kind)::value>(family, load<T>(c.score + i), p, r);
            if (c.mass) {
                p *= load<T>(c.mass + i);
                r *= load<T>(c.mass + i);
            }
            store<T>(w + i, p);
            if (slope) store<T>(slope + i, r);
        }
    });
}

constexpr std::int64_t kShort = 32;  // long sums are sums of short ones: less rounding
constexpr std::int64_t kShortChunk = 128;  // the same in tiles

template <class T, int V>
inline void gather_columns(std::int64_t n, const T* w, const std::int32_t* key, const T* rows,
                           std::int64_t ld, std::int64_t origin, T* out) {
    constexpr int W = Lanes<T>::W;
    for (std::int64_t start = 0; start < n; start += kShort) {
        Vec<T> total[V] = {};
        const std::int64_t stop = start + kShort < n ? start + kShort : n;
        for (std::int64_t i = start; i < stop; ++i) {
            const T* row = rows + (key[i] - origin) * ld;
            const T x = w[i];
            for (int j = 0; j < V; ++j) total[j] += x * load<T>(row + j * W);
        }
#pragma GCC unroll 8  // as in `tile`
        for (int j = 0; j < V; ++j) store<T>(out + j * W, load<T>(out + j * W) + total[j]);
    }
}

template <class T, int V>
inline void scatter_columns(std::int64_t n, const T* w, const std::int32_t* key, const T* row, T* rows,
                            std::int64_t ld) {
    constexpr int W = Lanes<T>::W;
    Vec<T> x[V];
    for (int j = 0; j < V; ++j) x[j] = load<T>(row + j * W);
    for (std::int64_t i = 0; i < n; ++i) {
        T* to = rows + key[i] * ld;
        for (int j = 0; j < V; ++j) store<T>(to + j * W, load<T>(to + j * W) + w[i] * x[j]);
    }
}

// rows[key[i]] += w[i] * row
template <class T>
inline void scatter(std::int64_t n, const T* w, const std::int32_t* key, const T* row, std::int64_t wide,
                    T* rows) {
    constexpr int W = Lanes<T>::W;
    std::int64_t j = 0;
    for (; j + 8 * W <= wide; j += 8 * W) scatter_columns<T, 8>(n, w, key, row + j, rows + j, wide);
    for (; j + 4 * W <= wide; j += 4 * W) scatter_columns<T, 4>(n, w, key, row + j, rows + j, wide);
    for (; j < wide; j += 2 * W) scatter_columns<T, 2>(n, w, key, row + j, rows + j, wide);
}

// out[i] = <row, rows[key[i]]>
template <class T>
inline void dots(std::int64_t n, const std::int32_t* key, const T* row, const Rows<T>& rows,
                 std::int64_t wide, T* out) {
    constexpr int W = Lanes<T>::W;
    for (std::int64_t i = 0; i < n; ++i) {
        const T* other = rows.row(key[i]);
        Vec<T> a{}, b{};
        for (std::int64_t j = 0; j < wide; j += 2 * W) {
            a += load<T>(row + j) * load<T>(other + j);
            b += load<T>(row + j + W) * load<T>(other + j + W);
        }
        out[i] = sum<T>(a + b);
    }
}

// out += sum_i w[i] * rows[key[i]], `wide` columns (whole tiles)
template <class T>
inline void gather(std::int64_t n, const T* w, const std::int32_t* key, const Rows<T>& rows,
                   std::int64_t wide, T* out) {
    constexpr int W = Lanes<T>::W;
    std::int64_t j = 0;
    for (; j + 8 * W <= wide; j += 8 * W) gather_columns<T, 8>(n, w, key, rows.data + j, rows.ld, rows.origin, out + j);
    for (; j + 4 * W <= wide; j += 4 * W) gather_columns<T, 4>(n, w, key, rows.data + j, rows.ld, rows.origin, out + j);
    for (; j < wide; j += 2 * W) gather_columns<T, 2>(n, w, key, rows.data + j, rows.ld, rows.origin, out + j);
}
