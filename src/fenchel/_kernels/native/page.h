// Decoding from a cache: what a row does with the bounds that the shadow of a page gives (`shadow.h`). The search is that of
// `collect`, chunk by chunk with the same cuts, but only keys that can matter to it are scored.

// One key in so many is scored as fast with all the others: rows that come to that do without bounds.
constexpr std::int64_t kCrowdedPage = 6;
// A row that sees so few keys scores them all sooner than it finds out which it needs.
constexpr std::int64_t kFewKeys = 768;

// Rows first .. first + n - 1 against one page. done: rows that need no more; true if all are.
template <class T>
bool Forward<T>::screen_page(const Sequence& s, std::int64_t first, std::int64_t n, const Range& part, bool* done) {
    if constexpr (!Shadow<T>::kUsed) {
        return false;
    } else {
        if (!p.cache || !p.cache->shadow.data || !screening || p.bias.data || scores.holes) return false;
        const std::int64_t wide = padded(p.dim, kColumns<T>), start = part.from / kChunk * kChunk;
        std::int64_t member[kRows], count = 0;
        const T* query[kRows];
        Range seen{part.to, part.from}, mine[kRows];
        bool cut_wanted = false, all = true;
        for (std::int64_t i = first; i < first + n; ++i) {
            const Row& r = row[i];
            mine[count] = {std::max(r.seen.from, part.from), std::min(r.seen.to, part.to)};
            done[i - first] = r.is_short || mine[count].empty();
            if (done[i - first]) continue;
            query[count] = queries.get() + i * wide;
            const bool unknown = !r.cut_known && scores.has_mass();  // the first cut with masses asks for all scores
            if (r.crowded || unknown || r.seen.size() <= kFewKeys || r.family.kind == Kind::softmax || !shadow.usable(i, query[count], p.dim)) {
                all = false;
                continue;
            }
            cut_wanted = cut_wanted || !r.cut_known;
            widen(seen, mine[count]);
            member[count++] = i;
        }
        if (count == 0) return all;
        const View& records = p.cache->shadow;
        const ShadowPage page{ShadowShape(p.dim), static_cast<std::uint8_t*>(records.data) + records.at(s.page(part.from), kv_head, 0)};
        if (!shadow.run(page, count, member, query, {seen.from - start, seen.to - start}, cut_wanted, kStride)) return false;
        for (std::int64_t k = 0; k < count; ++k) {
            const std::int64_t at = k * kStride + (mine[k].from - start);
            row[member[k]].reading.bounded += mine[k].size();
            const bool found = search_page(s, member[k], mine[k], shadow.upper + at, shadow.width + at);
            done[member[k] - first] = found;
            all = all && found;
        }
        return all;
    }
}

// One row against the keys of a page, from bounds on their scores. False where scoring all is as fast.
template <class T>
bool Forward<T>::search_page(const Sequence& s, std::int64_t i, const Range& mine, T* upper, T* width) {
    Row& r = row[i];
    const std::int64_t n = mine.size();
    if (scores.h != r.h) scores.enter(*scores.s, r.h);
    const bool known = r.cut_known;
    if (!known) {  // bounds from below, in place of widths
        for (std::int64_t j = 0; j < n; ++j) width[j] = upper[j] - width[j];
        scores.finish_bound(width, r.query, mine.from, mine.to, T(-1));
    }
    scores.finish_bound(upper, r.query, mine.from, mine.to, T(1));
    if (!known && !cut_from_page(s, i, mine, upper, width)) {
        r.crowded = true;
        return false;
    }
    for (std::int64_t j = n; j < padded(n, Lanes<T>::W); ++j) upper[j] = -std::numeric_limits<T>::infinity();
    std::int32_t key[kStride + 16];
    T bound[kStride + 16], x[kStride + 16];
    const std::int64_t count = collect_above(upper, n, r.cut, std::int32_t(mine.from), bound, key);
    if (kCrowdedPage * count > n + 64) {
        r.crowded = true;
        if (!known) r.at = Offset<T>();
        return false;
    }
    score_keys(s, i, key, count, x);
    note_page(s, r, mine, upper, key, count);
    choose(r, key, x, count, mine);
    r.crowded = false;
    return true;
}

