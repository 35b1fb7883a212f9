// Forward: scores chunk by chunk, candidates row by row, then values gathered on the support alone.

template <class T>
struct Forward {
    const AttentionProblem& p;
    Scores<T> scores;
    Rows<T> keys, values, queries;
    Buffer<T> chunk, candidate_score, candidate_mass, sum_of_values;
    Buffer<std::int32_t> candidate_key;
    std::int64_t room;  // candidates a row may have
    std::int64_t values_taken = 0;
    enum class Answer { unasked, no, yes } finite_values = Answer::unasked;

    explicit Forward(const AttentionProblem& problem)
        : p(problem), scores(problem), room(padded(problem.keys, 16) + 64) {}

    struct Row {
        Family<T> family{1.0};
        Candidates<T> found;
        Offset<T> at;
        T cut = -std::numeric_limits<T>::infinity();
    };

    // Queries start .. stop - 1 of one head; start is at a block's beginning.
    void run(std::int64_t b, std::int64_t h, std::int64_t start, std::int64_t stop) {
        const std::int64_t kv = h / (p.heads / p.kv_heads);
        const std::int64_t visible = scores.visible(b, h, stop);
        keys.take(p.key, b, kv, 0, visible, p.dim, T(1));
        scores.panels.pack(keys.data, keys.ld, visible, p.dim);
        values.take(p.value, b, kv, 0, visible, p.value_dim, T(1));
        finite_values = Answer::unasked;
        values_taken = visible;
        for (std::int64_t first = start; first < stop; first += kBlock)
            block(b, h, first, first + kBlock < stop ? first + kBlock : stop, visible);
    }

    void block(std::int64_t b, std::int64_t h, std::int64_t first, std::int64_t stop, std::int64_t visible) {
        const std::int64_t rows = stop - first;
        queries.take(p.query, b, h, first, rows, p.dim, T(p.scale));
        Row row[kBlock];
        for (std::int64_t i = 0; i < rows; ++i) prepare(row[i], b, h, first + i, i);
        T* s = chunk.reserve(kBlock * kChunk);
        const std::int64_t last = scores.limit(stop - 1) < visible ? scores.limit(stop - 1) : visible;
        for (std::int64_t from = 0; from < last; from += kChunk) {
            const std::int64_t to = from + kChunk < last ? from + kChunk : last;
            scores.panels.scores(rows, queries.data, queries.ld, from, to, s, kChunk);
            for (std::int64_t i = 0; i < rows; ++i) {
                const std::int64_t end = scores.limit(first + i) < to ? scores.limit(first + i) : to;
                if (end > from) collect(row[i], s + i * kChunk, b, h, first + i, from, end);
            }
        }
        finish(row, b, h, first, rows);
    }

    void prepare(Row& row, std::int64_t b, std::int64_t h, std::int64_t query, std::int64_t i) {
        row.family = Family<T>(static_cast<const double*>(p.eps.data)[p.eps.at(b, h, query)]);
        row.found.score = candidate_score.reserve(kBlock * room) + i * room;
        row.found.key = candidate_key.reserve(kBlock * room) + i * room;
        row.found.mass = p.mass.data ? candidate_mass.reserve(kBlock * room) + i * room : nullptr;
    }

    void collect(Row& row, T* s, std::int64_t b, std::int64_t h, std::int64_t query, std::int64_t from,
                 std::int64_t end) {
        constexpr int W = Lanes<T>::W;
        if (!scores.plain()) scores.finish(s, b, h, query, from, end);
        const std::int64_t n = end - from;
        for (std::int64_t j = n; j < padded(n, W); ++j) s[j] = -std::numeric_limits<T>::infinity();
        Candidates<T>& c = row.found;
        if (c.count == 0 && !c.mass) row.cut = first_cut(row.family, s, n);
        const std::int64_t before = c.count;
        c.count += collect_above(s, n, row.cut, std::int32_t(from), c.score + before, c.key + before);
        if (c.mass)
            for (std::int64_t i = before; i < c.count; ++i) c.mass[i] = scores.mass(b, h, query, c.key[i]);
        if (c.count > (row.family.cheap() ? 3 : 2) * c.tightened + 64) row.cut = tighten(row.family, c, row.at, false);
    }

