#include <hyper_parallel/train/trainer.h>

#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <fstream>
#include <limits>
#include <numeric>

#include <hyper_parallel/comm/comm.h>
#include <hyper_parallel/core/trace.h>
#include <hyper_parallel/mesh/device_mesh.h>
#include <hyper_parallel/train/agree.h>
#include <hyper_parallel/train/generate.h>
#include <hyper_parallel/train/loss_plot.h>
#include <hyper_parallel/train/progress.h>
#include <hyper_parallel/train/schedule.h>
#include <hyper_parallel/train/shard_llama.h>
#include <hyper_parallel/train/tokenizer.h>

#include "train/assemble.h"
#include "train/batches.h"
#include "train/cannot_write.h"
#include "train/meshes.h"
#include "train/resume.h"
#include "train/stop_signal.h"
#include "train/trace_window.h"
#include "train/updater.h"

namespace hyper_parallel::train {
namespace {

namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point begin) { return std::chrono::duration<double>(Clock::now() - begin).count(); }

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream in(text);
  for (std::string line; std::getline(in, line);) lines.push_back(line);
  return lines;
}

void write_file(const fs::path& file, const std::string& text) {
  std::ofstream out(file, std::ios::binary | std::ios::trunc);
  out << text;
  out.close();
  if (!out) throw cannot_write(file);
}

// What the ranks tell each other after a step.
struct Shared {
  double loss = 0;     // mean over the ranks
  double aux = 0;      // likewise
  double seconds = 0;  // since the start of the loop, by rank 0's clock
  double memory = 0;   // largest
  bool stop = false;   // some rank got SIGTERM
};

// Losses of one step on this rank: the mean over the ranks is that of all tokens.
struct StepLoss {
  double tokens = 0;   // cross entropy
  double balance = 0;  // auxiliary loss of the experts
};

// What runs in it is no training: experts do not count their tokens.
class Evaluation {
 public:
  explicit Evaluation(Llama model) : model_(std::move(model)) { model_->eval(); }
  ~Evaluation() { model_->train(); }
  Evaluation(const Evaluation&) = delete;
  Evaluation& operator=(const Evaluation&) = delete;

 private:
  Llama model_;
};

// For what is computed from data that all ranks share: a mistake found there is found by all of them.
template <class F>
auto on_all_ranks_alike(F&& f) {
  try {
    return f();
  } catch (const ValueError& error) {
    throw AgreedError(error.what());
  }
}

/// Every group of ranks that works on a step, and what moves its bytes. `cut`: among how many ranks the gathered parameters are
/// cut after forward, 0 if they are not.
std::string transports(const HSDPModule& root, const LlamaParallel& axes, std::int64_t cut, bool maps) {
  std::vector<std::string> lines;
  const auto add = [&](const Comm& comm, bool mapped) {
    if (!comm.defined() || comm.size() == 1) return;
    const auto line = concat(comm.name(), ": ", comm.transport_name(), mapped && comm.maps_slices() ? ", shards mapped" : "");
    if (std::find(lines.begin(), lines.end(), line) == lines.end()) lines.push_back(line);
  };
  for (const auto& group : root.groups()) {
    const Comm& shards = group.shard_comm;
    add(shards, maps);
    add(group.replicate_comm, false);
    if (cut < 2 || shards.size() <= cut) continue;
    std::vector<int> members(static_cast<std::size_t>(cut));
    std::iota(members.begin(), members.end(), shards.rank() / static_cast<int>(cut) * static_cast<int>(cut));
    add(shards.subgroup(members), false);
  }
  for (const DeviceMesh& mesh : {axes.tp, axes.cp, axes.ep}) {
    if (mesh.defined()) add(mesh.get_group(), false);
  }
  std::string text;
  for (const std::string& line : lines) text += (text.empty() ? "" : "; ") + line;
  return text.empty() ? "none" : text;
}

