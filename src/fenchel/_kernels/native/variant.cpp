// All kernels for one instruction set. Compiled once for each, with FENCHEL_VARIANT and the flags of
// that set; nothing here may be shared with another variant.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <new>
#include <type_traits>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include "parallel.h"
#include "problem.h"

#if defined(__AVX512F__)
#define FENCHEL_VECTOR_BYTES 64
#elif defined(__AVX2__)
#define FENCHEL_VECTOR_BYTES 32
#else
#define FENCHEL_VECTOR_BYTES 16
#endif

namespace fenchel {
namespace FENCHEL_VARIANT {

#include "buffer.h"
#include "vectors.h"
#include "product.h"
#include "family.h"
#include "sequence.h"
#include "operands.h"
#include "search.h"
#include "scores.h"
#include "gather.h"
#include "short.h"
#include "screen.h"
#include "shadow.h"
#include "forward.h"
#include "page.h"
#include "split.h"
#include "backward.h"
#include "rows.h"
#include "maps.h"
#include "special.h"
#include "ball.h"
#include "mixture.h"
#include "average.h"

// Parts of a head are whole blocks; packing its keys again for each part must stay cheap.
inline std::int64_t parts_of_head(std::int64_t blocks, std::int64_t heads) {
    return std::max<std::int64_t>(1, std::min(ceil_div(64, heads), ceil_div(blocks, 4)));
}

template <class T>
Outcome forward_in_segments(const AttentionProblem& p) {
    using Worker = SplitForward<T>;
    const auto make = [&]() -> const AttentionProblem& { return p; };
    const std::int64_t groups = p.batch * p.kv_heads, segments = ceil_div(p.keys, kSegment);
    const Scores<T> scores(p);
    SegmentResults<T> results(groups, p.heads / p.kv_heads * p.queries, segments, scores.has_mass());
    const Outcome searched = share<Worker>(groups * segments, p.threads, make, [&](Worker& worker, std::int64_t task) {
        const std::int64_t group = task / segments;
        worker.search(Sequence(p, group / p.kv_heads), group % p.kv_heads, task % segments, results, group);
    });
    if (searched != kDone) return searched;
    return share<Worker>(groups, p.threads, make, [&](Worker& worker, std::int64_t group) {
        worker.join(Sequence(p, group / p.kv_heads), group % p.kv_heads, results, group);
    });
}

// Where key heads do not fill the threads' turns, two tasks share the query heads of one: its keys are read twice, and
// the last turn is half as long.
template <class T>
Outcome forward_of_few(const AttentionProblem& p) {
    const auto make = [&]() -> const AttentionProblem& { return p; };
    const std::int64_t groups = p.batch * p.kv_heads, repeats = p.heads / p.kv_heads;
    const bool uneven = groups % p.threads != 0 && groups < 4 * p.threads;
    const std::int64_t parts = uneven ? std::min<std::int64_t>(2, repeats) : 1;
    return share<Forward<T>>(groups * parts, p.threads, make, [&](Forward<T>& worker, std::int64_t task) {
        const std::int64_t part = task / groups, group = task % groups;  // larger parts come first
        const std::int64_t middle = parts == 1 ? repeats : (repeats + 1) / 2;
        const Sequence s(p, group / p.kv_heads);
        worker.run_few(s, group % p.kv_heads, part ? middle : 0, part ? repeats : middle);
    });
}

template <class T>
Outcome forward(const AttentionProblem& p) {
    const auto make = [&]() -> const AttentionProblem& { return p; };
    if (p.batch * p.heads == 0 || p.queries == 0) return kDone;
    if (p.queries <= kFew && SplitForward<T>::pays(p)) return forward_in_segments<T>(p);
    if (p.queries <= kFew) return forward_of_few<T>(p);
    const std::int64_t parts = parts_of_head(ceil_div(p.queries, kBlock), p.batch * p.heads);
    return share<Forward<T>>(p.batch * p.heads * parts, p.threads, make, [&](Forward<T>& worker, std::int64_t task) {
        const std::int64_t head = task / parts, part = task % parts;
        const Sequence s(p, head / p.heads);
        const std::int64_t start = s.blocks() * part / parts * kBlock;
        const std::int64_t stop = std::min(s.blocks() * (part + 1) / parts * kBlock, s.queries);
        if (start < stop) worker.run(s, head % p.heads, start, stop);
    });
}

template <class T>
struct BackwardWorker : Backward<T> {
    using Pair = struct { const AttentionProblem* p; const AttentionGradient* g; };
    explicit BackwardWorker(Pair pair) : Backward<T>(*pair.p, *pair.g) {}
};

template <class T>
Outcome backward(const AttentionProblem& p, const AttentionGradient& g) {
    using Worker = BackwardWorker<T>;
    return share<Worker>(
        p.batch * p.kv_heads * g.parts, p.threads, [&] { return typename Worker::Pair{&p, &g}; },
        [&](Worker& worker, std::int64_t task) {
            const std::int64_t head = task / g.parts;
            worker.run(Sequence(p, head / p.kv_heads), head % p.kv_heads, task % g.parts);
        });
}

// Independent items 0 .. count - 1, so many at a time that fetching a task costs nothing.
template <class Worker, class P>
Outcome items(std::int64_t count, std::int64_t together, const P& p) {
    return share<Worker>(
        (count + together - 1) / together, p.threads, [&]() -> const P& { return p; },
        [&](Worker& worker, std::int64_t task) {
            const std::int64_t stop = (task + 1) * together < count ? (task + 1) * together : count;
            for (std::int64_t item = task * together; item < stop; ++item) worker.run(item);
        });
}

template <template <class> class Map, class T, class P>
Outcome rows(const P& p) {
    return items<Map<T>>(p.rows, 16, p);
}

Outcome attention(const AttentionProblem& p) {
    return p.query.dtype == kFloat64 ? forward<double>(p) : forward<float>(p);
}
Outcome attention_gradient(const AttentionProblem& p, const AttentionGradient& g) {
    return p.query.dtype == kFloat64 ? backward<double>(p, g) : backward<float>(p, g);
}
template <class T>
Outcome map_rows(const RowsProblem& p) {
    switch (p.family) {
        case kNorm: return rows<NormMap, T>(p);
        case kBudget: return rows<BudgetMap, T>(p);
        case kFused: return rows<FusedMap, T>(p);
        default: return rows<RowMap, T>(p);
    }
}
template <class T>
Outcome differentiate_rows(const RowsGradient& p) {
    switch (p.family) {
        case kNorm: return rows<NormMapGradient, T>(p);
        case kBudget: return rows<BudgetMapGradient, T>(p);
        case kFused: return rows<FusedMapGradient, T>(p);
        default: return rows<RowMapGradient, T>(p);
    }
}
Outcome row_map(const RowsProblem& p) {
    return p.dtype == kFloat64 ? map_rows<double>(p) : map_rows<float>(p);
}
Outcome row_map_gradient(const RowsGradient& p) {
    return p.dtype == kFloat64 ? differentiate_rows<double>(p) : differentiate_rows<float>(p);
}

Outcome append(const AppendProblem& p) {
    const std::int64_t count = p.batch * p.kv_heads * (p.tokens / kChunk + 2);
    return p.key.dtype == kFloat64 ? items<AppendWorker<double>>(count, 1, p) : items<AppendWorker<float>>(count, 1, p);
}
Outcome bounds(const BoundsProblem& p) { return items<BoundsWorker<float>>(p.batch * p.heads * p.queries, 1, p); }
std::int64_t shadow_bytes(std::int64_t dim) { return ShadowShape(dim).bytes(); }

Outcome paraboloid(const BallProblem& p) { return items<Ball>(p.pairs, p.dim == 3 ? 1 : 32, p); }
Outcome mixture(const MixtureProblem& p) { return items<Mixture>(p.rows, 1, p); }
Outcome average(const AverageProblem& p) {
    return p.dtype == kFloat64 ? items<Average<double>>(p.groups, 1, p) : items<Average<float>>(p.groups, 1, p);
}

}  // namespace FENCHEL_VARIANT
}  // namespace fenchel