    void finish(Row* row, std::int64_t b, std::int64_t h, std::int64_t first, std::int64_t rows) {
        const std::int64_t blocks = (p.queries + kBlock - 1) / kBlock;
        const std::int64_t pool = ((b * p.heads + h) * blocks + first / kBlock) * p.capacity;
        std::int64_t saved = 0;
        for (std::int64_t i = 0; i < rows; ++i) {
            const std::int64_t number = (b * p.heads + h) * p.queries + first + i;
            support(row[i]);
            Candidates<T>& c = row[i].found;
            p.offset[2 * number] = double(row[i].at.centre);
            p.offset[2 * number + 1] = c.count ? row[i].at.rest : HUGE_VAL;
            p.count[number] = std::int32_t(c.count);
            if (p.capacity && saved + c.count <= p.capacity) {
                std::memcpy(p.saved_key + pool + saved, c.key, c.count * sizeof(std::int32_t));
                std::memcpy(static_cast<T*>(p.saved_distance) + pool + saved, c.score, c.count * sizeof(T));
            }
            saved += c.count;
            weigh_row(row[i], b, h, first + i);
        }
        const std::int64_t wide = padded(p.value_dim, kColumns<T>);
        T* out = sum_of_values.reserve(kBlock * wide);
        std::memset(out, 0, rows * wide * sizeof(T));
        const std::int64_t seen = scores.limit(first + rows - 1);
        if (3 * saved > rows * seen && tiles_are_safe())
            expect_by_tiles(row, rows, wide, out);
        else
            for (std::int64_t i = 0; i < rows; ++i)
                gather(row[i].found.count, row[i].found.score, row[i].found.key, values, wide, out + i * wide);
        for (std::int64_t i = 0; i < rows; ++i) {
            T* to = out + i * wide;
            if (unanswered(row[i]))
                for (std::int64_t j = 0; j < wide; ++j) to[j] = std::numeric_limits<T>::quiet_NaN();
            const std::int64_t number = (b * p.heads + h) * p.queries + first + i;
            write_row<T>(p.output, p.query.dtype, number * p.value_dim, p.value_dim, to);
        }
    }

    // A tile multiplies hidden values by 0, which only finite ones survive.
    bool tiles_are_safe() {
        if (finite_values == Answer::unasked)
            finite_values = values.finite(values_taken, p.value_dim) ? Answer::yes : Answer::no;
        return finite_values == Answer::yes;
    }

    static bool unanswered(const Row& row) { return row.found.count && !(row.at.rest == row.at.rest); }

    // Solve, then keep the keys that carry weight; their scores become distances from the offset.
    void support(Row& row) {
        constexpr int W = Lanes<T>::W;
        Candidates<T>& c = row.found;
        tighten(row.family, c, row.at, true);
        if (c.count == 0 || !(row.at.rest == row.at.rest)) return;
        const T centre = row.at.centre, high = row.at.high(), low = row.at.low();
        for (std::int64_t i = 0; i < c.count; i += W)
            store<T>(c.score + i, ((load<T>(c.score + i) - centre) - high) - low);
        const double reach = row.family.kind == Kind::softmax ? HUGE_VAL : row.family.reach();
        c.count = keep_above(c, T(-reach));
        c.pad();
    }

    // Distances become weights, as the values see them.
    void weigh_row(Row& row, std::int64_t b, std::int64_t h, std::int64_t query) {
        Candidates<T>& c = row.found;
        if (unanswered(row)) {
            std::memset(c.score, 0, c.count * sizeof(T));
            return;
        }
        weights(row.family, c, c.score);
        const Dropout dropout(p, b, h, query);
        if (dropout.active())
            for (std::int64_t i = 0; i < c.count; ++i) c.score[i] *= dropout.operator()<T>(c.key[i]);
    }

    // Large supports: a dense product over chunks of keys reads the values once for several rows.
    void expect_by_tiles(const Row* row, std::int64_t rows, std::int64_t wide, T* out) {
        T* w = chunk.reserve(kBlock * kChunk);
        std::int64_t next[kBlock] = {};
        for (std::int64_t from = 0; from < p.keys; from += kShortChunk) {
            std::memset(w, 0, rows * kShortChunk * sizeof(T));
            std::int64_t last = from;
            for (std::int64_t i = 0; i < rows; ++i) {
                const Candidates<T>& c = row[i].found;
                for (; next[i] < c.count && c.key[next[i]] < from + kShortChunk; ++next[i])
                    w[i * kShortChunk + c.key[next[i]] - from] = c.score[next[i]];
                if (next[i] > 0 && c.key[next[i] - 1] >= last) last = c.key[next[i] - 1] + 1;
            }
            if (last > from)
                product<T>(rows, wide, last - from, w, kShortChunk, 1, values.row(from), values.ld, out, wide, true);
        }
    }
};
