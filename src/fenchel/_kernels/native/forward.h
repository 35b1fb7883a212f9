// Forward: scores chunk by chunk, candidates row by row, then values gathered on the support alone.
//
// What a row does depends on its own scores and on where its keys stand, never on the rows beside it: a prompt, the
// same tokens one by one, packed or in a batch, give the same bits.

// What a row read of a cache: keys that were bounded, scored with their page and scored alone, the largest cut that keys were skipped for, and the largest
// bound among those.
struct Reading {
    std::int64_t bounded = 0, whole = 0, picked = 0;
    double cut = -HUGE_VAL, skipped = -HUGE_VAL;

    void join(const Reading& other) {
        bounded += other.bounded;
        whole += other.whole;
        picked += other.picked;
        cut = std::max(cut, other.cut);
        skipped = std::max(skipped, other.skipped);
    }
};

template <class T>
struct Forward {
    const AttentionProblem& p;
    Scores<T> scores;
    Panels<T> panels, query_panels;
    Rows<T> keys, values;
    Buffer<T> queries, chunk, candidate_score, candidate_mass, chunk_mass, sum_of_values, dense_sums, few_values;
    Buffer<std::int32_t> candidate_key;
    Buffer<char> chunk_packed;
    ShortRows<T> short_rows;
    Screen<T> screen;
    Shadow<T> shadow;
    std::int64_t room;  // candidates a row may have
    std::int64_t kv_head = 0, screened_rows = 0;
    Range taken{0, 0}, held{0, 0};  // keys whose values, and which themselves, are at hand
    bool values_later = false;
    enum class Answer { unasked, no, yes } finite_values = Answer::unasked;

    static constexpr std::int64_t kDenseRow = 128;  // keys: of fewer, all values are read
    static constexpr std::int64_t kCrowded = 24;   // one key in so many is scored as fast with all the others
    static constexpr std::int64_t kStride = kChunk + 16;  // a row of scores may end inside a vector

    explicit Forward(const AttentionProblem& problem)
        : p(problem), scores(problem), room(padded(problem.keys + 1, 16) + 64) {}
    ~Forward() {
        if (screened_rows) __atomic_fetch_add(&screened, screened_rows, __ATOMIC_RELAXED);
    }

    struct Row {
        std::int64_t h = 0, query = 0;
        Range seen{0, 0};
        Family<T> family{1.0};
        Candidates<T> found;   // of the segment at hand
        std::int64_t kept = 0; // of the segments before it
        Offset<T> at, best;    // of the segment; the largest of those before it
        T cut = -std::numeric_limits<T>::infinity();
        T* x = nullptr;        // scores of a short row
        bool cut_known = false, dense = false, is_short = false, done = false;
        bool crowded = false;  // too many keys were above the cut for screening to pay
        Reading reading;       // of a cache

        bool sees(std::int64_t segment) const { return seen.from < (segment + 1) * kSegment && seen.to > segment * kSegment; }
        bool spans_segments() const { return !seen.empty() && seen.from / kSegment != (seen.to - 1) / kSegment; }
    };
    Row row[kBlock];

    // Queries start .. stop - 1 of one head; start is at a block's beginning.
    void run(const Sequence& s, std::int64_t h, std::int64_t start, std::int64_t stop) {
        scores.enter(s, h);
        const Range near = scores.near();
        Range all{s.keys, 0};
        for (std::int64_t i = start; i < stop; ++i) widen(all, scores.visible(i, near));
        enter(s, h / (p.heads / p.kv_heads), all, false);
        for (std::int64_t first = start; first < stop; first += kBlock) {
            const std::int64_t rows = std::min(kBlock, stop - first);
            for (std::int64_t i = 0; i < rows; ++i) prepare(s, row[i], h, first + i, near, i);
            block(s, rows, false);
        }
    }

