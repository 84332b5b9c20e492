#pragma once
// Explicit-state model checking: every interleaving of a few small programs that share a few words.
#include <cstdint>
#include <cstring>
#include <functional>
#include <string>
#include <unordered_set>
#include <vector>

namespace hyper_parallel::testing {

/// What a thread does in one atomic step. It may read and write shared words and its own, and sets its counter.
/// \tparam State a plain struct without padding whose member `pc[i]` is the program counter of thread i
template <class State>
struct Step {
  std::string name;
  std::function<bool(const State&)> enabled = {};  ///< blocked while false; empty: always
  std::function<void(State&)> run = {};
  bool local = false;  ///< touches nothing that another thread can see or change now: no need to try others before it
};

template <class State>
using Program = std::vector<Step<State>>;  ///< the counter is the index; past the end: finished

struct Verdict {
  std::string problem;  ///< empty: none in any interleaving
  std::int64_t states = 0;
};

/// Visits every state that `programs` can reach from `start`. The problem is a violated invariant, or a state in which some
/// thread has not finished and none can move, unless `may_stop` says that this thread need not finish.
template <class State>
Verdict explore(const State& start, const std::vector<Program<State>>& programs,
                const std::function<std::string(const State&)>& violation,
                const std::function<bool(std::size_t thread)>& may_stop = {}) {
  const auto key = [](const State& state) { return std::string(reinterpret_cast<const char*>(&state), sizeof state); };
  std::unordered_set<std::string> seen{key(start)};
  std::vector<State> open{start};
  const auto next_step = [&](const State& state, std::size_t t) {
    const auto pc = static_cast<std::size_t>(state.pc[t]);
    return pc < programs[t].size() ? &programs[t][pc] : nullptr;
  };
  const auto take = [&](State state, std::size_t t) {
    const auto* step = next_step(state, t);
    ++state.pc[t];
    step->run(state);
    if (seen.insert(key(state)).second) open.push_back(state);
  };
  while (!open.empty()) {
    const State state = open.back();
    open.pop_back();
    if (auto problem = violation(state); !problem.empty()) return {problem, static_cast<std::int64_t>(seen.size())};
    std::vector<std::size_t> movable;
    bool unfinished = false;
    std::string where;
    for (std::size_t t = 0; t < programs.size(); ++t) {
      const auto* step = next_step(state, t);
      if (step == nullptr) continue;
      if (step->local) {
        movable = {t};
        break;
      }
      if (!may_stop || !may_stop(t)) unfinished = true;
      where.append(" ").append(std::to_string(t)).append(":").append(step->name);
      if (!step->enabled || step->enabled(state)) movable.push_back(t);
    }
    for (const auto t : movable) take(state, t);
    if (movable.empty() && unfinished) return {"nobody can move:" + where, static_cast<std::int64_t>(seen.size())};
  }
  return {{}, static_cast<std::int64_t>(seen.size())};
}

}  // namespace hyper_parallel::testing