class Trainer {
 public:
  Trainer(const Config& config, const World& world, const RunOptions& options)
      : config_(config),
        options_(options),
        world_(world),
        comm_(world.comm()),
        schedule_{.lr = config.optim.lr,
                  .shape = optim::lr_shape(config.optim.schedule),
                  .min_ratio = config.optim.min_lr_ratio,
                  .decay_share = config.optim.decay_share,
                  .warmup_steps = config.optim.warmup_steps,
                  .max_steps = config.train.max_steps,
                  .max_seconds = config.train.max_seconds},
        progress_(world.rank() == 0, config.log.every, config.train.max_steps) {}

  TrainResult run() {
    on_all_ranks_alike([&] {
      comm_.check_same("config", lines_of(to_toml(config_)), {.label = "hp-train"});
      plan_ = plan_batches(config_, world_.size());
      meshes_ = make_meshes(config_, plan_);
    });
    agree_on(comm_, [&] { batches_.emplace(config_, plan_, meshes_.data_rank); });
    on_all_ranks_alike(
        [&] { comm_.check_same("data", {concat("bytes of the text: ", batches_->corpus().size())}, {.label = "hp-train"}); });
    result_.dir = fs::path(config_.log.dir) / config_.log.name;
    checkpoints_.emplace(config_, world_, result_.dir, identify(batches_->corpus(), comm_));
    on_all_ranks_alike([&] { trace_ = TraceWindow(config_, result_.dir, world_.size()); });
    checkpoints_->claim(options_.patience);
    const auto saved = options_.resume ? checkpoints_->latest() : std::nullopt;
    on_all_ranks_alike([&] { build(); });
    if (saved) {
      restore(*saved);
    } else {
      checkpoints_->begin();
    }
    agree_on(comm_, [&] { open_files(saved); });
    announce();
    loop();
    finish();
    return std::move(result_);
  }

 private:
  void open_files(std::optional<std::int64_t> saved);
  void restore(std::int64_t step);
  void save(double warmup_seconds, double elapsed, double training_seconds, bool at_once);
  void announce();
  void build();
  void loop();
  void finish();
  std::string sample();

  Batch next_batch();
  StepLoss forward_backward();
  Shared share(const StepLoss& loss);
  double validate(std::int64_t step);
  [[nodiscard]] double eta(std::int64_t step, double elapsed) const;

  Config config_;
  RunOptions options_;
  StopSignal stop_;
  World world_;
  Comm comm_;
  BatchPlan plan_;
  TrainMeshes meshes_;
  Schedule schedule_;
  Progress progress_;
  std::optional<Batches> batches_;
  TraceWindow trace_;
  MetricsFile metrics_;
  Llama model_{nullptr};
  HSDPModule root_;
  std::optional<Updater> updater_;
  std::optional<RunCheckpoints> checkpoints_;
  Position position_;  // at the start of the loop
  LossPlot plot_;
  TrainResult result_;
  Clock::time_point loop_begin_;
};

void Trainer::open_files(std::optional<std::int64_t> saved) {
  if (world_.rank() != 0) return;
  write_file(result_.dir / "config.toml", to_toml(config_));
  if (!saved) {
    metrics_ = MetricsFile(result_.dir / "metrics.jsonl");
    return;
  }
  RunHistory history;
  metrics_ = MetricsFile(result_.dir / "metrics.jsonl", *saved, history);
  result_.history = std::move(history.steps);
  for (const auto& [step, loss] : history.validations) plot_.validation.push_back({static_cast<double>(step), loss});
}

void Trainer::restore(std::int64_t step) {
  position_ = checkpoints_->restore(step, root_, *updater_);
  batches_->seek(position_.windows);
  result_.resumed = result_.steps = position_.step;
  result_.tokens = position_.step * config_.train.batch_size * config_.data.seq_len;
  result_.checkpoint = checkpoints_->path_of(step);
}

void Trainer::save(double warmup_seconds, double elapsed, double training_seconds, bool at_once) {
  const trace::Span span("checkpoint");
  checkpoints_->save({.step = result_.steps,
                      .windows = batches_->sampler().position(),
                      .elapsed = elapsed,
                      .warmup_seconds = warmup_seconds,
                      .training_seconds = training_seconds,
                      .val_loss_start = result_.val_loss_start},
                     root_, *updater_, at_once);
  result_.checkpoint = checkpoints_->path_of(result_.steps);
}

