// The shadow of a cache: every key in one byte per component, and how far it is from that at most.
//
// A key k of a page is c + s y + r. The centre c is the same for the whole page, y are whole numbers from -127 to 127, s is
// a step and |r| <= rho; s and rho are bfloat16, rho rounded up. A query q, scaled as the product takes it, is a x + e with
// |x_i| <= 127 * 128 and |e| <= eps. With Cauchy and Schwarz,
//   |q . k - q . c - s a (x . y)| <= s eps |y| + |q| rho,   |y| <= 127 sqrt(d),
// and the rounding of the score that `product.h` computes, and of the bound itself, is below
//   eta |q| (|c| + s |y| + rho),   eta = (d + 16) 2^-23.
// A key whose bound does not exceed the cut of a row is not scored. All others are scored as ever: every bit is the same.

constexpr std::int64_t kPanel = 16;  // keys whose bytes stand together: [component / 4][key][component % 4]

// One page of one head: the norm of the centre, the centre, panels of bytes y + 128, and s and rho of each key.
struct ShadowShape {
    std::int64_t dim, groups, wide;

    explicit ShadowShape(std::int64_t d) : dim(d), groups((d + 3) / 4), wide((d + 15) / 16 * 16) {}
    std::int64_t panel_bytes() const { return groups * 4 * kPanel; }
    std::int64_t panels_at() const { return 64 + 4 * wide; }
    std::int64_t words_at() const { return panels_at() + kChunk / kPanel * panel_bytes(); }
    std::int64_t bytes() const { return words_at() + 4 * kChunk; }
};

struct ShadowPage {
    ShadowShape shape;
    std::uint8_t* data;

    float* norm() const { return reinterpret_cast<float*>(data); }
    float* centre() const { return reinterpret_cast<float*>(data + 64); }
    std::uint8_t* panel(std::int64_t key) const { return data + shape.panels_at() + key / kPanel * shape.panel_bytes(); }
    std::uint32_t* words() const { return reinterpret_cast<std::uint32_t*>(data + shape.words_at()); }

    void set(std::int64_t key, const std::uint8_t* y) const {
        std::uint8_t* to = panel(key) + key % kPanel * 4;
        for (std::int64_t g = 0; g < shape.groups; ++g) std::memcpy(to + g * 4 * kPanel, y + g * 4, 4);
    }
};

// The least bfloat16 that is not below x >= 0, as its bits.
inline std::uint32_t bfloat_above(double x) {
    float y = float(x);
    if (double(y) < x) y = std::nextafter(y, std::numeric_limits<float>::infinity());
    std::uint32_t bits;
    std::memcpy(&bits, &y, 4);
    return (bits + 0xFFFF) >> 16;  // infinity stays
}

// Makes the shadow of keys from `from` on, of a page that holds `to` of them.
struct ShadowWriter {
    ShadowPage page;
    Buffer<float> row, zeros;
    Buffer<std::uint8_t> bytes;

    // read(key, to): the components of a key of the page.
    template <class Read>
    void write(std::int64_t from, std::int64_t to, const Read& read) {
        float* x = row.reserve(page.shape.wide);
        for (std::int64_t j = page.shape.dim; j < page.shape.wide; ++j) x[j] = 0;
        if (is_due(from, to)) {
            centre(to, read, x);
            from = 0;
        }
        for (std::int64_t key = from; key < to; ++key) {
            read(key, x);
            write_key(key, x);
        }
    }

