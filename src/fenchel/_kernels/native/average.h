// sum_j share_j sum_t softmax_t(<query_j, key_t>) value_t, and its derivatives. Only the average of the
// weights over the queries, m_t = sum_j share_j p_jt, meets the values: one product of matrices in place of
// two, and three in place of five on the way back, where with g_t = <slope, value_t> and r_j = sum_t p_jt g_t
//     d share_j = r_j,   d score_jt = share_j p_jt (g_t - r_j),   d value_t = m_t slope.

template <class T>
struct Average {
    const AverageProblem& p;
    const std::int64_t length, depth;  // of a line of weights, of a padded row of queries or keys
    Panels<T> panels;
    Buffer<T> scores, mean, along, keys, queries, to_queries, to_keys;

    explicit Average(const AverageProblem& problem)
        : p(problem), length(padded(p.keys, Lanes<T>::W)), depth(padded(p.dim, kColumns<T>)) {
        scores.reserve(kBlock * length);
        mean.reserve(length);
        along.reserve(length);
    }

    void run(std::int64_t group) {
        const T* key = static_cast<const T*>(p.key) + group * p.keys * p.dim;
        const T* value = static_cast<const T*>(p.value) + group * p.keys * p.value_dim;
        panels.pack_all(key, p.dim, p.keys, p.dim);
        if (p.output) {
            for (std::int64_t row = 0; row < p.rows; ++row) forward(group * p.rows + row, value);
            return;
        }
        spread(key, p.keys, keys.reserve(p.keys * depth));
        clear(to_keys.reserve(p.keys * depth), p.keys * depth);
        T* to_value = static_cast<T*>(p.to_value) + group * p.keys * p.value_dim;
        clear(to_value, p.keys * p.value_dim);
        for (std::int64_t row = 0; row < p.rows; ++row) backward(group * p.rows + row, value, to_value);
        gather(to_keys.get(), p.keys, static_cast<T*>(p.to_key) + group * p.keys * p.dim);
    }

  private:
    static void clear(T* to, std::int64_t count) {
        for (std::int64_t i = 0; i < count; ++i) to[i] = 0;
    }
    // Rows of `dim` numbers to rows of `depth`, zeros after them, and back.
    void spread(const T* from, std::int64_t rows, T* to) const {
        for (std::int64_t i = 0; i < rows; ++i)
            for (std::int64_t k = 0; k < depth; ++k) to[i * depth + k] = k < p.dim ? from[i * p.dim + k] : 0;
    }
    void gather(const T* from, std::int64_t rows, T* to) const {
        for (std::int64_t i = 0; i < rows; ++i)
            for (std::int64_t k = 0; k < p.dim; ++k) to[i * p.dim + k] = from[i * depth + k];
    }
    // C (+)= A B, B and C with rows of `depth`.
    void multiply(std::int64_t rows, std::int64_t inner, const T* a, std::int64_t a_row, std::int64_t a_col,
                  const T* b, T* c, bool add) const {
        if (p.dim <= Lanes<T>::W)
            narrow<T>(rows, inner, a, a_row, a_col, b, depth, c, depth, add);
        else
            product<T>(rows, p.dim, inner, a, a_row, a_col, b, depth, c, depth, add);
    }

    // exp(score - the largest), zero beyond the last key. Returns what makes weights of them, NaN where a
    // score is not finite; `reward` becomes their sum with the entries of `along`.
    T weigh(T* line, T* reward) const {
        constexpr int W = Lanes<T>::W;
        for (std::int64_t t = p.keys; t < length; ++t) line[t] = std::numeric_limits<T>::lowest();
        Vec<T> top = load<T>(line), spoilt = top - top;
        for (std::int64_t t = W; t < length; t += W) {
            const Vec<T> v = load<T>(line + t);
            top = v > top ? v : top;
            spoilt += v - v;
        }
        const T peak = largest<T>(top);
        Vec<T> total{}, with{};
        for (std::int64_t t = 0; t < length; t += W) {
            const Vec<T> e = exponential(load<T>(line + t) - peak);
            store<T>(line + t, e);
            total += e;  // what stands beyond the last key is below rounding
            if (reward) with += e * load<T>(along.get() + t);  // where that is zero
        }
        for (std::int64_t t = p.keys; t < length; ++t) line[t] = 0;
        if (reward) *reward = sum<T>(with);
        return 1 / (sum<T>(total) + sum<T>(spoilt));
    }

