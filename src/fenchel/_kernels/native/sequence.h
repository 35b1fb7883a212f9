// Where the rows of one sequence are: in the views, among the results, in the pool of saved supports.

struct Range {
    std::int64_t from, to;
    bool empty() const { return to <= from; }
    std::int64_t size() const { return to > from ? to - from : 0; }
};

inline std::int64_t ceil_div(std::int64_t n, std::int64_t unit) { return (n + unit - 1) / unit; }

struct Sequence {
    const AttentionProblem& p;
    std::int64_t number, batch;               // its own; the batch of the views that it is in
    std::int64_t first_query, first_key;      // rows of the views before it
    std::int64_t queries, keys;
    std::int64_t late = 0;                    // keys that the longest sequence of a cache has before its queries, and this one not

    Sequence(const AttentionProblem& problem, std::int64_t n) : p(problem), number(n) {
        const bool packed = p.query_start != nullptr;
        batch = packed ? 0 : n;
        first_query = packed ? p.query_start[n] : 0;
        first_key = packed ? p.key_start[n] : 0;
        queries = packed ? p.query_start[n + 1] - first_query : p.queries;
        keys = packed ? p.key_start[n + 1] - first_key : p.cache ? p.cache->lengths[n] : p.keys;
        if (p.cache) late = p.keys - keys;
    }
    // Where a key of a head is, in a view of keys or values.
    std::int64_t place(const View& v, std::int64_t kv, std::int64_t key) const {
        return p.cache ? v.at(page(key), kv, key % kChunk) : v.at(batch, kv, first_key + key);
    }
    std::int64_t page(std::int64_t key) const { return p.cache->pages[number * p.cache->chunks + key / kChunk]; }
    // Whether the rows of these keys follow each other at the view's distance.
    bool in_one_piece(const View& v, const Range& keys) const {
        if (!p.cache || keys.from / kChunk == (keys.to - 1) / kChunk) return true;
        if (v.stride[0] != kChunk * v.stride[2]) return false;
        for (std::int64_t key = keys.from + kChunk; key / kChunk <= (keys.to - 1) / kChunk; key += kChunk)
            if (page(key) != page(key - kChunk) + 1) return false;
        return true;
    }
    bool packed() const { return p.query_start != nullptr; }
    std::int64_t blocks() const { return ceil_div(queries, kBlock); }
    // Entries that a block may save, of keys and a sink: as many as if the sequence were alone.
    std::int64_t capacity() const { return std::min(p.capacity, kBlock * (keys + 1)); }

    std::int64_t row(std::int64_t h, std::int64_t query) const {
        if (packed()) return h * p.query_start[p.batch] + first_query + query;
        return (number * p.heads + h) * queries + query;
    }
    std::int64_t key_row(std::int64_t kv, std::int64_t key) const { return key_row_of(kv, p.kv_heads, key); }
    std::int64_t key_rows(std::int64_t heads) const { return packed() ? heads * p.key_start[p.batch] : p.batch * heads * keys; }
    std::int64_t key_row_of(std::int64_t h, std::int64_t heads, std::int64_t key) const {
        if (packed()) return h * p.key_start[p.batch] + first_key + key;
        return (number * heads + h) * keys + key;
    }
    // Of packed sequences there are no more blocks before this one than full blocks and sequences.
    std::int64_t block(std::int64_t h, std::int64_t k) const {
        if (packed()) return h * (p.query_start[p.batch] / kBlock + p.batch) + first_query / kBlock + number + k;
        return (number * p.heads + h) * blocks() + k;
    }
    // Relative positions of a head: queries + keys - 1 of each sequence, of packed ones end to end with a gap of one.
    std::int64_t position(std::int64_t h) const {
        if (packed()) return h * (p.query_start[p.batch] + p.key_start[p.batch]) + first_query + first_key;
        return (number * p.heads + h) * (queries + keys - 1);
    }
    std::int64_t positions() const {
        if (packed()) return p.heads * (p.query_start[p.batch] + p.key_start[p.batch]);
        return p.batch * p.heads * (queries + keys - 1);
    }
};
