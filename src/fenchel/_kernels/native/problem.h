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

struct AttentionProblem {
    std::int64_t batch, heads, kv_heads, queries, keys, dim, value_dim;
    View query, key, value;
    View mask;  // bytes, one = attend; data null where absent, as below
    View bias;  // added to the scores
    View mass;  // base measure, or its logarithm
    View eps;   // float64, alpha - 1 of each row; column stride unused
    std::int64_t mass_is_log;
    double scale, bias_scale;
    std::int64_t causal, first;  // position of the first query: query i sees keys 0 .. first + i
    double dropout;
    std::int64_t seed, queries_in_all;  // of the dropout's hash
    std::int64_t threads;

    // Results, contiguous. `saved` is absent where no derivative will be asked for.
    void* output;        // (batch, head, query, value_dim), dtype of the query
    double* offset;      // (batch, head, query, 2): centre and rest
    std::int32_t* count; // (batch, head, query): keys in the support
    std::int64_t capacity;     // entries a block of rows may save
    std::int32_t* saved_key;   // (batch, head, block, capacity)
    void* saved_distance;      // likewise, in the precision of the computation
};

struct AttentionGradient {
    View output;     // the incoming gradient, (batch, head, query, value_dim)
    std::int64_t parts;  // partial sums over blocks of queries, fixed by the shape
    void* query;     // (batch, head, query, dim), in the precision of the computation, as all below
    void* key;       // (parts, batch, kv_head, key, dim)
    void* value;     // (parts, batch, kv_head, key, value_dim)
    double* eps;     // (batch, head, query) or null
    void* scores;    // (batch, head, query, key), zeros on entry, or null
    void* log_mass;  // likewise
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
constexpr std::int64_t kChunk = 512; // keys scored at once

}  // namespace fenchel