    // Few queries: those of the heads from .. to - 1 that read one key head together, keys packed as they are met.
    void run_few(const Sequence& s, std::int64_t kv, std::int64_t from, std::int64_t to) {
        if (s.queries == 0) return;
        const std::int64_t together = kBlock / s.queries * s.queries;  // a head's rows share a pool: whole heads
        for (std::int64_t first = from * s.queries; first < to * s.queries; first += together) {
            const std::int64_t rows = std::min(together, to * s.queries - first);
            prepare_few(s, kv, first, rows);
            block(s, rows, true);
        }
    }
    void prepare_few(const Sequence& s, std::int64_t kv, std::int64_t first, std::int64_t rows) {
        const std::int64_t repeats = p.heads / p.kv_heads;
        Range near{0, 0}, seen{s.keys, 0};
        for (std::int64_t i = 0; i < rows; ++i) {
            const std::int64_t h = kv * repeats + (first + i) / s.queries, query = (first + i) % s.queries;
            scores.enter(s, h);
            if (i == 0 || query == 0) near = scores.near();
            prepare(s, row[i], h, query, near, i);
            widen(seen, row[i].seen);
        }
        enter(s, kv, seen, true);
    }

    static void widen(Range& all, const Range& one) {
        if (one.empty()) return;
        all.from = std::min(all.from, one.from);
        all.to = std::max(all.to, one.to);
    }

    void hold_keys(const Sequence& s, const Range& part) {
        held = part;
        keys.take_keys(s, p.key, kv_head, part, p.dim);
        panels.reserve(part.size(), p.dim);
        const std::int64_t chunks = part.to / kChunk - part.from / kChunk + 1;
        std::memset(chunk_packed.reserve(chunks), 0, chunks);
        if constexpr (kScreens<T>) screen.enter(keys, held, p.dim);
    }
    // Chunks of keys are packed when a row first needs them.
    void pack_keys(const Range& part) {
        for (std::int64_t chunk = part.from / kChunk; chunk * kChunk < part.to; ++chunk) {
            char& done = chunk_packed.get()[chunk - held.from / kChunk];
            if (done) continue;
            done = 1;
            panels.pack(keys.data, keys.ld, std::max(chunk * kChunk, held.from) - held.from,
                        std::min((chunk + 1) * kChunk, held.to) - held.from);
        }
    }
    // x[rows][0 ..) = scores of the rows from `first` on against these keys, with `from` at the start of a panel
    void multiply(std::int64_t first, std::int64_t rows, const Range& part, T* x) {
        const std::int64_t wide = padded(p.dim, kColumns<T>);
        pack_keys(part);
        panels.scores(rows, queries.get() + first * wide, wide, part.from - held.from, part.to - held.from, x, kStride);
    }
    // Few queries read a value where it is, or when it is needed.
    void enter(const Sequence& s, std::int64_t kv, Range all, bool few) {
        if (!all.empty()) all.from = all.from / kShortChunk * kShortChunk;
        taken = all;
        kv_head = kv;
        finite_values = Answer::unasked;
        values_later = false;
        if (all.empty()) return;
        values_later = few && !(Rows<T>::direct(p.value, p.value_dim) && s.in_one_piece(p.value, all));
        if (!values_later) take_values(s);
        if (!few) hold_keys(s, all);
    }
    void take_values(const Sequence& s) {
        values.take_keys(s, p.value, kv_head, taken, p.value_dim);
        values_later = false;
    }

