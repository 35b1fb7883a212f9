// Screening: which keys can lie above a row's cut, from products of rounded operands.
//
// A query q becomes a x and a key k becomes b y, where a and b are powers of two and x and y are 16-bit numbers of norm
// below 2^15, so that x . y is exact in 32 bits. With |q - a x| <= a sqrt(d) / 2, |k - b y| <= b sqrt(d) / 2 and
// Cauchy and Schwarz, the score that `product.h` computes differs from a b (x . y) by at most
//   a sqrt(d) / 2 |k| + (|q| + a sqrt(d) / 2) b sqrt(d) / 2 + gamma |q| |k|,
// gamma being the rounding of a sum of d products. A key whose score cannot reach the cut is dropped unscored. All
// others are scored as ever, so that the search sees the same candidates and every bit is the same.
//
// 16-bit products run twice as fast as float32 ones from AVX2 on; elsewhere there is nothing to gain.

template <class T>
class Screen {};
template <class T>
constexpr bool kScreens = false;

#if defined(__AVX2__)
template <>
constexpr bool kScreens<float> = true;

using Ints = Mask<float>;

inline Ints multiply_pairs(Ints x, Ints y) {
#if defined(__AVX512F__)
    return (Ints)_mm512_madd_epi16((__m512i)x, (__m512i)y);
#else
    return (Ints)_mm256_madd_epi16((__m256i)x, (__m256i)y);
#endif
}
inline unsigned bits_above(Ints v, std::int32_t limit) {
#if defined(__AVX512F__)
    return _mm512_cmpgt_epi32_mask((__m512i)v, _mm512_set1_epi32(limit));
#else
    return unsigned(_mm256_movemask_ps((__m256)_mm256_cmpgt_epi32((__m256i)v, _mm256_set1_epi32(limit))));
#endif
}

// One bit for each of kColumns<float> keys whose product with row i exceeds limit[i].
template <int R>
inline void screen_tile(std::int64_t pairs, const std::int32_t* rows, std::int64_t ld, const float* panel,
                        const std::int32_t* limit, unsigned* bits) {
    constexpr int W = Lanes<float>::W;
    Ints left[R] = {}, right[R] = {};
    for (std::int64_t k = 0; k < pairs; ++k, ++rows, panel += 2 * W) {
        const Ints y0 = (Ints)load<float>(panel), y1 = (Ints)load<float>(panel + W);
        for (int i = 0; i < R; ++i) {
            const Ints x = Ints{} + rows[i * ld];
            left[i] += multiply_pairs(x, y0);
            right[i] += multiply_pairs(x, y1);
        }
    }
#pragma GCC unroll 8  // as in `tile`
    for (int i = 0; i < R; ++i) bits[i] = bits_above(left[i], limit[i]) | bits_above(right[i], limit[i]) << W;
}

// Up to eight keys of one row that are to be scored.
struct FewKeys {
    const float* query;
    const std::int32_t* key;
    std::int64_t n;
    float* score;  // room for eight
};
// Each score summed in the order of `tile`. That sum is a chain of dependent steps: several at once hide their latency.
template <int G>
inline void score_few(const FewKeys* few, const Rows<float>& keys, std::int64_t dim) {
    const float* row[G][8];
    __m256 sum[G], column[8];
    for (int g = 0; g < G; ++g) {
        for (int j = 0; j < 8; ++j) row[g][j] = keys.row(few[g].key[std::min<std::int64_t>(j, few[g].n - 1)]);
        sum[g] = _mm256_setzero_ps();
    }
    std::int64_t k = 0;
    for (; k + 8 <= dim; k += 8)
        for (int g = 0; g < G; ++g) {
            for (int j = 0; j < 8; ++j) column[j] = _mm256_loadu_ps(row[g][j] + k);
            transpose(column);
            for (int j = 0; j < 8; ++j) sum[g] = _mm256_fmadd_ps(_mm256_set1_ps(few[g].query[k + j]), column[j], sum[g]);
        }
    for (int g = 0; g < G; ++g) {
        _mm256_storeu_ps(few[g].score, sum[g]);
        for (std::int64_t i = k; i < dim; ++i)
            for (int j = 0; j < 8; ++j) few[g].score[j] = std::fma(few[g].query[i], row[g][j][i], few[g].score[j]);
    }
}
// The scores of several rows, each of its own keys.
class FewScores {
  public:
    FewScores(const Rows<float>& keys, std::int64_t dim) : keys_(keys), dim_(dim) {}
    void add(const float* query, const std::int32_t* key, std::int64_t n, float* score) {
        for (std::int64_t i = 0; i < n; i += 8) {
            few_[count_++] = {query, key + i, std::min<std::int64_t>(8, n - i), score + i};
            if (count_ == 4) flush();
        }
    }
    void flush() {
        int i = 0;
        if (count_ == 4) score_few<4>(few_, keys_, dim_), i = 4;
        if (i + 2 <= count_) score_few<2>(few_ + i, keys_, dim_), i += 2;
        if (i < count_) score_few<1>(few_ + i, keys_, dim_);
        count_ = 0;
    }