  private:
    // A page gets a new centre, the mean of its keys, when their number reaches a power of two; so that keys that come one
    // by one are written twice on average.
    static bool is_due(std::int64_t from, std::int64_t to) {
        if (from == 0) return true;
        for (std::int64_t n = 16; n <= to; n *= 2)
            if (from < n) return true;
        return false;
    }
    template <class Read>
    void centre(std::int64_t keys, const Read& read, float* x) {
        const std::int64_t dim = page.shape.dim;
        float* c = page.centre();
        std::memset(page.data, 0, page.shape.panels_at());
        float* nothing = zeros.reserve(page.shape.wide);
        std::memset(nothing, 0, page.shape.wide * sizeof(float));
        std::int64_t count = 0;
        for (std::int64_t key = 0; key < keys; ++key) {
            read(key, x);
            if (!(farthest(x, nothing, page.shape.wide) < 1e30f)) continue;  // NaN too
            ++count;
            const float share = 1 / float(count);
            for (std::int64_t j = 0; j < dim; ++j) c[j] += (x[j] - c[j]) * share;
        }
        double squares = 0;
        for (std::int64_t j = 0; j < dim; ++j) squares += double(c[j]) * double(c[j]);
        *page.norm() = float(std::sqrt(squares) * (1 + 1e-6));
    }
    // Rows are padded with zeros to whole vectors. What is left of a component is computed in float32, and wrong by less
    // than 2^-22 of the largest one.
    void write_key(std::int64_t key, const float* x) {
        constexpr int W = Lanes<float>::W;
        const std::int64_t wide = page.shape.wide;
        const double root = std::sqrt(double(page.shape.dim));
        const float* c = page.centre();
        const float most = farthest(x, c, wide);
        const bool fits = most < 1e15f && most > 1e-15f;  // squares stay within float32
        const std::uint32_t step_bits = fits ? bfloat_above(double(most) / 127) << 16 : 0;
        float step;
        std::memcpy(&step, &step_bits, 4);
        const float inverse = fits ? 1 / step : 0;
        std::uint8_t* y = bytes.reserve(wide);
        Vec<float> squares{};
        for (std::int64_t j = 0; j < wide; j += W) {
            const Vec<float> far = load<float>(x + j) - load<float>(c + j);
            const Vec<float> shifted = at_most<float>(at_least<float>(far * inverse, -127), 127) + 12582912.0f;  // rounds
            const Vec<float> rest = far - (shifted - 12582912.0f) * step;
            squares += rest * rest;
            const Mask<float> whole = (Mask<float>)shifted - (Mask<float>)fill<float>(12582912.0f) + 128;
            for (int i = 0; i < W; ++i) y[j + i] = std::uint8_t(whole[i]);
        }
        page.set(key, y);
        const double left = std::sqrt(double(sum<float>(squares))) * (1 + 1e-5) + 0x1p-22 * double(most) * root;
        double rho = (fits ? left : double(most) * root) * (1 + 1e-6) + 1e-38;
        if (!(rho < HUGE_VAL)) rho = HUGE_VAL;
        page.words()[key] = step_bits | bfloat_above(rho);
    }
    // The largest |x - c|; NaN where one is.
    static float farthest(const float* x, const float* c, std::int64_t wide) {
        Vec<float> most{}, broken{};
        for (std::int64_t j = 0; j < wide; j += Lanes<float>::W) {
            const Vec<float> d = load<float>(x + j) - load<float>(c + j), far = d < Vec<float>{} ? -d : d;
            most = far > most ? far : most;
            broken += far * 0.0f;
        }
        return largest<float>(most) + sum<float>(broken);
    }
};

template <class T>
struct AppendWorker {
    const AppendProblem& p;
    ShadowWriter writer{{ShadowShape(0), nullptr}, {}, {}, {}};
    Buffer<T> scratch;

    explicit AppendWorker(const AppendProblem& problem) : p(problem) {}

    // One page of one head of one sequence.
    void run(std::int64_t item) {
        const std::int64_t pages = p.tokens / kChunk + 2, page = item % pages, head = item / pages % p.kv_heads;
        const std::int64_t batch = item / pages / p.kv_heads, length = p.lengths[batch], chunk = length / kChunk + page;
        const Range part{std::max(length, chunk * kChunk), std::min(length + p.tokens, (chunk + 1) * kChunk)};
        if (part.empty()) return;
        const std::int64_t place = p.pages[batch * p.chunks + chunk];
        for (std::int64_t key = part.from; key < part.to; ++key) {
            copy(p.key, p.stored_key, batch, head, key - length, place, key % kChunk, p.dim);
            copy(p.value, p.stored_value, batch, head, key - length, place, key % kChunk, p.value_dim);
        }
        if (!p.shadow.data) return;
        writer.page = {ShadowShape(p.dim), static_cast<std::uint8_t*>(p.shadow.data) + p.shadow.at(place, head, 0)};
        writer.write(part.from % kChunk, part.to - chunk * kChunk, [&](std::int64_t key, float* to) {
            read_row<float>(p.stored_key, p.stored_key.at(place, head, key), p.stored_key.stride[3], p.dim, to);
        });
    }
    void copy(const View& from, const View& to, std::int64_t batch, std::int64_t head, std::int64_t token, std::int64_t place,
              std::int64_t row, std::int64_t n) {
        T* x = scratch.reserve(n);
        read_row<T>(from, from.at(batch, head, token), from.stride[3], n, x);
        write_row<T>(to, to.at(place, head, row), to.stride[3], n, x);
    }
};

template <class T>
class Shadow {
  public:
    static constexpr bool kUsed = false;
    void next_block() {}
};

#if defined(__AVX2__)
constexpr std::int64_t kShadowDim = 1024;  // most components: x . y stays within 32 bits