void Trainer::announce() {
  const Splits& splits = batches_->splits();
  progress_.print(settings_table(config_));
  progress_.print(concat("Data       ", format_count(batches_->corpus().size()), " bytes in ", batches_->corpus().files(),
                         " file(s): ", format_count(splits.train.tokens()), " to train on, ",
                         splits.validation.tokens() > 0 ? concat(format_count(splits.validation.tokens()), " to validate on")
                                                        : "no validation (data.validation_fraction = 0)"));
  progress_.print(concat("Batch      ", config_.train.batch_size, " sequences of ", config_.data.seq_len, " tokens = ",
                         plan_.data_ranks(), " rank(s) x ", plan_.accumulation, " micro-batch(es) x ", plan_.micro_batch));
  const EngineBytes engine = plan_engine(config_, plan_, root_, *updater_);
  if (options_.resume)
    progress_.print(concat(
        "Resume     ", checkpoints_->restored().empty() ? "no checkpoint yet, from the beginning" : checkpoints_->restored()));
  if (position_.step > 0 && schedule_.progress(position_.step, position_.elapsed) >= 1)
    progress_.print(concat("           nothing is left to train: the checkpoint has ", position_.step, " step(s) and ",
                           format_seconds(position_.elapsed), ", train.max_steps = ", config_.train.max_steps,
                           ", train.max_seconds = ", config_.train.max_seconds));
  for (const std::string& line : checkpoints_->notes()) progress_.print(concat("           ", line));
  if (const std::string text = checkpoints_->describe(); !text.empty()) progress_.print(concat("Checkpoint ", text));
  progress_.print(concat("Transport  ", transports(root_, meshes_.model, config_.parallel.reshard_ranks, engine.maps)));
  progress_.print(memory_table(config_, plan_, engine));
}

void Trainer::build() {
  ShardedLlama sharded = assemble(config_, meshes_);
  model_ = std::move(sharded.model);
  root_ = std::move(sharded.root);
  init_llama(model_, root_, static_cast<std::uint64_t>(config_.train.seed));
  updater_.emplace(config_, root_);
  updater_->start();
}

Batch Trainer::next_batch() {
  const trace::Span span("data");
  return batches_->next();
}

StepLoss Trainer::forward_backward() {
  StepLoss sum;
  for (std::int64_t micro = 0; micro < plan_.accumulation; ++micro) {
    begin_micro_batch(config_, root_, micro + 1 == plan_.accumulation);
    const Batch batch = next_batch();
    const torch::Tensor loss = model_->loss(model_(batch.inputs), batch.targets) / static_cast<double>(plan_.accumulation);
    sum.tokens += loss.item<double>();
    torch::Tensor total = loss;
    if (const torch::Tensor aux = model_->take_aux_loss(); aux.defined()) {
      const torch::Tensor balance = aux / static_cast<double>(plan_.accumulation);
      sum.balance += balance.item<double>();
      total = loss + balance;
    }
    updater_->scaled(total).backward();
  }
  return sum;
}

Shared Trainer::share(const StepLoss& loss) {
  const trace::Span span("metrics");
  const torch::Tensor mine = torch::tensor({loss.tokens, loss.balance, seconds_since(loop_begin_),
                                            static_cast<double>(resident_bytes()), StopSignal::received() ? 1.0 : 0.0},
                                           torch::kDouble);
  const torch::Tensor all = torch::empty({world_.size(), mine.numel()}, torch::kDouble);
  comm_.all_gather_single(all, mine, {.label = "step metrics"}).wait();
  Shared shared;
  for (int rank = 0; rank < world_.size(); ++rank) {
    const double* row = all.const_data_ptr<double>() + mine.numel() * rank;
    shared.loss += row[0] / world_.size();
    shared.aux += row[1] / world_.size();
    shared.memory = std::max(shared.memory, row[3]);
    if (rank == 0) shared.seconds = row[2];
    shared.stop = shared.stop || row[4] != 0;
  }
  return shared;
}

