// The matrix product everything rests on: C (+)= A B on register tiles.

template <class T>
constexpr int kColumns = 2 * Lanes<T>::W;  // of a register tile
constexpr int kRows = 6;

// C[i][j] (+)= sum_k A[i * a_row + k * a_col] * B[k * b_row + j], i < R, j < kColumns.
template <class T, int R>
inline void tile(std::int64_t depth, const T* a, std::int64_t a_row, std::int64_t a_col, const T* b,
                 std::int64_t b_row, T* c, std::int64_t c_row, bool add) {
    constexpr int W = Lanes<T>::W;
    Vec<T> left[R] = {}, right[R] = {};
    for (std::int64_t k = 0; k < depth; ++k) {
        const Vec<T> b0 = load<T>(b), b1 = load<T>(b + W);
        for (int i = 0; i < R; ++i) {
            const T x = a[i * a_row];
            left[i] += x * b0;
            right[i] += x * b1;
        }
        a += a_col;
        b += b_row;
    }
#pragma GCC unroll 8  // early, or the sums live in memory: a quarter of the time
    for (int i = 0; i < R; ++i, c += c_row) {
        store<T>(c, add ? load<T>(c) + left[i] : left[i]);
        store<T>(c + W, add ? load<T>(c + W) + right[i] : right[i]);
    }
}

// Any number of rows; the order of the sums over k does not depend on how rows are grouped.
template <class T>
inline void strip(std::int64_t rows, std::int64_t depth, const T* a, std::int64_t a_row,
                  std::int64_t a_col, const T* b, std::int64_t b_row, T* c, std::int64_t c_row,
                  bool add) {
    std::int64_t i = 0;
    for (; i + kRows <= rows; i += kRows)
        tile<T, kRows>(depth, a + i * a_row, a_row, a_col, b, b_row, c + i * c_row, c_row, add);
    a += i * a_row;
    c += i * c_row;
    switch (rows - i) {
        case 5: return tile<T, 5>(depth, a, a_row, a_col, b, b_row, c, c_row, add);
        case 4: return tile<T, 4>(depth, a, a_row, a_col, b, b_row, c, c_row, add);
        case 3: return tile<T, 3>(depth, a, a_row, a_col, b, b_row, c, c_row, add);
        case 2: return tile<T, 2>(depth, a, a_row, a_col, b, b_row, c, c_row, add);
        case 1: return tile<T, 1>(depth, a, a_row, a_col, b, b_row, c, c_row, add);
        default: return;
    }
}

// Columns that fill one vector at most: a wider tile would spend half of its work on nothing.
template <class T, int R>
inline void narrow_tile(std::int64_t depth, const T* a, std::int64_t a_row, std::int64_t a_col, const T* b,
                        std::int64_t b_row, T* c, std::int64_t c_row, bool add) {
    Vec<T> found[R] = {};
    for (std::int64_t k = 0; k < depth; ++k, a += a_col, b += b_row) {
        const Vec<T> row = load<T>(b);
        for (int i = 0; i < R; ++i) found[i] += a[i * a_row] * row;
    }
#pragma GCC unroll 16
    for (int i = 0; i < R; ++i, c += c_row) store<T>(c, add ? load<T>(c) + found[i] : found[i]);
}
template <class T>
inline void narrow(std::int64_t rows, std::int64_t depth, const T* a, std::int64_t a_row, std::int64_t a_col,
                   const T* b, std::int64_t b_row, T* c, std::int64_t c_row, bool add) {
    constexpr int R = 2 * kRows;  // as many sums at once as a whole tile has
    std::int64_t i = 0;
    for (; i + R <= rows; i += R)
        narrow_tile<T, R>(depth, a + i * a_row, a_row, a_col, b, b_row, c + i * c_row, c_row, add);
    for (; i < rows; ++i) narrow_tile<T, 1>(depth, a + i * a_row, a_row, a_col, b, b_row, c + i * c_row, c_row, add);
}