    void prepare(const Sequence& s, Row& r, std::int64_t h, std::int64_t query, const Range& near, std::int64_t i) {
        new (&r) Row;  // without brackets: with them, a row is cleared, then written again
        r.h = h;
        r.query = query;
        r.seen = scores.visible(query, near);
        const std::int64_t number = s.first_query + query;
        r.family = Family<T>(static_cast<const double*>(p.eps.data)[p.eps.at(s.batch, h, number)]);
        r.found.score = candidate_score.reserve(kBlock * room) + i * room;
        r.found.key = candidate_key.reserve(kBlock * room) + i * room;
        r.is_short = r.family.cheap() && !scores.has_mass() && !scores.has_sink() && !r.seen.empty() && r.seen.size() <= kShortRow;
        r.found.mass = scores.has_mass() ? candidate_mass.reserve(kBlock * room) + i * room : nullptr;
        if (scores.has_sink()) {
            r.found.score[0] = scores.sink();
            r.found.key[0] = -1;
            if (r.found.mass) r.found.mass[0] = scores.mass(query, -1);
            r.found.count = 1;
        }
        const std::int64_t wide = padded(p.dim, kColumns<T>);
        T* q = queries.reserve(kBlock * wide) + i * wide;
        read_row<T>(p.query, p.query.at(s.batch, h, number), p.query.stride[3], p.dim, q);
        for (std::int64_t j = 0; j < p.dim; ++j) q[j] *= T(p.scale);
        for (std::int64_t j = p.dim; j < wide; ++j) q[j] = 0;
    }

    void block(const Sequence& s, std::int64_t rows, bool few) {
        if constexpr (kScreens<T>) screen.next_block();
        shadow.next_block();
        search_short(s, rows, few);
        const Range all = seen_by_long(s, rows);
        for (std::int64_t segment = all.from / kSegment; segment * kSegment < all.to; ++segment)
            search_segment(s, rows, all, segment, few);
        finish(s, rows);
    }
    Range seen_by_long(const Sequence& s, std::int64_t rows) const {
        Range all{s.keys, 0};
        for (std::int64_t i = 0; i < rows; ++i)
            if (!row[i].is_short) widen(all, row[i].seen);
        return all;
    }

    void search_segment(const Sequence& s, std::int64_t rows, const Range& all, std::int64_t segment, bool few) {
        const std::int64_t stop = std::min(all.to, (segment + 1) * kSegment);
        const std::int64_t start = std::max(all.from / kChunk * kChunk, segment * kSegment);
        for (std::int64_t from = start; from < stop; from += kChunk) {
            const Range part{from, std::min(from + kChunk, stop)};
            held = few ? Range{0, 0} : held;
            score_chunk(s, rows, part, {std::max(all.from, part.from) / kColumns<T> * kColumns<T>, part.to}, few);
        }
        for (std::int64_t i = 0; i < rows; ++i)
            if (!row[i].is_short && row[i].spans_segments() && row[i].sees(segment)) end_segment(row[i]);
    }
    // Rows in strips as the product has them, each against the keys that it sees. needed: keys that some row sees.
    void score_chunk(const Sequence& s, std::int64_t rows, const Range& part, const Range& needed, bool few) {
        T* x = chunk.reserve(kBlock * kStride);
        for (std::int64_t first = 0; first < rows; first += kRows) {
            const std::int64_t n = std::min<std::int64_t>(kRows, rows - first);
            Range seen{part.to, part.from};
            for (std::int64_t i = first; i < first + n; ++i)
                if (!row[i].is_short) widen(seen, {std::max(row[i].seen.from, part.from), std::min(row[i].seen.to, part.to)});
            if (seen.empty() || (!few && screen_chunk(first, n, part, seen))) continue;
            bool done[kRows] = {};
            if (few && screen_page(s, first, n, part, done)) continue;
            if (few && held.empty()) hold_keys(s, needed);
            const std::int64_t from = seen.from / kColumns<T> * kColumns<T>;
            multiply(first, n, {from, seen.to}, x + first * kStride + (from - part.from));
            for (std::int64_t i = first; i < first + n; ++i) {
                const Range mine{std::max(row[i].seen.from, part.from), std::min(row[i].seen.to, part.to)};
                if (mine.empty() || row[i].is_short || done[i - first]) continue;
                collect(row[i], x + i * kStride + (mine.from - part.from), mine);
                note_scored(s, row[i], mine);
            }
        }
    }

