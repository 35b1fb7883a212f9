// Tasks shared among threads. Which thread takes which task changes no result.
#pragma once
#include <atomic>
#include <cstdint>

namespace fenchel {

// What a kernel tells Python.
enum Outcome : int { kNoMemory = 0, kDone = 1, kForeign = 2 };

// Thrown where saved numbers cannot be those of the problem at hand.
struct Foreign {};

// Runs body(context) on up to `threads` threads, fewer where the machine has far fewer, in the pool of the
// OpenMP library that the process already uses (so that its sleeping or spinning workers are ours too), or
// on new threads.
void on_threads(std::int64_t threads, void (*body)(void*), void* context);

template <class Worker, class Make, class Run>
Outcome share(std::int64_t tasks, std::int64_t threads, Make make, Run run) {
    struct Context {
        std::atomic<std::int64_t> next{0};
        std::atomic<int> outcome{kDone};
        std::int64_t tasks;
        Make* make;
        Run* run;
    } context;
    context.tasks = tasks;
    context.make = &make;
    context.run = &run;
    auto body = [](void* raw) {
        auto& c = *static_cast<Context*>(raw);
        try {
            if (c.next.load() >= c.tasks) return;
            Worker worker((*c.make)());
            for (std::int64_t t; (t = c.next.fetch_add(1)) < c.tasks;) (*c.run)(worker, t);
        } catch (const Foreign&) {  // an exception must not cross a thread
            c.outcome = kForeign;
        } catch (...) {  // bad_alloc
            c.outcome = kNoMemory;
        }
    };
    on_threads(threads < tasks ? threads : tasks, body, &context);
    return Outcome(context.outcome.load());
}

}  // namespace fenchel