double Trainer::validate(std::int64_t step) {
  if (batches_->validation_windows() == 0) return std::numeric_limits<double>::quiet_NaN();
  const trace::Span span("validate");
  const torch::NoGradGuard no_grad;
  const Updater::Averages averages = updater_->averages();
  const Evaluation evaluation(model_);
  const Clock::time_point begin = Clock::now();
  double sum = 0;
  for (std::int64_t round = 0; round < batches_->validation_rounds(); ++round) {
    std::int64_t real = 0;
    const Batch batch = batches_->validation(round, &real);
    const torch::Tensor logits = model_(batch.inputs);
    if (real > 0)
      sum += model_->loss(logits.narrow(0, 0, real), batch.targets.narrow(0, 0, real)).item<double>() * static_cast<double>(real);
  }
  const torch::Tensor total = torch::tensor({sum}, torch::kDouble);
  comm_.all_reduce(total, {.label = "validation loss"}).wait();
  // Ranks of tp and cp count the same sequences.
  const double loss = total.item<double>() / static_cast<double>(plan_.cp * plan_.tp * batches_->validation_windows());
  metrics_.write_validation(step, loss, seconds_since(begin));
  if (world_.rank() == 0) plot_.validation.push_back({static_cast<double>(step), loss});
  progress_.print(concat("step ", step, "  validation loss ", std::to_string(loss), "  (", batches_->validation_windows(),
                         " sequences, ", format_seconds(seconds_since(begin)), ")"));
  return loss;
}

double Trainer::eta(std::int64_t step, double elapsed) const {
  double left = std::numeric_limits<double>::max();
  if (schedule_.max_steps > 0) left = elapsed / static_cast<double>(step) * static_cast<double>(schedule_.max_steps - step);
  if (schedule_.max_seconds > 0) left = std::min(left, schedule_.max_seconds - elapsed);
  return std::max(left, 0.0);
}

void Trainer::loop() {
  const std::int64_t step_tokens = config_.train.batch_size * config_.data.seq_len;
  result_.val_loss_start = result_.val_loss_end = position_.step > 0 ? position_.val_loss_start : validate(0);
  double warmup_seconds = position_.warmup_seconds, elapsed = position_.elapsed, training_seconds = position_.training_seconds;
  loop_begin_ = Clock::now() - std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(elapsed));
  for (std::int64_t step = position_.step; schedule_.progress(step, elapsed) < 1; ++step) {
    if (trace_.begins_at(step + 1)) agree_on(comm_, [&] { trace_.start(); });
    const std::string number = std::to_string(step + 1);
    std::optional<trace::Span> span(std::in_place, "step", number);
    const Clock::time_point begin = Clock::now();
    if (step <= schedule_.warmup_steps) warmup_seconds = elapsed;
    StepMetrics m;
    const StepLoss loss = forward_backward();
    m.lr = schedule_.at(step, elapsed, warmup_seconds);
    const Updater::Outcome update = updater_->step(m.lr);
    m.grad_norm = update.grad_norm;
    m.loss_scale = update.loss_scale;
    model_->update_expert_bias();
    const Shared shared = share(loss);
    span.reset();
    const double step_seconds = seconds_since(begin);
    elapsed = shared.seconds;
    training_seconds += step_seconds;
    m.step = step + 1;
    m.tokens = m.step * step_tokens;
    m.epoch = batches_->sampler().epoch();
    m.loss = shared.loss;
    if (config_.model.aux_loss_weight > 0) m.aux_loss = shared.aux;
    m.memory = static_cast<std::int64_t>(shared.memory);
    m.step_ms = 1000 * step_seconds;
    m.tokens_per_s = static_cast<double>(step_tokens) / step_seconds;
    m.elapsed_s = elapsed;
    m.eta_s = eta(m.step, elapsed);
    metrics_.write(m);
    if (!std::isfinite(m.loss) || (update.stepped && !std::isfinite(m.grad_norm)))
      throw AgreedError(concat("[train] loss ", m.loss, " and gradient norm ", m.grad_norm, " at step ", m.step,
                               ", want finite numbers: lower optim.lr, or lengthen optim.warmup_steps"));
    const double fraction = schedule_.progress(m.step, elapsed);
    progress_.step(m, fraction, fraction >= 1);
    if (world_.rank() == 0) result_.history.push_back(m);
    result_.steps = m.step;
    result_.tokens = m.tokens;
    if (trace_.ends_at(m.step)) agree_on(comm_, [&] { trace_.stop(); });
    if (fraction < 1 && config_.train.eval_every > 0 && m.step % config_.train.eval_every == 0) (void)validate(m.step);
    result_.stopped = shared.stop && fraction < 1;
    if (result_.stopped || checkpoints_->due(m.step, fraction >= 1))
      save(warmup_seconds, elapsed, training_seconds, result_.stopped);
    if (result_.stopped) break;
  }
  checkpoints_->finish();
  if (trace_.wanted()) agree_on(comm_, [&] { trace_.stop(); });
  result_.seconds = elapsed;
  result_.tokens_per_s = static_cast<double>(result_.tokens) / training_seconds;
  if (!result_.stopped) result_.val_loss_end = validate(result_.steps);
}

