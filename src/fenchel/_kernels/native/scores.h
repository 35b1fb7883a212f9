// Scores of a block of queries, chunk by chunk, with bias, mask and causality applied.

template <class T>
struct Scores {
    const AttentionProblem& p;
    Panels<T> panels;
    Buffer<T> bias;

    explicit Scores(const AttentionProblem& problem) : p(problem) {}

    bool plain() const { return !p.mask.data && !p.bias.data && !p.mass.data; }

    // Keys that a query may see: 0 .. limit - 1.
    std::int64_t limit(std::int64_t query) const {
        if (!p.causal) return p.keys;
        const std::int64_t seen = query + p.first + 1;
        return seen < 0 ? 0 : seen < p.keys ? seen : p.keys;
    }

    // A mask that is the same for all queries may end early (padding): no query sees keys beyond.
    std::int64_t visible(std::int64_t b, std::int64_t h, std::int64_t stop) const {
        std::int64_t last = limit(stop - 1);
        if (!p.mask.data || p.mask.stride[2] != 0) return last;
        const auto* mask = static_cast<const std::uint8_t*>(p.mask.data) + p.mask.at(b, h, 0);
        while (last > 0 && !mask[(last - 1) * p.mask.stride[3]]) --last;
        return last;
    }

    // One row of a chunk: what is not the product. Hidden keys become -inf.
    void finish(T* s, std::int64_t b, std::int64_t h, std::int64_t query, std::int64_t from,
                std::int64_t to) {
        const T hidden = -std::numeric_limits<T>::infinity();
        const std::int64_t n = to - from;
        if (p.bias.data) {
            T* extra = bias.reserve(kChunk);
            read_row<T>(p.bias, p.bias.at(b, h, query) + from * p.bias.stride[3], p.bias.stride[3], n, extra);
            const T factor = T(p.bias_scale);
            const T least = std::numeric_limits<T>::lowest();
            for (std::int64_t j = 0; j < n; ++j) {
                const T sum = s[j] + factor * extra[j];
                s[j] = sum < least && extra[j] >= least ? least : sum;  // only -inf hides a key
            }
        }
        if (p.mask.data) {
            const std::int64_t step = p.mask.stride[3];
            const auto* mask = static_cast<const std::uint8_t*>(p.mask.data) + p.mask.at(b, h, query) + from * step;
            if (step == 1)
                for (std::int64_t j = 0; j < n; ++j) s[j] = mask[j] ? s[j] : hidden;
            else
                for (std::int64_t j = 0; j < n; ++j) s[j] = mask[j * step] ? s[j] : hidden;
        }
        if (p.mass.data) {
            T* mass = bias.reserve(kChunk);
            masses(b, h, query, from, to, mass);
            for (std::int64_t j = 0; j < n; ++j) s[j] = mass[j] == 0 ? hidden : s[j];
        }
    }

    T mass(std::int64_t b, std::int64_t h, std::int64_t query, std::int64_t key) const {
        const T m = read<T>(p.mass, p.mass.at(b, h, query) + key * p.mass.stride[3]);
        return p.mass_is_log ? T(std::exp(m)) : m;
    }
    void masses(std::int64_t b, std::int64_t h, std::int64_t query, std::int64_t from, std::int64_t to,
                T* out) const {
        read_row<T>(p.mass, p.mass.at(b, h, query) + from * p.mass.stride[3], p.mass.stride[3], to - from, out);
        if (p.mass_is_log)
            for (std::int64_t j = 0; j < to - from; ++j) out[j] = T(std::exp(out[j]));
    }
};
