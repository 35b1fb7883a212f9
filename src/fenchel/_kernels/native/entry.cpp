// The functions that Python calls, and the choice of instruction set at run time.
#include <dlfcn.h>

#include <algorithm>
#include <exception>
#include <thread>
#include <utility>
#include <vector>

#include "parallel.h"
#include "problem.h"

#define FENCHEL_DECLARE(variant)                                                   \
    namespace fenchel::variant {                                                   \
    Outcome attention(const AttentionProblem&);                                    \
    Outcome attention_gradient(const AttentionProblem&, const AttentionGradient&); \
    Outcome row_map(const RowsProblem&);                                           \
    Outcome row_map_gradient(const RowsGradient&);                                 \
    Outcome paraboloid(const BallProblem&);                                        \
    Outcome mixture(const MixtureProblem&);                                        \
    Outcome average(const AverageProblem&);                                        \
    Outcome append(const AppendProblem&);                                          \
    Outcome bounds(const BoundsProblem&);                                          \
    std::int64_t shadow_bytes(std::int64_t);                                       \
    }

FENCHEL_DECLARE(plain)
#if defined(__x86_64__)
FENCHEL_DECLARE(avx2)
FENCHEL_DECLARE(avx512)
#endif

namespace fenchel {

bool screening = true;
std::int64_t screened = 0;

namespace {
// A few for each core: more have nothing to gain, and thousands no room for their stacks.
std::int64_t most_threads() {
    static const std::int64_t cores = std::thread::hardware_concurrency();
    return std::max<std::int64_t>(16, 4 * cores);
}

void on_new_threads(std::int64_t threads, void (*body)(void*), void* context) {
    std::vector<std::thread> others;
    try {
        for (std::int64_t i = 1; i < threads; ++i) others.emplace_back(body, context);
    } catch (const std::exception&) {  // no more threads or memory: those that run share the tasks
    }
    body(context);
    for (auto& other : others) other.join();
}
}  // namespace

void on_threads(std::int64_t threads, void (*body)(void*), void* context) {
    if (threads <= 1) return body(context);
    using Parallel = void (*)(void (*)(void*), void*, unsigned, unsigned);
    static const auto parallel = reinterpret_cast<Parallel>(dlsym(RTLD_DEFAULT, "GOMP_parallel"));
    // Whoever asks torch for thousands may have used up what the system grants: libgomp ends the process then.
    if (parallel && threads <= most_threads()) return parallel(body, context, unsigned(threads), 0);
    on_new_threads(std::min(threads, most_threads()), body, context);
}

namespace {
enum Variant { kPlain, kAvx2, kAvx512 };

Variant best() {
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bw"))
        return kAvx512;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return kAvx2;
#endif
    return kPlain;
}
const Variant supported = best();
Variant chosen = supported;
}  // namespace
}  // namespace fenchel

using namespace fenchel;

#if defined(__x86_64__)
#define FENCHEL_CALL(call) \
    (chosen == kAvx512 ? avx512::call : chosen == kAvx2 ? avx2::call : plain::call)
#else
#define FENCHEL_CALL(call) plain::call
#endif

#define FENCHEL_EXPORT extern "C" __attribute__((visibility("default")))

FENCHEL_EXPORT int fenchel_attention(const AttentionProblem* p) { return FENCHEL_CALL(attention(*p)); }
FENCHEL_EXPORT int fenchel_attention_gradient(const AttentionProblem* p, const AttentionGradient* g) {
    return FENCHEL_CALL(attention_gradient(*p, *g));
}
FENCHEL_EXPORT int fenchel_row_map(const RowsProblem* p) { return FENCHEL_CALL(row_map(*p)); }
FENCHEL_EXPORT int fenchel_row_map_gradient(const RowsGradient* p) { return FENCHEL_CALL(row_map_gradient(*p)); }
FENCHEL_EXPORT int fenchel_paraboloid(const BallProblem* p) { return FENCHEL_CALL(paraboloid(*p)); }
FENCHEL_EXPORT int fenchel_mixture(const MixtureProblem* p) { return FENCHEL_CALL(mixture(*p)); }
FENCHEL_EXPORT int fenchel_average(const AverageProblem* p) { return FENCHEL_CALL(average(*p)); }
FENCHEL_EXPORT int fenchel_append(const AppendProblem* p) { return FENCHEL_CALL(append(*p)); }
FENCHEL_EXPORT int fenchel_bounds(const BoundsProblem* p) { return FENCHEL_CALL(bounds(*p)); }
FENCHEL_EXPORT std::int64_t fenchel_shadow_bytes(std::int64_t dim) { return FENCHEL_CALL(shadow_bytes(dim)); }

// The checksum of problem.h as it was compiled: a library of another version is noticed.
FENCHEL_EXPORT std::uint32_t fenchel_layout() { return FENCHEL_LAYOUT; }
FENCHEL_EXPORT int fenchel_block() { return int(kBlock); }
FENCHEL_EXPORT int fenchel_variant() { return int(chosen); }
// Results are the same; returns what was before.
FENCHEL_EXPORT int fenchel_screen(int on) { return std::exchange(screening, on != 0); }
FENCHEL_EXPORT std::int64_t fenchel_screened() { return __atomic_load_n(&screened, __ATOMIC_RELAXED); }
// A lesser variant than the machine's best, for tests; returns what is used from now on.
FENCHEL_EXPORT int fenchel_choose(int variant) {
    chosen = variant >= 0 && variant <= int(supported) ? Variant(variant) : supported;
    return int(chosen);
}
