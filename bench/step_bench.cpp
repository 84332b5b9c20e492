// Our side of the comparison; bench/run.py starts it with torchrun. Rank 0 prints one line of JSON, in the form of baseline.py's.
#include <chrono>
#include <iostream>
#include <memory>

#include <torch/torch.h>
#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include <hyper_parallel/comm/comm.h>
#include <hyper_parallel/comm/world.h>
#include <hyper_parallel/nn/fully_shard.h>
#include <hyper_parallel/nn/library.h>
#include <hyper_parallel/optim/adamw.h>
#include <hyper_parallel/train/llama.h>
#include <hyper_parallel/train/shard_llama.h>

#include "process_stats.h"
#include "shared_inputs.h"

namespace hp = hyper_parallel;

namespace {

struct Options {
  std::string inputs, dtype = "fp32", layout = "ragged";
  bool no_reshard = false, faked_peers = false, tiny = false;
  int warmup = 3, steps = 10, units = 64;
};

using Clock = std::chrono::steady_clock;

double ms(Clock::time_point from, Clock::time_point to) { return std::chrono::duration<double, std::milli>(to - from).count(); }

hp::FullyShardOptions shard_options(const Options& options) {
  const int world = hp::get_world_size();
  hp::FullyShardOptions shard;
  shard.mesh = hp::init_device_mesh("cpu", {world}, {"dp"});
  if (options.faked_peers) {
    std::vector<int> ranks(static_cast<std::size_t>(world));
    for (int rank = 0; rank < world; ++rank) ranks[static_cast<std::size_t>(rank)] = rank;
    shard.mesh = hp::DeviceMesh::from_group({hp::Comm::fake(hp::get_rank(), world)}, "cpu", {world}, ranks, {"dp"});
  }
  shard.shard_layout = options.layout == "ragged" ? hp::ShardLayout::kRagged : hp::ShardLayout::kPerParameter;
  if (options.dtype == "bf16") shard.mp_policy = {.param_dtype = torch::kBFloat16, .reduce_dtype = torch::kFloat};
  return shard;
}

nlohmann::json train(const Options& options) {
  const bench::SharedInputs inputs(options.inputs);
  const double start_mib = bench::status_mib("VmRSS");
  hp::train::Llama model(inputs.model());
  inputs.load_weights(*model);
  hp::FullyShardOptions shard = shard_options(options);
  shard.reshard_after_forward = !options.no_reshard;
  const hp::HSDPModule root = hp::train::fully_shard_llama(model, shard);
  hp::optim::AdamW optimizer(root, {.lr = 3e-4, .betas = {0.9, 0.95}, .eps = 1e-8, .weight_decay = 0.1});
  const auto batches = inputs.batches(hp::get_rank());
  const hp::Comm comm = root.data_parallel_comm();
  const hp::Comm everyone = hp::current_world().comm();
  everyone.barrier();
  const double setup_peak = bench::status_mib("VmHWM");
  bench::clear_peak();

  nlohmann::json rows = {{"step_ms", nlohmann::json::array()}};
  bench::Usage before;
  std::int64_t sent = 0, counted = 0, mapped = 0;
  for (int step = 0; step < options.warmup + options.steps; ++step) {
    if (step == options.warmup) {
      before = bench::usage();
      sent = bench::sent_bytes();
      counted = comm.counters().bytes_sent;
      mapped = comm.counters().bytes_mapped;
    }
    const bench::Batch& batch = batches[static_cast<std::size_t>(step) % batches.size()];
    const auto start = Clock::now();
    torch::Tensor loss = hp::train::next_token_loss(model(batch.tokens), batch.targets);
    const auto forward = Clock::now();
    loss.backward();
    const auto backward = Clock::now();
    optimizer.step();
    optimizer.zero_grad();
    const auto end = Clock::now();
    rows["loss"].push_back(loss.item<double>());
    if (step < options.warmup) continue;
    rows["step_ms"].push_back(ms(start, end));
    rows["forward_ms"].push_back(ms(start, forward));
    rows["backward_ms"].push_back(ms(forward, backward));
    rows["optimizer_ms"].push_back(ms(backward, end));
  }
  const bench::Usage after = bench::usage();
  const double steps = options.steps;
  rows["peak_mib"] = bench::status_mib("VmHWM");
  rows["setup_peak_mib"] = setup_peak;
  rows["start_mib"] = start_mib;
  rows["sent_mb_per_step"] = static_cast<double>(bench::sent_bytes() - sent) / steps / 1e6;
  rows["counted_mb_per_step"] = static_cast<double>(comm.counters().bytes_sent - counted) / steps / 1e6;
  rows["mapped_mb_per_step"] = static_cast<double>(comm.counters().bytes_mapped - mapped) / steps / 1e6;
  // Pages that several ranks use count in parts: all ranks must be there.
  everyone.barrier();
  rows["pss_mib"] = bench::proportional_mib();
  everyone.barrier();
  rows["faults_per_step"] = static_cast<double>(after.minor_faults - before.minor_faults) / steps;
  rows["system_ms_per_step"] = (after.system_ms - before.system_ms) / steps;
  rows["user_ms_per_step"] = (after.user_ms - before.user_ms) / steps;
  constexpr double kMib = 1 << 20;
  const auto memory = root.memory_use();
  rows["engine_mib"] = {{"shards", static_cast<double>(memory.shards) / kMib},
                        {"gradients", static_cast<double>(memory.gradients) / kMib},
                        {"pool", static_cast<double>(memory.pool) / kMib},
                        {"copies", static_cast<double>(memory.copies) / kMib},
                        {"mapped", static_cast<double>(memory.mapped) / kMib}};
  return rows;
}

struct TinyImpl : torch::nn::Module {
  explicit TinyImpl(int units) {
    for (int i = 0; i < units; ++i) layers.push_back(register_module(std::to_string(i), hp::nn::Linear(8, 8)));
  }
  torch::Tensor forward(torch::Tensor x) {
    for (auto& layer : layers) x = layer(x);
    return x;
  }
  std::vector<hp::nn::Linear> layers;
};
HP_MODULE(Tiny);

/// Microseconds per unit of each step's forward and backward.
std::pair<std::vector<double>, std::vector<double>> time_tiny(const Options& options, bool wrap) {
  Tiny model(options.units);
  if (wrap) {
    const hp::FullyShardOptions shard = shard_options(options);
    for (auto& layer : model->layers) hp::fully_shard(layer, shard);
    hp::fully_shard(model, shard);
  }
  const torch::Tensor x = torch::randn({1, 8});
  std::vector<double> forward, backward;
  for (int step = 0; step < options.warmup + options.steps; ++step) {
    const auto start = Clock::now();
    const torch::Tensor loss = model(x).sum();
    const auto middle = Clock::now();
    loss.backward();
    const auto end = Clock::now();
    model->zero_grad();
    if (step < options.warmup) continue;
    forward.push_back(ms(start, middle) / options.units * 1e3);
    backward.push_back(ms(middle, end) / options.units * 1e3);
  }
  return {forward, backward};
}

nlohmann::json tiny(const Options& options) {
  const auto plain = time_tiny(options, false), wrapped = time_tiny(options, true);
  return {{"plain_forward_us", plain.first},
          {"plain_backward_us", plain.second},
          {"forward_us", wrapped.first},
          {"backward_us", wrapped.second}};
}

void run(const Options& options) {
  torch::set_num_threads(1);
  hp::init_process_group();
  const nlohmann::json mine = options.tiny ? tiny(options) : train(options);
  nlohmann::json result = {
      {"side", "ours"}, {"layout", options.layout}, {"dtype", options.dtype}, {"world", hp::get_world_size()}};
  for (const std::string& rank : hp::current_world().comm().all_gather_string(mine.dump()))
    result["ranks"].push_back(nlohmann::json::parse(rank));
  if (hp::get_rank() == 0) std::cout << result.dump() << std::endl;
  hp::destroy_process_group();
}

}  // namespace

int main(int argc, char** argv) {
  Options options;
  CLI::App app("Times training steps of the benchmark's model with hyper_parallel.");
  app.add_option("--inputs", options.inputs, "folder that shared_inputs.py made");
  app.add_option("--dtype", options.dtype)->check(CLI::IsMember({"fp32", "bf16"}))->capture_default_str();
  app.add_option("--layout", options.layout)->check(CLI::IsMember({"ragged", "per-parameter"}))->capture_default_str();
  app.add_flag("--no-reshard", options.no_reshard, "keep parameters gathered between forward and backward");
  app.add_flag("--faked-peers", options.faked_peers, "all of the engine's work, but nothing is sent");
  app.add_flag("--tiny", options.tiny, "host time of tiny units instead of training");
  app.add_option("--units", options.units, "number of tiny units")->check(CLI::PositiveNumber)->capture_default_str();
  app.add_option("--warmup", options.warmup)->check(CLI::NonNegativeNumber)->capture_default_str();
  app.add_option("--steps", options.steps)->check(CLI::PositiveNumber)->capture_default_str();
  CLI11_PARSE(app, argc, argv);
  try {
    run(options);
  } catch (const std::exception& error) {
    std::cerr << error.what() << '\n';
    return 1;
  }
  return 0;
}