// A query in whole numbers: x = 128 high + low, four components to a word; pairs: the same as 16-bit numbers.
struct ShadowQuery {
    float step = 0, of_rho = 0, of_step = 0;  // a; factors of rho and s in the bound
    double norm = 0, eta = 0;
    std::int32_t high_sum = 0, low_sum = 0;   // what bytes y + 128 add to x . y
    std::int32_t *high = nullptr, *low = nullptr;
    std::int64_t* pairs = nullptr;
    bool known = false, usable = false;

    void take(const float* q, std::int64_t dim) {
        known = true;
        double squares = 0, rest = 0;
        float most = 0;
        for (std::int64_t j = 0; j < dim; ++j) {
            squares += double(q[j]) * double(q[j]);
            most = std::fabs(q[j]) <= most ? most : std::fabs(q[j]);
        }
        norm = std::sqrt(squares) * (1 + 1e-9);
        usable = norm < 1e18 && norm > 1e-18 && dim <= kShadowDim;
        if (!usable) return;
        step = std::nextafter(most / 16256, 1e30f);
        high_sum = low_sum = 0;
        auto *high_byte = reinterpret_cast<std::int8_t*>(high), *low_byte = reinterpret_cast<std::int8_t*>(low);
        auto* pair = reinterpret_cast<std::int16_t*>(pairs);
        for (std::int64_t j = 0; j < (dim + 3) / 4 * 4; ++j) {
            const int x = j < dim ? int(std::nearbyint(std::min(16256.f, std::max(-16256.f, q[j] / step)))) : 0;
            const double e = j < dim ? double(q[j]) - double(step) * x : 0;
            rest += e * e;
            high_byte[j] = std::int8_t((x + 64) >> 7);
            low_byte[j] = std::int8_t(x - 128 * high_byte[j]);
            pair[j] = std::int16_t(x);
            high_sum += 128 * high_byte[j];
            low_sum += 128 * low_byte[j];
        }
        eta = double(dim + 16) * 0x1p-23;
        const double most_y = 127 * std::sqrt(double(dim));
        of_rho = float(norm * (1 + eta) * (1 + 1e-6) + 1e-30);
        of_step = float((std::sqrt(rest) * (1 + 1e-6) + eta * norm) * most_y * (1 + 1e-6));
    }
    // q . c and its rounding, as the bound begins.
    float constant(const float* q, const ShadowPage& page) const {
        double product = 0;
        const float* c = page.centre();
        for (std::int64_t j = 0; j < page.shape.dim; ++j) product += double(q[j]) * double(c[j]);
        const double exact = product + slack(page);
        const float y = float(exact);
        return double(y) < exact ? std::nextafter(y, std::numeric_limits<float>::infinity()) : y;
    }
    double slack(const ShadowPage& page) const { return eta * norm * double(*page.norm()) + 1e-30; }
};

// Of R rows and the keys of some panels: a bound that no score exceeds, and how far below it a score may be at most.
struct ShadowBounds {
    const ShadowPage& page;
    const ShadowQuery* const* query;
    const float *constant, *slack;
    std::int64_t from, to;  // keys, at panels
    float *upper, *width;   // [row][kStride], from the page's first key on; width may be null
    std::int64_t stride;
};

// Sixteen bounds from the products of one row, eight at a time.
inline void finish_bounds(const ShadowBounds& b, int i, std::int64_t key, __m256i product, std::int64_t at) {
    const __m256i word = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(b.page.words() + key + at));
    const __m256 step = _mm256_castsi256_ps(_mm256_and_si256(word, _mm256_set1_epi32(std::int32_t(0xFFFF0000))));
    const __m256 rho = _mm256_castsi256_ps(_mm256_slli_epi32(word, 16));
    const ShadowQuery& q = *b.query[i];
    const __m256 far = _mm256_mul_ps(rho, _mm256_set1_ps(q.of_rho));
    const __m256 inner = _mm256_fmadd_ps(_mm256_cvtepi32_ps(product), _mm256_set1_ps(q.step), _mm256_set1_ps(q.of_step));
    const __m256 sum = _mm256_add_ps(_mm256_fmadd_ps(step, inner, _mm256_set1_ps(b.constant[i])), far);
    _mm256_storeu_ps(b.upper + i * b.stride + key + at, sum);
    if (!b.width) return;
    const __m256 half = _mm256_add_ps(_mm256_fmadd_ps(step, _mm256_set1_ps(q.of_step), far), _mm256_set1_ps(b.slack[i]));
    _mm256_storeu_ps(b.width + i * b.stride + key + at, _mm256_add_ps(half, half));
}