    // All short rows, those of one family together.
    void search_short(const Sequence& s, std::int64_t rows, bool few) {
        Range all{s.keys, 0};
        for (std::int64_t i = 0; i < rows; ++i)
            if (row[i].is_short) widen(all, row[i].seen);
        if (all.empty()) return;
        if (few) hold_keys(s, {all.from / kColumns<T> * kColumns<T>, all.to});
        std::int64_t members[kBlock];
        for (std::int64_t first = 0; first < rows; ++first) {
            if (!row[first].is_short || row[first].found.tightened) continue;
            std::int64_t n = 0;
            for (std::int64_t i = first; i < rows; ++i)
                if (row[i].is_short && row[i].family.eps == row[first].family.eps) members[n++] = i;
            solve_short(s, members, n, rows);
        }
    }

    // Strips as in `score_chunk`; rows that see keys far apart are scored alone.
    void score_short(std::int64_t rows) {
        T* x = chunk.reserve(kBlock * kStride + kChunk);  // lanes are read as far as the longest row goes
        for (std::int64_t first = 0, n; first < rows; first += n) {
            Range seen{p.keys, 0};
            for (n = 0; n < kRows && first + n < rows; ++n) {
                Range wider = seen;
                if (row[first + n].is_short) widen(wider, row[first + n].seen);
                if (n > 0 && wider.to - wider.from / kColumns<T> * kColumns<T> > kChunk) break;
                seen = wider;
            }
            if (seen.empty()) continue;
            const std::int64_t from = seen.from / kColumns<T> * kColumns<T>;
            multiply(first, n, {from, seen.to}, x + first * kStride);
            for (std::int64_t i = first; i < first + n; ++i) row[i].x = x + i * kStride + (row[i].seen.from - from);
        }
    }

    void solve_short(const Sequence& s, const std::int64_t* members, std::int64_t rows, std::int64_t block_rows) {
        std::int64_t n = 0, sizes[kBlock];
        for (std::int64_t k = 0; k < rows; ++k) n = std::max(n, sizes[k] = row[members[k]].seen.size());
        const bool lanes = stays_in_lanes(s, members, rows, n), together = rows > ShortRows<T>::kFewRows;
        const Family<T>& family = row[members[0]].family;
        const T* x[kBlock];
        if (together && lanes && scores.plain() && rows == block_rows) {
            T* u = short_rows.reserve(n);
            score_columns(rows, n, sizes, u);
        } else {
            score_rows(members, rows, block_rows, x);
            if (together) short_rows.flip(x, rows, n, short_rows.reserve(n));
        }
        together ? short_rows.solve(family, rows, n, sizes) : short_rows.solve_few(family, rows, x, sizes);
        if (lanes) return together ? expect_by_lanes(s, members, rows, n) : expect_few(s, members, rows, x, sizes, n);
        for (std::int64_t k = 0; k < rows; ++k) take_short(row[members[k]], k);
    }

    // Whether these rows have the same first key, few keys, and nobody asks about their supports.
    bool stays_in_lanes(const Sequence& s, const std::int64_t* members, std::int64_t rows, std::int64_t n) {
        const std::int64_t from = row[members[0]].seen.from;
        if (p.capacity || p.dropout > 0 || n > kDenseRow || from % kShortChunk) return false;
        for (std::int64_t k = 0; k < rows; ++k)
            if (row[members[k]].seen.from != from) return false;
        return tiles_are_safe(s);
    }
    void score_rows(const std::int64_t* members, std::int64_t rows, std::int64_t block_rows, const T** x) {
        if (!row[members[0]].x) score_short(block_rows);
        for (std::int64_t k = 0; k < rows; ++k) {
            Row& r = row[members[k]];
            x[k] = r.x;
            if (scores.h != r.h) scores.enter(*scores.s, r.h);
            if (!scores.plain()) scores.finish(r.x, r.query, r.seen.from, r.seen.to);
        }
    }
    // u[key][row]: queries in panels instead of keys, so that scores come as lanes need them. The sums of
    // `score_short`, with its factors exchanged.
    void score_columns(std::int64_t rows, std::int64_t n, const std::int64_t* sizes, T* u) {
        constexpr std::int64_t P = kColumns<T>;
        query_panels.pack_all(queries.get(), padded(p.dim, P), rows, p.dim);
        for (std::int64_t first = 0; first < rows; first += P) {
            std::int64_t seen = 0;
            for (std::int64_t i = first; i < std::min(first + P, rows); ++i) seen = std::max(seen, sizes[i]);
            strip<T>(seen, p.dim, keys.row(row[0].seen.from), keys.ld, 1, query_panels.data.get() + first * p.dim, P,
                     u + first, ShortRows<T>::kLanes, false);
        }
    }