  private:
    const Rows<float>& keys_;
    std::int64_t dim_;
    FewKeys few_[4];
    int count_ = 0;
};

// Rows of one step: a power of two, and an upper bound on the norms before rounding.
struct Rounded {
    double step = 1, norm = 0;
    bool known = false;

    static double squares(const float* x, std::int64_t wide) {
        Vec<float> total{};
        for (std::int64_t j = 0; j < wide; j += Lanes<float>::W) total += load<float>(x + j) * load<float>(x + j);
        return sum<float>(total);
    }
    Rounded() = default;
    Rounded(double squares, std::int64_t wide) : known(true) {
        norm = std::sqrt(squares * (1 + double(wide) * 0x1p-22) + 1e-30);  // the sum was rounded
        int exponent = 0;
        if (norm < HUGE_VAL) std::frexp(norm / 32000, &exponent);
        step = std::ldexp(1.0, exponent);
    }
    // Pairs of 16-bit numbers, those nearest to x / step.
    void round(const float* x, std::int64_t wide, void* to) const {
        const __m256 factor = _mm256_set1_ps(float(1 / step));
        for (std::int64_t j = 0; j < wide; j += 16) {
            const __m256i low = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x + j), factor));
            const __m256i high = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x + j + 8), factor));
            const __m256i both = _mm256_permute4x64_epi64(_mm256_packs_epi32(low, high), 0xD8);
            _mm256_storeu_si256((__m256i*)((std::int16_t*)to + j), both);
        }
    }
};

template <>
class Screen<float> {
  public:
    using Few = FewScores;
    static constexpr std::int64_t kMostComponents = 4096;  // of a vector, so that its rounding cannot reach 2^15

    // Rows that are held: chunks of keys are rounded when first asked for.
    void enter(const Rows<float>& keys, const Range& held, std::int64_t dim) {
        keys_ = &keys;
        held_ = held;
        dim_ = dim;
        wide_ = padded(dim, kColumns<float>);
        panels_.dim = wide_ / 2;
        panels_.data.reserve(padded(held.size(), kColumns<float>) * wide_ / 2);
        const std::int64_t chunks = held.to / kChunk - held.from / kChunk + 1;
        for (std::int64_t i = 0; i < chunks; ++i) chunk_.reserve(chunks)[i] = Rounded();
    }
    void next_block() {
        for (Rounded& q : query_) q = Rounded();
    }

    // What a product of row i with a key of the chunk must exceed for the score to exceed the cut, given the most that
    // is added to it. False where no product is too small.
    bool limit(std::int64_t i, const float* query, const Range& part, double cut, const Added& added, std::int32_t& limit) {
        const Rounded &q = query_of(i, query), &k = chunk(part);
        const double half = std::sqrt(double(wide_)) / 2, most = q.norm * k.norm;
        const double rounding = half * (q.step * k.norm + k.step * (q.norm + half * q.step));
        const double sums = (double(dim_) + 8) * 0x1p-23 * most + 0x1p-22 * (added.size + std::fabs(cut)) + 1e-30;
        const double least = (cut - added.most) - rounding - sums;
        if (!(std::fabs(least) < HUGE_VAL) || !(most < 1e38) || least < -most) return false;
        limit = least > most + rounding ? std::numeric_limits<std::int32_t>::max()
                                        : std::int32_t(std::floor(least / (q.step * k.step)));
        return true;
    }

