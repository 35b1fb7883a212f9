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
#include "operands.h"
#include "search.h"
#include "scores.h"
#include "gather.h"
#include "forward.h"
#include "backward.h"
#include "rows.h"
#include "special.h"
#include "ball.h"
#include "mixture.h"
#include "average.h"

template <class T>
Outcome forward(const AttentionProblem& p) {
    // Parts of a head are whole blocks; packing its keys again for each part must stay cheap.
    const std::int64_t blocks = (p.queries + kBlock - 1) / kBlock, heads = p.batch * p.heads;
    if (heads == 0 || blocks == 0) return kDone;
    const std::int64_t wanted = (64 + heads - 1) / heads, most = (blocks + 3) / 4;
    const std::int64_t parts = wanted < most ? wanted : most;
    return share<Forward<T>>(
        heads * parts, p.threads, [&]() -> const AttentionProblem& { return p; },
        [&](Forward<T>& worker, std::int64_t task) {
            const std::int64_t head = task / parts, part = task % parts;
            const std::int64_t start = blocks * part / parts * kBlock;
            const std::int64_t stop = blocks * (part + 1) / parts * kBlock;
            worker.run(head / p.heads, head % p.heads, start, stop < p.queries ? stop : p.queries);
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
            worker.run(head / p.kv_heads, head % p.kv_heads, task % g.parts);
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
Outcome row_map(const RowsProblem& p) {
    return p.dtype == kFloat64 ? rows<RowMap, double>(p) : rows<RowMap, float>(p);
}
Outcome row_map_gradient(const RowsGradient& p) {
    return p.dtype == kFloat64 ? rows<RowMapGradient, double>(p) : rows<RowMapGradient, float>(p);
}

Outcome paraboloid(const BallProblem& p) { return items<Ball>(p.pairs, p.dim == 3 ? 1 : 32, p); }
Outcome mixture(const MixtureProblem& p) { return items<Mixture>(p.rows, 1, p); }
Outcome average(const AverageProblem& p) {
    return p.dtype == kFloat64 ? items<Average<double>>(p.groups, 1, p) : items<Average<float>>(p.groups, 1, p);
}

}  // namespace FENCHEL_VARIANT
}  // namespace fenchel