    // Weights meet the values as they are: the same products in the same order as in `expect_by_tiles`.
    void expect_by_lanes(const Sequence& s, const std::int64_t* members, std::int64_t rows, std::int64_t n) {
        const T* w = short_rows.weigh(row[members[0]].family, rows, n);
        expect_short(s, members, rows, n, w, 1, ShortRows<T>::kLanes);
    }
    void expect_few(const Sequence& s, const std::int64_t* members, std::int64_t rows, const T* const* x, const std::int64_t* sizes,
                    std::int64_t n) {
        T w[ShortRows<T>::kFewRows * kDenseRow];
        std::memset(w, 0, rows * kDenseRow * sizeof(T));
        for (std::int64_t k = 0; k < rows; ++k) {
            T* to = w + k * kDenseRow;
            short_rows.weigh_row(row[members[k]].family, k, x[k], sizes[k], to);
            for (std::int64_t j = sizes[k]; j < n; ++j) to[j] = short_rows.broken[k] ? std::numeric_limits<T>::quiet_NaN() : T(0);
        }
        expect_short(s, members, rows, n, w, kDenseRow, 1);
    }
    // w: weights, with steps between rows and between keys
    void expect_short(const Sequence& s, const std::int64_t* members, std::int64_t rows, std::int64_t n, const T* w,
                      std::int64_t row_step, std::int64_t key_step) {
        const std::int64_t from = row[members[0]].seen.from, wide = padded(p.value_dim, kColumns<T>);
        T* out = dense_sums.reserve(kBlock * wide);
        product<T>(rows, wide, n, w, row_step, key_step, values.row(from), values.ld, out, wide, false);
        for (std::int64_t k = 0; k < rows; ++k) {
            Row& r = row[members[k]];
            r.found.tightened = 1;
            r.done = true;
            write_row<T>(p.output, p.output.at(s.batch, r.h, s.first_query + r.query), p.output.stride[3], p.value_dim, out + k * wide);
        }
    }

    // Distances of the support become candidates that are solved.
    void take_short(Row& r, std::int64_t lane) {
        Candidates<T>& c = r.found;
        c.tightened = 1;
        if (short_rows.broken[lane]) {
            c.score[0] = 0;
            c.key[0] = std::int32_t(r.seen.from);
            c.count = 1;
            r.at.rest = std::numeric_limits<double>::quiet_NaN();
            return;
        }
        if (short_rows.top[lane] == -std::numeric_limits<T>::infinity()) return;
        r.at = {short_rows.top[lane], short_rows.rest[lane], true};
        c.count = short_rows.collect(lane, r.x, r.seen.size(), std::int32_t(r.seen.from), c.score, c.key);
        c.pad();
    }