    void score(std::int64_t row, std::int64_t start, std::int64_t count) {
        const T* query = static_cast<const T*>(p.query) + (row * p.queries + start) * p.dim;
        const std::int64_t last = length / kColumns<T> * kColumns<T>;  // after it half a panel is left, or none
        panels.scores(count, query, p.dim, 0, last, scores.get(), length);
        if (last < length)
            narrow<T>(count, p.dim, query, p.dim, 1, panels.data.get() + last * p.dim, kColumns<T>,
                      scores.get() + last, length, false);
    }

    void forward(std::int64_t row, const T* value) {
        const T* share = static_cast<const T*>(p.share) + row * p.queries;
        clear(mean.get(), length);
        for (std::int64_t start = 0; start < p.queries; start += kBlock) {
            const std::int64_t count = std::min(kBlock, p.queries - start);
            score(row, start, count);
            for (std::int64_t j = 0; j < count; ++j) add_to_mean(share[start + j], scores.get() + j * length);
        }
        T* out = static_cast<T*>(p.output) + row * p.value_dim;
        clear(out, p.value_dim);
        for (std::int64_t t = 0; t < p.keys; ++t)
            for (std::int64_t k = 0; k < p.value_dim; ++k) out[k] += mean.get()[t] * value[t * p.value_dim + k];
    }

    void backward(std::int64_t row, const T* value, T* to_value) {
        const T* slope = static_cast<const T*>(p.slope) + row * p.value_dim;
        clear(mean.get(), length);
        clear(along.get(), length);
        for (std::int64_t t = 0; t < p.keys; ++t)
            for (std::int64_t k = 0; k < p.value_dim; ++k) along.get()[t] += slope[k] * value[t * p.value_dim + k];
        for (std::int64_t start = 0; start < p.queries; start += kBlock)
            block(row, start, std::min(kBlock, p.queries - start));
        for (std::int64_t t = 0; t < p.keys; ++t)
            for (std::int64_t k = 0; k < p.value_dim; ++k) to_value[t * p.value_dim + k] += mean.get()[t] * slope[k];
    }

    void block(std::int64_t row, std::int64_t start, std::int64_t count) {
        const std::int64_t first = row * p.queries + start;
        score(row, start, count);
        for (std::int64_t j = 0; j < count; ++j) {
            const T share = static_cast<const T*>(p.share)[first + j];
            static_cast<T*>(p.to_share)[first + j] = to_scores(share, scores.get() + j * length);
        }
        T* query = queries.reserve(kBlock * depth);
        T* to_query = to_queries.reserve(kBlock * depth);
        spread(static_cast<const T*>(p.query) + first * p.dim, count, query);
        multiply(count, p.keys, scores.get(), length, 1, keys.get(), to_query, false);
        gather(to_query, count, static_cast<T*>(p.to_query) + first * p.dim);
        multiply(p.keys, count, scores.get(), 1, length, query, to_keys.get(), true);
    }

    void add_to_mean(T share, T* line) {
        const T factor = share * weigh(line, nullptr);
        for (std::int64_t t = 0; t < length; t += Lanes<T>::W)
            store<T>(mean.get() + t, load<T>(mean.get() + t) + factor * load<T>(line + t));
    }

    // Scores to the derivative in them; returns the one in the share.
    T to_scores(T share, T* line) {
        T reward;
        const T inverse = weigh(line, &reward), factor = share * inverse;
        reward *= inverse;
        for (std::int64_t t = 0; t < length; t += Lanes<T>::W) {
            const Vec<T> weight = factor * load<T>(line + t);
            store<T>(mean.get() + t, load<T>(mean.get() + t) + weight);
            store<T>(line + t, weight * (load<T>(along.get() + t) - reward));
        }
        return reward;
    }
};
