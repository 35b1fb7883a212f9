// Few queries against many keys: segments are searched on several threads, then joined. Segments know nothing of each
// other in any case, so that every bit is that of one thread.

// What each segment left of each row.
template <class T>
struct SegmentResults {
    struct State {
        std::int64_t count, tightened;
        Offset<T> at, best;
        Reading reading;
    };
    std::int64_t rows, segments;
    bool with_mass;
    Buffer<T> score, mass;
    Buffer<std::int32_t> key;
    Buffer<State> state;

    static constexpr std::int64_t kRoom = kSegment + 1;  // with the sink

    SegmentResults(std::int64_t groups, std::int64_t rows_of_group, std::int64_t segments_of_row, bool masses)
        : rows(rows_of_group), segments(segments_of_row), with_mass(masses) {
        const std::int64_t lists = groups * rows * segments;
        score.reserve(lists * kRoom);
        key.reserve(lists * kRoom);
        if (with_mass) mass.reserve(lists * kRoom);
        state.reserve(lists);
    }
    std::int64_t list(std::int64_t group, std::int64_t row, std::int64_t segment) const {
        return (group * rows + row) * segments + segment;
    }
};

template <class T>
struct SplitForward : Forward<T> {
    using Row = typename Forward<T>::Row;
    using Forward<T>::Forward, Forward<T>::row, Forward<T>::p;

    // Whether all rows of a key head fit one block, and whether there is something to share.
    static bool pays(const AttentionProblem& p) {
        return p.threads > 1 && p.keys > kSegment && p.heads / p.kv_heads * p.queries <= kBlock;
    }
    std::int64_t rows(const Sequence& s) const { return p.heads / p.kv_heads * s.queries; }

    void search(const Sequence& s, std::int64_t kv, std::int64_t segment, SegmentResults<T>& results, std::int64_t group) {
        this->prepare_few(s, kv, 0, rows(s));
        this->shadow.next_block();
        const Range all = this->seen_by_long(s, rows(s));
        for (std::int64_t i = 0; i < rows(s); ++i)
            if (row[i].seen.from / kSegment != segment) row[i].found.count = 0;  // the sink is of the first segment
        if (segment * kSegment >= all.to || (segment + 1) * kSegment <= all.from) return;
        this->search_segment(s, rows(s), all, segment, true);
        for (std::int64_t i = 0; i < rows(s); ++i)
            if (!row[i].is_short && row[i].sees(segment)) put(row[i], i, results, results.list(group, i, segment));
    }
    void put(const Row& r, std::int64_t i, SegmentResults<T>& results, std::int64_t list) const {
        const std::int64_t count = r.kept + r.found.count, to = list * results.kRoom, from = i * this->room;
        results.state.get()[list] = {count, r.found.tightened, r.at, r.best, r.reading};
        std::memcpy(results.score.get() + to, this->candidate_score.get() + from, count * sizeof(T));
        std::memcpy(results.key.get() + to, this->candidate_key.get() + from, count * sizeof(std::int32_t));
        if (results.with_mass)
            std::memcpy(results.mass.get() + to, this->candidate_mass.get() + from, count * sizeof(T));
    }

    void join(const Sequence& s, std::int64_t kv, const SegmentResults<T>& results, std::int64_t group) {
        if (rows(s) == 0) return;
        this->prepare_few(s, kv, 0, rows(s));
        this->search_short(s, rows(s), true);
        for (std::int64_t i = 0; i < rows(s); ++i) {
            if (row[i].is_short) continue;
            if (!row[i].seen.empty()) row[i].found.count = 0;  // the sink comes with its segment
            for (std::int64_t segment = 0; segment < results.segments; ++segment)
                if (!row[i].seen.empty() && row[i].sees(segment)) take(row[i], results, results.list(group, i, segment));
        }
        this->finish(s, rows(s));
    }
    void take(Row& r, const SegmentResults<T>& results, std::int64_t list) const {
        const auto& state = results.state.get()[list];
        const std::int64_t from = list * results.kRoom;
        Candidates<T>& c = r.found;
        std::memcpy(c.score, results.score.get() + from, state.count * sizeof(T));
        std::memcpy(c.key, results.key.get() + from, state.count * sizeof(std::int32_t));
        if (c.mass) std::memcpy(c.mass, results.mass.get() + from, state.count * sizeof(T));
        c.count = state.count;
        c.tightened = state.tightened;
        r.reading.join(state.reading);
        r.at = state.at;
        if (!r.spans_segments()) return;
        if (state.best.known && (!r.best.known || state.best.value() > r.best.value())) r.best = state.best;
        r.kept += c.count;
        c = {c.score + c.count, c.key + c.count, c.mass ? c.mass + c.count : nullptr};
        r.at = Offset<T>();
    }
};