    void collect(Row& r, T* x, const Range& part) {
        constexpr int W = Lanes<T>::W;
        if (scores.h != r.h) scores.enter(*scores.s, r.h);
        if (!scores.plain()) scores.finish(x, r.query, part.from, part.to);
        const std::int64_t n = part.size();
        for (std::int64_t j = n; j < padded(n, W); ++j) x[j] = -std::numeric_limits<T>::infinity();
        Candidates<T>& c = r.found;
        if (!r.cut_known) r.cut = c.mass ? first_cut_with_mass(r, x, part) : first_cut(r.family, x, n, r.at);
        const std::int64_t added = collect_above(x, n, r.cut, std::int32_t(part.from), c.score + c.count, c.key + c.count);
        admit(r, added);
        r.crowded = kCrowded * std::min(added, c.count) > n;
    }
    // Of a cache: bounds from the shadow of a page, before keys are scored. See `page.h`.
    bool screen_page(const Sequence& s, std::int64_t first, std::int64_t n, const Range& part, bool* done);
    bool search_page(const Sequence& s, std::int64_t i, const Range& mine, T* upper, T* width);
    bool cut_from_page(const Sequence& s, std::int64_t i, const Range& mine, const T* upper, const T* width);
    void score_keys(const Sequence& s, std::int64_t i, const std::int32_t* key, std::int64_t n, T* x);
    void note_scored(const Sequence& s, Row& r, const Range& part);
    void note_screened(Row& r, const Range& mine, const std::int32_t* key, std::int64_t n);
    void note_page(const Sequence& s, Row& r, const Range& mine, const T* upper, const std::int32_t* key, std::int64_t n);
    void report(const Sequence& s, const Row& r) const;
    // Candidates that were appended to the row's.
    void admit(Row& r, std::int64_t added) {
        Candidates<T>& c = r.found;
        if (c.mass)
            for (std::int64_t i = c.count; i < c.count + added; ++i) c.mass[i] = scores.mass(r.query, c.key[i]);
        c.count += added;
        r.cut_known = c.count > 0;
        if (c.count > (r.family.cheap() ? c.tightened + c.tightened / 4 + 4 : 2 * c.tightened + 64)) r.cut = tighten(r.family, c, r.at, false);
    }

    // As `score_chunk` and `collect` for one strip, but only keys that may lie above the row's cut are scored. False
    // where that does not pay.
    bool screen_chunk(std::int64_t first, std::int64_t n, const Range& part, const Range& seen) {
        if constexpr (!kScreens<T>) {
            return false;
        } else {
            std::int32_t limit[kRows], key[kRows][kChunk + 32];
            std::int64_t count[kRows] = {};
            Range mine[kRows];
            const std::int64_t wide = padded(p.dim, kColumns<T>);
            if (!screening || !scores.screenable() || wide > Screen<T>::kMostComponents) return false;
            bool any = false;
            for (std::int64_t i = 0; i < n; ++i) {
                Row& r = row[first + i];
                mine[i] = {std::max(r.seen.from, part.from), std::min(r.seen.to, part.to)};
                limit[i] = std::numeric_limits<std::int32_t>::max();
                if (r.is_short || mine[i].empty()) continue;
                if (!r.cut_known || r.crowded) return false;
                const T* q = queries.get() + (first + i) * wide;
                if (!screen.limit(first + i, q, part, r.cut, scores.most_added(r.query, mine[i]), limit[i])) return false;
                any = any || limit[i] < std::numeric_limits<std::int32_t>::max();
                if (any && scores.has_bias()) return false;  // one bound for all biases of a chunk is too wide
            }
            screened_rows += n;
            if (any) screen.run(first, n, seen, limit, key, count);
            for (std::int64_t i = 0; i < n; ++i) note_screened(row[first + i], mine[i], key[i], count[i]);
            if (!any) return true;
            typename Screen<T>::Few few(keys, p.dim);
            T* x = chunk.get();
            for (std::int64_t i = 0; i < n; ++i) few.add(queries.get() + (first + i) * wide, key[i], count[i], x + i * kStride);
            few.flush();
            for (std::int64_t i = 0; i < n; ++i)
                if (count[i]) choose(row[first + i], key[i], x + i * kStride, count[i], mine[i]);
            return true;
        }
    }
    // Of the n keys that were scored, those above the cut.
    void choose(Row& r, const std::int32_t* key, const T* x, std::int64_t n, const Range& mine) {
        Candidates<T>& c = r.found;
        std::int64_t added = 0;
        for (std::int64_t j = 0; j < n; ++j) {
            const T score = scores.finish_one(x[j], r.query, key[j]);
            if (score <= r.cut || key[j] < mine.from || key[j] >= mine.to) continue;
            c.score[c.count + added] = score;
            c.key[c.count + added++] = key[j];
        }
        admit(r, added);
        r.crowded = kCrowded * n > mine.size();
    }