std::string Trainer::sample() {
  std::string text;
  const Updater::Averages averages = updater_->averages();
  const Evaluation evaluation(model_);
  for (std::size_t i = 0; i < config_.sample.prompts.size(); ++i) {
    const auto seed = static_cast<std::uint64_t>(config_.train.seed) + i;
    const std::string sample = printable(generate(model_, config_.sample.prompts[i], config_.sample, config_.data.seq_len, seed));
    progress_.print(concat("\n--- sample ", i + 1, " of ", config_.sample.prompts.size(), " ---\n", sample));
    text += concat("--- sample ", i + 1, " ---\n", sample, '\n');
  }
  return text;
}

void Trainer::finish() {
  result_.world = world_.size();
  progress_.close();
  const std::string samples = result_.stopped ? "" : sample();
  agree_on(comm_, [&] {
    if (world_.rank() != 0) return;
    if (!samples.empty()) write_file(result_.dir / "samples.txt", samples);
    plot_.title = concat(config_.log.name, ": ", format_count(parameter_count(config_.model)), " parameters on ", world_.size(),
                         " rank(s)");
    for (const StepMetrics& m : result_.history) plot_.train.push_back({static_cast<double>(m.step), m.loss});
    write_file(result_.dir / "loss.svg", to_svg(plot_));
    if (!result_.stopped) write_file(result_.dir / "result.txt", to_string(result_) + '\n');
  });
  const fsdp::MemoryUse use = root_.memory_use();
  progress_.print(concat("\nEngine     parameter shards ", format_bytes(use.shards), ", gradient shards ",
                         format_bytes(use.gradients), ", pool for gathered units and reductions ",
                         format_bytes(use.pool + use.copies),
                         use.mapped > 0 ? concat(", seen in place of other ranks ", format_bytes(use.mapped)) : ""));
  progress_.print(concat("Files      ", result_.dir.string(), "/: config.toml metrics.jsonl loss.svg",
                         samples.empty() ? "" : " samples.txt"));
  if (!result_.checkpoint.empty()) progress_.print(concat("Checkpoint ", result_.checkpoint.string()));
  if (trace_.wanted()) progress_.print(concat("Trace      ", trace_.summary()));
}

}  // namespace

std::string to_string(const TrainResult& result) {
  char losses[96] = "";
  if (!std::isnan(result.val_loss_start) || !std::isnan(result.val_loss_end)) {
    std::snprintf(losses, sizeof losses, " val_loss_start=%.4f val_loss_end=%.4f", result.val_loss_start, result.val_loss_end);
  } else if (!result.history.empty()) {
    std::snprintf(losses, sizeof losses, " loss_end=%.4f", result.history.back().loss);
  }
  char text[160];
  std::snprintf(text, sizeof text, "world=%d%s tokens_per_s=%.0f", result.world, losses, result.tokens_per_s);
  return text;
}

TrainResult run_training(const Config& config, const World& world, const RunOptions& options) {
  return Trainer(config, world, options).run();
}

}  // namespace hyper_parallel::train