template <int R>
void shadow_bounds(const ShadowBounds& b) {
    const std::int64_t groups = b.page.shape.groups;
    for (std::int64_t key = b.from; key < b.to; key += kPanel) {
        const std::uint8_t* panel = b.page.panel(key);
        for (int half = 0; half < 2; ++half, panel += 32) {
            __m256i sum[R][2] = {};
            for (std::int64_t g = 0; g < groups; ++g)
                for (int k = 0; k < 2; ++k) {
                    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(panel + 64 * g + 16 * k));
                    const __m256i y = _mm256_cvtepi8_epi16(_mm_xor_si128(bytes, _mm_set1_epi8(-128)));
                    for (int i = 0; i < R; ++i)
                        sum[i][k] = _mm256_add_epi32(sum[i][k], _mm256_madd_epi16(y, _mm256_set1_epi64x(b.query[i]->pairs[g])));
                }
            for (int i = 0; i < R; ++i)
                finish_bounds(b, i, key, _mm256_permute4x64_epi64(_mm256_hadd_epi32(sum[i][0], sum[i][1]), 0xD8), 8 * half);
        }
    }
}

#if defined(__AVX512F__)
#define FENCHEL_VNNI __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,fma")))
template <int R>
FENCHEL_VNNI void shadow_bounds_vnni(const ShadowBounds& b) {
    const std::int64_t groups = b.page.shape.groups;
    for (std::int64_t key = b.from; key < b.to; key += kPanel) {
        const std::uint8_t* panel = b.page.panel(key);
        __m512i high[R], low[R];
        for (int i = 0; i < R; ++i) {
            high[i] = _mm512_set1_epi32(-b.query[i]->high_sum);
            low[i] = _mm512_set1_epi32(-b.query[i]->low_sum);
        }
        for (std::int64_t g = 0; g < groups; ++g) {
            const __m512i y = _mm512_loadu_si512(panel + 64 * g);
            for (int i = 0; i < R; ++i) {
                high[i] = _mm512_dpbusd_epi32(high[i], y, _mm512_set1_epi32(b.query[i]->high[g]));
                low[i] = _mm512_dpbusd_epi32(low[i], y, _mm512_set1_epi32(b.query[i]->low[g]));
            }
        }
        for (int i = 0; i < R; ++i) {
            const __m512i product = _mm512_add_epi32(_mm512_slli_epi32(high[i], 7), low[i]);
            finish_bounds(b, i, key, _mm512_castsi512_si256(product), 0);
            finish_bounds(b, i, key, _mm512_extracti64x4_epi64(product, 1), 8);
        }
    }
}
#endif

template <int R>
inline void bounds_of(const ShadowBounds& b) {
#if defined(__AVX512F__)
    static const bool vnni = __builtin_cpu_supports("avx512vnni");
    if (vnni) return shadow_bounds_vnni<R>(b);
#endif
    shadow_bounds<R>(b);
}

// The rows of a block, against the pages of a cache.
template <>
class Shadow<float> {
  public:
    static constexpr bool kUsed = true;
    void next_block() {
        for (ShadowQuery& q : query_) q.known = false;
    }
    bool usable(std::int64_t i, const float* q, std::int64_t dim) {
        ShadowQuery& x = query_[i];
        if (!x.known) {
            const std::int64_t groups = (dim + 3) / 4;
            x.pairs = words_.reserve(2 * kBlock * groups) + 2 * i * groups;
            x.high = reinterpret_cast<std::int32_t*>(x.pairs + groups);
            x.low = x.high + groups;
            x.take(q, dim);
        }
        return x.usable;
    }
    // Bounds of the scores of rows i[0 .. n) against keys of one page; false where the page allows none.
    bool run(const ShadowPage& page, std::int64_t n, const std::int64_t* i, const float* const* q, const Range& keys,
             bool with_width, std::int64_t stride) {
        float constant[kRows], slack[kRows];
        const ShadowQuery* query[kRows];
        for (std::int64_t k = 0; k < n; ++k) {
            query[k] = &query_[i[k]];
            constant[k] = query[k]->constant(q[k], page);
            slack[k] = float(query[k]->slack(page) * (1 + 1e-6));
            if (!(std::fabs(constant[k]) < 1e30f)) return false;
        }
        upper = upper_.reserve(kRows * stride);
        width = width_.reserve(kRows * stride);
        const std::int64_t from = keys.from / kPanel * kPanel;
        for (std::int64_t k = 0; k < n; k += 4) {
            const ShadowBounds b{page, query + k, constant + k, slack + k, from, keys.to, upper + k * stride,
                                 with_width ? width + k * stride : nullptr, stride};
            n - k >= 4   ? bounds_of<4>(b)
            : n - k == 3 ? bounds_of<3>(b)
            : n - k == 2 ? bounds_of<2>(b)
                         : bounds_of<1>(b);
        }
        return true;
    }
    float *upper = nullptr, *width = nullptr;

  private:
    ShadowQuery query_[kBlock];
    Buffer<std::int64_t> words_;
    Buffer<float> upper_, width_;
};
#endif