    T first_cut_with_mass(Row& r, const T* x, const Range& part) {
        T* m = chunk_mass.reserve(kStride);
        const std::int64_t n = padded(part.size(), Lanes<T>::W);
        scores.masses(r.query, part.from, part.to, m);
        for (std::int64_t j = part.size(); j < n; ++j) m[j] = 0;
        return first_cut(r.family, x, m, n, r.at);
    }

    // What this segment leaves; the next one starts afresh.
    void end_segment(Row& r) {
        Candidates<T>& c = r.found;
        if (c.count == 0) return;
        tighten(r.family, c, r.at, false);
        if (r.at.known && (!r.best.known || r.at.value() > r.best.value())) r.best = r.at;
        r.kept += c.count;
        c = {c.score + c.count, c.key + c.count, c.mass ? c.mass + c.count : nullptr};
        r.at = Offset<T>();
        r.cut = -std::numeric_limits<T>::infinity();
        r.cut_known = false;
    }
    static void join_segments(Row& r) {
        if (!r.kept) return;
        Candidates<T>& c = r.found;
        c = {c.score - r.kept, c.key - r.kept, c.mass ? c.mass - r.kept : nullptr, r.kept + c.count};
        r.at = r.best;
    }

    void finish(const Sequence& s, std::int64_t rows) {
        const std::int64_t wide = padded(p.value_dim, kColumns<T>);
        T* out = sum_of_values.reserve(kBlock * wide);
        std::memset(out, 0, rows * wide * sizeof(T));
        std::int64_t saved = 0;
        for (std::int64_t i = 0; i < rows; ++i) {
            Row& r = row[i];
            if (r.done) {
                report(s, r);
                continue;
            }
            if (i > 0 && r.h != row[i - 1].h) saved = 0;  // another head, another pool
            support(r);
            save(s, r, saved);
            report(s, r);
            weigh_row(s, r);
            r.dense = (3 * r.found.count > r.seen.size() || r.seen.size() <= kDenseRow) && tiles_are_safe(s);
            if (!r.dense) expect_by_rows(s, r, wide, out + i * wide);
        }
        expect_by_tiles(rows, wide, out);
        for (std::int64_t i = 0; i < rows; ++i) {
            if (row[i].done) continue;
            T* to = out + i * wide;
            if (unanswered(row[i]))
                for (std::int64_t j = 0; j < wide; ++j) to[j] = std::numeric_limits<T>::quiet_NaN();
            write_row<T>(p.output, p.output.at(s.batch, row[i].h, s.first_query + row[i].query), p.output.stride[3],
                         p.value_dim, to);
        }
    }

    void save(const Sequence& s, const Row& r, std::int64_t& saved) {
        const Candidates<T>& c = r.found;
        if (!p.count) return;
        const std::int64_t number = s.row(r.h, r.query), pool = s.block(r.h, r.query / kBlock) * p.capacity;
        p.offset[2 * number] = double(r.at.centre);
        p.offset[2 * number + 1] = c.count ? r.at.rest : HUGE_VAL;
        p.count[number] = std::int32_t(c.count);
        if (p.capacity && saved + c.count <= s.capacity()) {
            std::memcpy(p.saved_key + pool + saved, c.key, c.count * sizeof(std::int32_t));
            std::memcpy(static_cast<T*>(p.saved_distance) + pool + saved, c.score, c.count * sizeof(T));
        }
        saved += c.count;
    }

    // A tile multiplies hidden values by 0, which only finite ones survive.
    bool tiles_are_safe(const Sequence& s) {
        if (values_later) take_values(s);
        if (finite_values == Answer::unasked)
            finite_values = values.finite(0, taken.size(), p.value_dim) ? Answer::yes : Answer::no;
        return finite_values == Answer::yes;
    }

