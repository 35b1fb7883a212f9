// What Python hands over: plain numbers and pointers, no type of torch. Python reads the layout from this
// file (`structures.py`): one declaration per line, of 64-bit integers, doubles, pointers and structs.
#pragma once
#include <cstdint>

namespace fenchel {

enum Dtype : std::int64_t { kFloat32 = 0, kFloat64 = 1, kBFloat16 = 2, kFloat16 = 3 };

// A view (batch, head, row, column); strides count elements and are zero along broadcast axes.
struct View {
    void* data;
    std::int64_t dtype;
    std::int64_t stride[4];

    std::int64_t at(std::int64_t b, std::int64_t h, std::int64_t row) const {
        return b * stride[0] + h * stride[1] + row * stride[2];
    }
};

// Keys and values that stand in pages of kChunk tokens, as a cache holds them. Views of keys and values are then (page,
// head, token, component), and a sequence may have fewer keys than the longest; its last query is at its last key.
struct CacheProblem {
    const std::int64_t* pages;    // (batch, chunks): where each chunk of a sequence is
    const std::int64_t* lengths;  // (batch): keys of a sequence
    std::int64_t chunks;
    View shadow;           // records of `shadow.h`, bytes (page, head); or nothing
    // (row, 5): keys that are seen; that were bounded; scored with their whole page; scored alone; whose values were read.
    std::int64_t* read;
    // For a proof, or null. (row, 2): the largest cut that a key was skipped for, and the largest bound of a skipped key;
    // (row, key): one where a key was a candidate.
    double* bound;
    std::uint8_t* candidate;
};

// Packed sequences: `batch` counts them, `queries` and `keys` are of the longest, and query_start and key_start say how
// many tokens come before each; views then have one batch, with the tokens of all sequences as rows. What is
// absent has null data.
struct AttentionProblem {
    std::int64_t batch, heads, kv_heads, queries, keys, dim, value_dim;
    const std::int64_t *query_start, *key_start;  // (batch + 1) or null
    View query, key, value;
    View mask;  // bytes, one = attend
    View bias;  // added to the scores
    View mass;  // base measure, or its logarithm
    View eps;   // float64, alpha - 1 of each row; column stride unused
    std::int64_t mass_is_log;

    // Which keys a query sees: query + lowest .. query + highest, and start .. stop - 1 of its own.
    std::int64_t lowest, highest;
    View start, stop;  // int64, (batch, head, query)
    // Bias and mass by relative position, at key - query + queries - 1 (batch, head, 1, position), and by key
    // (batch, head, 1, key); in the precision of the computation, the last axis contiguous.
    View relative, relative_mass, of_key, of_key_mass;
    // A null key with value zero: its score and its mass, float64 (batch, head).
    View sink, sink_mass;

    double scale, bias_scale, softcap;  // scores become softcap * tanh(score / softcap); 0: as they are
    double dropout;
    std::int64_t seed, first, queries_in_all;  // of the dropout's hash
    std::int64_t threads;

    // Results. `saved` is absent where no derivative will be asked for.
    View output;         // (batch, head, query, value_dim), dtype of the query
    double* offset;      // (row, 2): centre and rest
    std::int32_t* count; // (row): keys in the support, the sink as key -1 among them
    std::int64_t capacity;     // entries a block of rows may save
    std::int32_t* saved_key;   // (block, capacity)
    void* saved_distance;      // likewise, in the precision of the computation