// The first cut of a row, as `first_cut` would find it: it asks for the largest score in each lane alone, and a key whose
// bound lies below that of another in its lane cannot be it.
template <class T>
bool Forward<T>::cut_from_page(const Sequence& s, std::int64_t i, const Range& mine, const T* upper, const T* lower) {
    constexpr std::int64_t lanes = kCutGroups * Lanes<T>::W;
    const T none = -std::numeric_limits<T>::infinity();
    const std::int64_t n = mine.size();
    T best[lanes], x[kStride + 16], chosen[kStride + 16];
    std::int32_t key[kStride + 16];
    for (T& b : best) b = none;
    for (std::int64_t j = 0; j < n; ++j) best[j % lanes] = lower[j] > best[j % lanes] ? lower[j] : best[j % lanes];
    for (T& b : best) b -= std::fabs(b) * T(0x1p-22) + std::numeric_limits<T>::min();  // equal ones count
    std::int64_t count = 0;
    for (std::int64_t j = 0; j < n; ++j) {
        x[j] = none;
        key[count] = std::int32_t(mine.from + j);
        count += !(upper[j] <= best[j % lanes]);
    }
    if (3 * count > n + 3 * lanes) return false;
    score_keys(s, i, key, count, chosen);
    Row& r = row[i];
    r.reading.picked += count;
    for (std::int64_t k = 0; k < count; ++k) x[key[k] - mine.from] = scores.finish_one(chosen[k], r.query, key[k]);
    for (std::int64_t j = n; j < padded(n, Lanes<T>::W); ++j) x[j] = none;
    r.cut = first_cut(r.family, x, n, r.at);
    return true;
}

// Products of row i with these keys, summed as in `multiply`. Whole groups of eight are written.
template <class T>
void Forward<T>::score_keys(const Sequence& s, std::int64_t i, const std::int32_t* key, std::int64_t n, T* x) {
    if constexpr (kScreens<T>) {
        if (n == 0) return;
        const std::int64_t wide = padded(p.dim, kColumns<T>);
        const T* query = queries.get() + i * wide;
        Rows<T> rows;
        std::int32_t place[kStride + 16];
        if (Rows<T>::direct(p.key, p.dim)) {
            const std::int64_t start = key[0] / kChunk * kChunk;
            rows.take_keys(s, p.key, kv_head, {start, start + 1}, p.dim);
            for (std::int64_t k = 0; k < n; ++k)  // they stand far apart: all are on their way before the first is needed
                for (std::int64_t j = 0; j < p.dim; j += 64 / sizeof(T)) __builtin_prefetch(rows.row(key[k]) + j);
        } else {
            T* copies = few_values.reserve(n * wide);
            for (std::int64_t k = 0; k < n; ++k) {
                read_row<T>(p.key, s.place(p.key, kv_head, key[k]), p.key.stride[3], p.dim, copies + k * wide);
                place[k] = std::int32_t(k);
            }
            rows.data = copies;
            rows.ld = wide;
            key = place;
        }
        typename Screen<T>::Few few(rows, p.dim);
        few.add(query, key, n, x);
        few.flush();
    }
}

// One query against all pages of its sequence.
template <class T>
struct BoundsWorker {
    const BoundsProblem& p;
    Shadow<T> shadow;
    Buffer<float> query;

    explicit BoundsWorker(const BoundsProblem& problem) : p(problem) {}

