#pragma once
// Two threads of one benchmark are two ranks that meet in `store`; each repetition gets a new one.
#include <benchmark/benchmark.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

constexpr int kRanks = 2;
inline c10::intrusive_ptr<c10d::Store> store;

inline void new_store(const benchmark::State&) { store = c10::make_intrusive<c10d::HashStore>(); }
inline void drop_store(const benchmark::State&) { store.reset(); }
