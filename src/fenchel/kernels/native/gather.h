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

template <class T, int V>
inline void gather_columns(std::int64_t n, const T* w, const std::int32_t* key, const T* rows,
                           std::int64_t ld, T* out) {
    constexpr int W = Lanes<T>::W;
    Vec<T> total[V];
    for (int j = 0; j < V; ++j) total[j] = Vec<T>{};
    for (std::int64_t i = 0; i < n; ++i) {
        const T* row = rows + key[i] * ld;
        const T x = w[i];
        for (int j = 0; j < V; ++j) total[j] += x * load<T>(row + j * W);
    }
    for (int j = 0; j < V; ++j) store<T>(out + j * W, total[j]);
}

// out = sum_i w[i] * rows[key[i]], `wide` columns (whole tiles)
template <class T>
inline void gather(std::int64_t n, const T* w, const std::int32_t* key, const Rows<T>& rows,
                   std::int64_t wide, T* out) {
    constexpr int W = Lanes<T>::W;
    std::int64_t j = 0;
    for (; j + 8 * W <= wide; j += 8 * W) gather_columns<T, 8>(n, w, key, rows.data + j, rows.ld, out + j);
    for (; j + 4 * W <= wide; j += 4 * W) gather_columns<T, 4>(n, w, key, rows.data + j, rows.ld, out + j);
    for (; j < wide; j += 2 * W) gather_columns<T, 2>(n, w, key, rows.data + j, rows.ld, out + j);
}