// B with its columns padded to whole tiles.
template <class T>
inline void product(std::int64_t rows, std::int64_t columns, std::int64_t depth, const T* a,
                    std::int64_t a_row, std::int64_t a_col, const T* b, std::int64_t b_row, T* c,
                    std::int64_t c_row, bool add) {
    for (std::int64_t j = 0; j < columns; j += kColumns<T>)
        strip<T>(rows, depth, a, a_row, a_col, b + j, b_row, c + j, c_row, add);
}

#if defined(__AVX2__)
// Eight rows of eight numbers become columns.
__attribute__((always_inline)) inline void transpose(__m256* r) {
    __m256 t[8];
    for (int j = 0; j < 8; j += 2) {
        t[j] = _mm256_unpacklo_ps(r[j], r[j + 1]);
        t[j + 1] = _mm256_unpackhi_ps(r[j], r[j + 1]);
    }
    for (int j = 0; j < 8; j += 4)
        for (int k = 0; k < 2; ++k) {
            r[j + 2 * k] = _mm256_shuffle_ps(t[j + k], t[j + k + 2], 0x44);
            r[j + 2 * k + 1] = _mm256_shuffle_ps(t[j + k], t[j + k + 2], 0xEE);
        }
    for (int k = 0; k < 4; ++k) {
        const __m256 low = r[k], high = r[k + 4];
        r[k] = _mm256_permute2f128_ps(low, high, 0x20);
        r[k + 4] = _mm256_permute2f128_ps(low, high, 0x31);
    }
}
// to[k * step + j] = rows[j * ld + k]
inline void transpose(const float* rows, std::int64_t ld, float* to, std::int64_t step) {
    __m256 r[8];
    for (int j = 0; j < 8; ++j) r[j] = _mm256_loadu_ps(rows + j * ld);
    transpose(r);
    for (int k = 0; k < 8; ++k) _mm256_storeu_ps(to + k * step, r[k]);
}
#endif

// Keys in panels [panel][component][kColumns], so that scores read them in order.
template <class T>
struct Panels {
    Buffer<T> data;
    std::int64_t dim = 0;

    void reserve(std::int64_t keys, std::int64_t d) {
        dim = d;
        data.reserve((keys + kColumns<T> - 1) / kColumns<T> * kColumns<T> * d);
    }
    void pack_all(const T* rows, std::int64_t ld, std::int64_t keys, std::int64_t d) {
        reserve(keys, d);
        pack(rows, ld, 0, keys);
    }
    // Keys from .. to - 1, with `from` at the start of a panel.
    void pack(const T* rows, std::int64_t ld, std::int64_t from, std::int64_t to) {
        constexpr std::int64_t P = kColumns<T>;
        for (std::int64_t j = from; j < to; j += P)
            pack_panel(rows + j * ld, ld, to - j < P ? to - j : P, data.get() + j * dim);
    }
    void pack_panel(const T* rows, std::int64_t ld, std::int64_t live, T* to) const {
        constexpr std::int64_t P = kColumns<T>;
        std::int64_t done = 0;  // components of whole panels that are packed
#if defined(__AVX2__)
        if constexpr (sizeof(T) == 4)
            if (live == P)
                for (; done + 8 <= dim; done += 8)
                    for (std::int64_t j = 0; j < P; j += 8) transpose(rows + j * ld + done, ld, to + done * P + j, P);
#endif
        for (std::int64_t k = done; k < dim; ++k) {
            for (std::int64_t j = 0; j < live; ++j) to[k * P + j] = rows[j * ld + k];
            for (std::int64_t j = live; j < P; ++j) to[k * P + j] = 0;
        }
    }
    // c[rows][0 .. to - from) = a . keys, with `from` at the start of a panel
    void scores(std::int64_t rows, const T* a, std::int64_t lda, std::int64_t from, std::int64_t to,
                T* c, std::int64_t ldc) const {
        constexpr std::int64_t P = kColumns<T>;
        for (std::int64_t j = from; j < to; j += P)
            strip<T>(rows, dim, a, lda, 1, data.get() + j * dim, P, c + (j - from), ldc, false);
    }
};