    static bool unanswered(const Row& r) { return r.found.count && !(r.at.rest == r.at.rest); }

    // Solve, then keep the keys that carry weight; their scores become distances from the offset.
    void support(Row& r) {
        constexpr int W = Lanes<T>::W;
        if (r.is_short) return;
        join_segments(r);
        Candidates<T>& c = r.found;
        tighten(r.family, c, r.at, true);
        if (c.count == 0 || !(r.at.rest == r.at.rest)) return;
        const T centre = r.at.centre, high = r.at.high(), low = r.at.low();
        for (std::int64_t i = 0; i < c.count; i += W)
            store<T>(c.score + i, ((load<T>(c.score + i) - centre) - high) - low);
        c.count = keep_above(c, T(-r.family.reach()));
        c.pad();
    }

    // Distances become weights, as the values see them.
    void weigh_row(const Sequence& s, Row& r) {
        Candidates<T>& c = r.found;
        if (unanswered(r)) {
            std::memset(c.score, 0, c.count * sizeof(T));
            return;
        }
        weights(r.family, c, c.score);
        const Dropout dropout(s, r.h, r.query);
        if (dropout.active())
            for (std::int64_t i = 0; i < c.count; ++i) c.score[i] *= dropout.operator()<T>(c.key[i]);
    }

    // The sink, always first, has no value.
    static std::int64_t first_real(const Candidates<T>& c) { return c.count > 0 && c.key[0] < 0; }

    void expect_by_rows(const Sequence& s, const Row& r, std::int64_t wide, T* out) {
        const Candidates<T>& c = r.found;
        const std::int64_t start = first_real(c), n = c.count - start;
        if (!values_later) return gather(n, c.score + start, c.key + start, values, wide, out);
        std::int32_t place[kShort];
        T* copies = few_values.reserve(kShort * wide);
        Rows<T> copied;
        copied.data = copies;
        copied.ld = wide;
        for (std::int64_t from = start; from < c.count; from += kShort) {
            const std::int64_t count = std::min(kShort, c.count - from);
            for (std::int64_t i = 0; i < count; ++i) {
                place[i] = std::int32_t(i);
                read_row<T>(p.value, s.place(p.value, kv_head, c.key[from + i]), p.value.stride[3], p.value_dim, copies + i * wide);
                for (std::int64_t j = p.value_dim; j < wide; ++j) copies[i * wide + j] = 0;
            }
            gather(count, c.score + from, place, copied, wide, out);
        }
    }

    // Large supports: a dense product over chunks of keys reads the values once for several rows.
    void expect_by_tiles(std::int64_t rows, std::int64_t wide, T* out) {
        std::int64_t chosen[kBlock], next[kBlock], n = 0;
        for (std::int64_t i = 0; i < rows; ++i)
            if (row[i].dense) {
                next[n] = first_real(row[i].found);
                chosen[n++] = i;
            }
        if (n == 0) return;
        T* w = chunk.reserve(kBlock * kStride);
        T* sums = dense_sums.reserve(kBlock * wide);
        std::memset(sums, 0, n * wide * sizeof(T));
        for (std::int64_t from = taken.from; from < taken.to; from += kShortChunk) {
            std::memset(w, 0, n * kShortChunk * sizeof(T));
            std::int64_t last = from;
            for (std::int64_t i = 0; i < n; ++i) {
                const Candidates<T>& c = row[chosen[i]].found;
                for (; next[i] < c.count && c.key[next[i]] < from + kShortChunk; ++next[i]) {
                    w[i * kShortChunk + c.key[next[i]] - from] = c.score[next[i]];
                    last = std::max<std::int64_t>(last, c.key[next[i]] + 1);
                }
            }
            if (last > from)
                product<T>(n, wide, last - from, w, kShortChunk, 1, values.row(from), values.ld, sums, wide, true);
        }
        for (std::int64_t i = 0; i < n; ++i) std::memcpy(out + chosen[i] * wide, sums + i * wide, wide * sizeof(T));
    }
};
