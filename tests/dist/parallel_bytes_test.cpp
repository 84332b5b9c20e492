// What a step of composed parallelism sends, group by group, against the tables of docs/design/005, 015 and 016.
#include <gtest/gtest.h>

#include <map>

#include <torch/torch.h>

#include <hyper_parallel/hyper_parallel.h>

#include "support/parallel_net.h"
#include "support/rank_threads.h"

namespace hyper_parallel::testing {
namespace {

constexpr int64_t kFloat = 4, kRows = 2;

/// Bytes that a rank sends in an all-reduce of n bytes: one phase for small messages, two for larger ones.
int64_t all_reduce(int64_t n, int64_t ranks, int rank) {
  if (n <= (ranks == 2 ? 64 : 4) * 1024) return (ranks - 1) * n;
  const int64_t each = (n / kFloat + ranks - 1) / ranks, begin = std::min(rank * each, n / kFloat);
  const int64_t own = std::min(each, n / kFloat - begin) * kFloat;
  return (n - own) + (ranks - 1) * own;
}

/// Expected bytes by group of ranks.
class Sent {
 public:
  void add(const Comm& comm, int64_t bytes) {
    auto [entry, added] = groups_.try_emplace(&comm.impl(), comm, 0);
    entry->second.second += bytes;
  }
  void start() const {
    for (const auto& [key, entry] : groups_) entry.first.reset_counters();
  }
  void expect(const std::string& what) const {
    for (const auto& [key, entry] : groups_)
      EXPECT_EQ(entry.first.counters().bytes_sent, entry.second) << what << ", group " << entry.first.name();
  }

 private:
  std::map<const void*, std::pair<Comm, int64_t>> groups_;
};

/// The boundaries of one forward and backward over tp: table of 016.
void add_boundaries(Sent& sent, const DecoderOptions& o) {
  const Comm tp = o.tp.get_group();
  const int64_t ranks = tp.size(), token = o.dim * kFloat * kRows;
  const int64_t whole = o.length * token,
                own = parallel::ceil_chunks(o.length, tp.size())[static_cast<std::size_t>(tp.rank())] * token;
  const int64_t gather = (ranks - 1) * own, scatter = whole - own, sum = all_reduce(whole, ranks, tp.rank());
  const int64_t regions = 2 * o.layers;  // attention, and SwiGLU or experts with their shared one
  if (o.sequence) {
    sent.add(tp, scatter + gather);                                              // out of the table
    for (int64_t i = 0; i < regions; ++i) sent.add(tp, 2 * (gather + scatter));  // in and out, forward and backward
    sent.add(tp, gather + scatter);                                              // into the head
  } else {
    sent.add(tp, sum);
    for (int64_t i = 0; i < regions; ++i) sent.add(tp, 2 * sum);  // out forward, in backward
    sent.add(tp, sum);
  }
  const int64_t columns = parallel::ceil_chunks(o.vocab, tp.size())[static_cast<std::size_t>(tp.rank())],
                tokens = kRows * o.length;
  if (o.loss_parallel) {
    sent.add(tp, all_reduce(tokens * kFloat, ranks, tp.rank()) + all_reduce(2 * tokens * kFloat, ranks, tp.rank()));
  } else {
    sent.add(tp, (ranks - 1) * tokens * columns * kFloat);
  }
}

/// What units send: gathers, reductions over shards and, in one, over replicas and copies, presence bits with both. Where these
/// do not reach all ranks that share the unit, there is one more exchange of the bits.
void add_units(Sent& sent, const ParallelModel& made) {
  int64_t parameters = 0;
  for (const parallel::ParallelUnit& unit : made.units) {
    const int64_t gathers = unit.name.empty() ? 1 : 2;
    for (const fsdp::ShardedGroup& group : unit.handle.groups(/*recurse=*/false)) {
      const int64_t n = group.shard.numel() * kFloat, shards = group.shard_comm.size();
      const auto count = static_cast<int64_t>(group.parameters.size()), bits = (count + 7) / 8;
      sent.add(group.shard_comm, (gathers + 1) * (shards - 1) * n + (shards - 1) * bits);
      const int64_t replicas = group.replicate_comm.defined() ? group.replicate_comm.size() : 1;
      if (shards * replicas != unit.handle.unit_comm().size()) parameters += count;
      if (replicas > 1)
        sent.add(group.replicate_comm, all_reduce(n, replicas, group.replicate_comm.rank()) + (replicas - 1) * bits);
    }
  }
  sent.add(made.root.unit_comm(), (made.root.unit_comm().size() - 1) * ((parameters + 7) / 8));
}

TEST(ComposedTraffic, DenseModelIsTheTables) {
  for (const auto& [world, sizes] : {std::pair<int, parallel::ParallelSizes>{4, {.tp = 2}},
                                     {8, {.dp_replicate = 2, .tp = 2}},
                                     {6, {.tp = 3}},
                                     {3, {.tp = 3}}}) {
    for (const bool sequence : {false, true}) {
      for (const bool loss_parallel : {false, true}) {
        for (const auto layout : kLayouts) {
          run_ranks(world, [&, on = sizes, ranks = world] {
            const PlanMeshes meshes = parallel::init_parallel_meshes("cpu", on);
            const DecoderOptions options = on_meshes(
                {.vocab = 13, .hidden = 7, .heads = 6, .length = 5, .loss_parallel = loss_parallel, .sequence = sequence},
                meshes);
            Decoder model(options);
            const ParallelModel made = parallelize(model, meshes, {.fully_shard = {.shard_layout = layout}});
            const Batch batch = decoder_batch(options, kRows, 1);
            const auto step = [&] {
              made.root.zero_grad();
              model(batch.tokens, batch.targets).backward();
            };
            for (int i = 0; i < 2; ++i) step();  // comparisons, order
            Sent sent;
            add_boundaries(sent, options);
            add_units(sent, made);
            sent.start();
            step();
            sent.expect(concat("W=", ranks, " sequence ", sequence, " loss parallel ", loss_parallel));
          });
        }
      }
    }
  }
}

}  // namespace
}  // namespace hyper_parallel::testing