    // Keys from .. to - 1 of the chunk that exceed a row's limit, in order, for up to kRows rows from i on.
    void run(std::int64_t i, std::int64_t rows, const Range& seen, const std::int32_t* limit, std::int32_t (*key)[kChunk + 32],
             std::int64_t* count) const {
        constexpr std::int64_t P = kColumns<float>;
        const std::int64_t pairs = wide_ / 2;
        for (std::int64_t from = seen.from / P * P; from < seen.to; from += P) {
            unsigned bits[kRows], any = 0;
            const float* panel = panels_.data.get() + (from - held_.from) * pairs;
            strip(rows, pairs, rounded_query_.get() + i * pairs, panel, limit, bits);
            if (seen.to - from < P)  // what fills the last panel up is no key
                for (std::int64_t j = 0; j < rows; ++j) bits[j] &= (1u << (seen.to - from)) - 1;
            for (std::int64_t j = 0; j < rows; ++j) any |= bits[j];
            if (!any) continue;
            for (std::int64_t j = 0; j < rows; ++j)
                for (unsigned rest = bits[j]; rest; rest &= rest - 1)
                    key[j][count[j]++] = std::int32_t(from) + __builtin_ctz(rest);
        }
    }

  private:
    const Rounded& query_of(std::int64_t i, const float* query) {
        if (!query_[i].known) {
            query_[i] = Rounded(Rounded::squares(query, wide_), wide_);
            query_[i].round(query, wide_, rounded_query_.reserve(kBlock * wide_ / 2) + i * wide_ / 2);
        }
        return query_[i];
    }
    const Rounded& chunk(const Range& part) {
        Rounded& c = chunk_.get()[part.from / kChunk - held_.from / kChunk];
        if (!c.known) round_chunk(c, part.from / kChunk * kChunk);
        return c;
    }
    void round_chunk(Rounded& c, std::int64_t start) {
        constexpr std::int64_t P = kColumns<float>;
        const std::int64_t pairs = wide_ / 2, from = std::max(start, held_.from), to = std::min(start + kChunk, held_.to);
        double most = 0;
        for (std::int64_t key = from; key < to; ++key) {
            const double squares = Rounded::squares(keys_->row(key), wide_);
            if (most == most && !(squares <= most)) most = squares;  // NaN stays
        }
        c = Rounded(most, wide_);
        float* rows = scratch_.reserve(P * pairs);
        for (std::int64_t first = from; first < to; first += P) {
            const std::int64_t live = std::min(P, to - first);
            for (std::int64_t j = 0; j < live; ++j) c.round(keys_->row(first + j), wide_, rows + j * pairs);
            panels_.pack_panel(rows, pairs, live, panels_.data.get() + (first - held_.from) * pairs);
        }
    }
    static void strip(std::int64_t rows, std::int64_t pairs, const std::int32_t* x, const float* panel,
                      const std::int32_t* limit, unsigned* bits) {
        switch (rows) {
            case 6: return screen_tile<6>(pairs, x, pairs, panel, limit, bits);
            case 5: return screen_tile<5>(pairs, x, pairs, panel, limit, bits);
            case 4: return screen_tile<4>(pairs, x, pairs, panel, limit, bits);
            case 3: return screen_tile<3>(pairs, x, pairs, panel, limit, bits);
            case 2: return screen_tile<2>(pairs, x, pairs, panel, limit, bits);
            default: return screen_tile<1>(pairs, x, pairs, panel, limit, bits);
        }
    }

    const Rows<float>* keys_ = nullptr;
    Range held_{0, 0};
    std::int64_t dim_ = 0, wide_ = 0;
    Panels<float> panels_;  // of pairs of 16-bit numbers: packing only moves bits
    Buffer<float> scratch_;
    Buffer<Rounded> chunk_;
    Buffer<std::int32_t> rounded_query_;
    Rounded query_[kBlock];
};
#endif