    const CacheProblem* cache;  // or null
};

// New keys and values of a cache are stored, and so is their shadow. All of one precision.
struct AppendProblem {
    std::int64_t batch, kv_heads, tokens, dim, value_dim;
    View key, value;                        // new ones, (batch, head, token, component)
    View stored_key, stored_value, shadow;  // (page, head, token, component)
    const std::int64_t *pages, *lengths;    // as of a CacheProblem, before the new ones
    std::int64_t chunks, threads;
};

// All in the precision of the computation, contiguous; null where nobody asks.
struct AttentionGradient {
    View output;     // the incoming gradient, (batch, head, query, value_dim)
    std::int64_t parts;  // partial sums over blocks of queries, fixed by the shape of a sequence
    void* query;     // (row, dim)
    void* key;       // (parts, key row, dim), zeros on entry, as all below
    void* value;     // (parts, key row, value_dim)
    double* eps;     // (row)
    double *sink, *sink_log_mass;               // (row)
    void *scores, *log_mass;                    // (batch, head, query, key)
    void *relative, *relative_log_mass;         // (parts, batch, head, positions), packed: (parts, head, all positions)
    void *of_key, *of_key_log_mass;             // (parts, batch, head, key), packed: (parts, head, all keys)
};

// Bounds on all scores of some queries, from the shadow of a cache. Keys beyond a sequence's end are not written.
struct BoundsProblem {
    std::int64_t batch, heads, kv_heads, queries, keys, dim;
    View query;  // float32, times the scale
    View shadow;
    const std::int64_t *pages, *lengths;
    std::int64_t chunks, threads;
    float *upper, *width;  // (batch, head, query, key): no score exceeds upper, none is below upper - width
};

enum RowFamily : std::int64_t { kTsallis = 0, kNorm = 1, kBudget = 2, kFused = 3 };

struct RowsProblem {
    std::int64_t rows, keys, dtype, family;
    const void* scores;       // (rows, keys), contiguous
    const double* parameter;  // alpha - 1 (Tsallis, norm), k (budget) or the strength (fused): (rows) or one
    std::int64_t parameter_stride;
    void* weights;            // (rows, keys), or null where the offset alone is wanted (Tsallis)
    double* offset;           // (rows, 2), Tsallis alone
    std::int64_t threads;

    double parameter_of(std::int64_t row) const { return parameter[row * parameter_stride]; }
};

struct RowsGradient {
    std::int64_t rows, keys, dtype, family;
    const void* weights;
    const void* gradient;
    double parameter;
    void* scores;
    std::int64_t threads;
};

// Pairs of a truncated paraboloid and a Gaussian; matrices and vectors contiguous, one for each pair.
struct BallProblem {
    std::int64_t pairs, dim;                               // 1, 2 or 3
    const double *mean, *scale, *centre, *covariance;      // of the paraboloid; of the Gaussian
    const double *nodes, *weights;                         // (kMostNodes / kNodeStep, kMostNodes): rules of Gauss and Legendre
    double reach, digits;                                  // of `continuous.ball.Rule`
    std::int64_t threads;
    double* value;               // (pairs)
    double *to_mean, *to_scale;  // derivatives (pairs, dim), (pairs, dim, dim), or null
};
constexpr std::int64_t kNodeStep = 4, kMostNodes = 96;

// Mixtures of Gaussians on a line or in the plane, fitted to weights at positions; in place.
struct MixtureProblem {
    std::int64_t rows, batch, positions, modes, dim, iterations, threads;
    const double* weights;  // (batch, positions); row i fits those of i % batch
    const double* position; // (dim, positions)
    double least;           // variance along any direction
    double *mixing, *mean, *covariance;  // (rows, modes), and (dim), (dim, dim) of each
};

// Softmax attention of which an average over the queries alone is wanted; all contiguous, one precision.
struct AverageProblem {
    std::int64_t groups, rows, queries, keys, dim, value_dim, dtype, threads;
    const void *query, *key;     // (groups, rows, queries, dim), (groups, keys, dim)
    const void *value, *share;   // (groups, keys, value_dim), (groups, rows, queries)
    void* output;                // (groups, rows, value_dim), or null where derivatives are asked for:
    const void* slope;           // that of the output, and those of the operands
    void *to_query, *to_key, *to_value, *to_share;
};

constexpr std::int64_t kBlock = 48;  // rows of queries handled together
constexpr std::int64_t kFew = 16;    // queries of a call that count as few: its heads share a block
constexpr std::int64_t kChunk = 512; // keys scored at once
// Keys searched by themselves before the rest is seen. Chunks and segments start at multiples of their size, so that
// the search of a row, and with it every bit, depends on its own scores alone.
constexpr std::int64_t kSegment = 4096;

// May keys be dropped by `screen.h`? Off in tests, to compare. And how often rows were screened against a chunk.
extern bool screening;
extern std::int64_t screened;

}  // namespace fenchel