    void run(std::int64_t item) {
        const std::int64_t number = item % p.queries, head = item / p.queries % p.heads, batch = item / p.queries / p.heads;
        const float* q = query.reserve(padded(p.dim, 16));
        read_row<float>(p.query, p.query.at(batch, head, number), p.query.stride[3], p.dim, query.get());
        float *upper = p.upper + item * p.keys, *width = p.width + item * p.keys;
        for (std::int64_t from = 0; from < p.lengths[batch]; from += kChunk) {
            const std::int64_t count = std::min(kChunk, p.lengths[batch] - from);
            if (!page(q, batch, head, from, count, upper + from, width + from))
                for (std::int64_t j = from; j < from + count; ++j) upper[j] = width[j] = std::numeric_limits<float>::infinity();
        }
    }
    bool page(const float* q, std::int64_t batch, std::int64_t head, std::int64_t from, std::int64_t count, float* upper, float* width) {
        if constexpr (!Shadow<T>::kUsed) {
            return false;
        } else {
            constexpr std::int64_t first = 0, stride = kChunk + 16;
            const std::int64_t place = p.pages[batch * p.chunks + from / kChunk], kv = head / (p.heads / p.kv_heads);
            const ShadowPage record{ShadowShape(p.dim), static_cast<std::uint8_t*>(p.shadow.data) + p.shadow.at(place, kv, 0)};
            if (from == 0) shadow.next_block();
            if (!shadow.usable(first, q, p.dim) || !shadow.run(record, 1, &first, &q, {0, count}, true, stride)) return false;
            std::memcpy(upper, shadow.upper, count * sizeof(float));
            std::memcpy(width, shadow.width, count * sizeof(float));
            return true;
        }
    }
};

// ---- what was read, for `cache.read` and for proofs

template <class T>
void Forward<T>::note_scored(const Sequence& s, Row& r, const Range& part) {
    if (!p.cache) return;
    r.reading.whole += part.size();
    if (p.cache->candidate) std::memset(p.cache->candidate + s.row(r.h, r.query) * p.keys + part.from, 1, part.size());
}
// Screening rounds all keys, and so reads them. Those that it drops lie at the row's cut at most.
template <class T>
void Forward<T>::note_screened(Row& r, const Range& mine, const std::int32_t* key, std::int64_t n) {
    if (!p.cache || r.is_short || mine.empty()) return;
    r.reading.whole += mine.size();
    if (!p.cache->candidate) return;
    std::uint8_t* candidate = p.cache->candidate + scores.s->row(r.h, r.query) * p.keys;
    for (std::int64_t k = 0; k < n; ++k) candidate[key[k]] = 1;
    r.reading.cut = r.reading.skipped = std::max(r.reading.cut, double(r.cut));
}
template <class T>
void Forward<T>::note_page(const Sequence& s, Row& r, const Range& mine, const T* upper, const std::int32_t* key, std::int64_t n) {
    r.reading.picked += n;
    if (!p.cache->candidate) return;
    std::uint8_t* candidate = p.cache->candidate + s.row(r.h, r.query) * p.keys;
    for (std::int64_t k = 0; k < n; ++k) candidate[key[k]] = 1;
    for (std::int64_t j = 0; j < mine.size(); ++j)
        if (!candidate[mine.from + j]) r.reading.skipped = std::max(r.reading.skipped, double(upper[j]));
    if (n < mine.size()) r.reading.cut = std::max(r.reading.cut, double(r.cut));
}
template <class T>
void Forward<T>::report(const Sequence& s, const Row& r) const {
    if (!p.cache || !p.cache->read) return;
    const std::int64_t number = s.row(r.h, r.query), sink = first_real(r.found);
    std::int64_t* to = p.cache->read + 5 * number;
    to[0] = r.seen.size();
    to[1] = r.reading.bounded;
    to[2] = r.is_short ? r.seen.size() : r.reading.whole;
    to[3] = r.reading.picked;
    to[4] = r.done ? r.seen.size() : r.found.count - sink;
    if (!p.cache->bound) return;
    p.cache->bound[2 * number] = r.reading.cut;
    p.cache->bound[2 * number + 1] = r.reading.skipped;
    if (r.is_short) std::memset(p.cache->candidate + number * p.keys + r.seen.from, 1, r.seen.size());
}
