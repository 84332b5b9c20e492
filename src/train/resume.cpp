#include "train/resume.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include <torch/torch.h>

#include <nlohmann/json.hpp>

#include <hyper_parallel/core/log.h>
#include <hyper_parallel/fsdp/init.h>
#include <hyper_parallel/mesh/device_mesh.h>
#include <hyper_parallel/train/agree.h>
#include <hyper_parallel/train/progress.h>

namespace hyper_parallel::train {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr const char* kRandom = "random";

/// ckpt throws the same on all ranks.
template <class F>
auto alike(F&& f) {
  try {
    return f();
  } catch (const ValueError& error) {
    throw AgreedError(error.what());
  } catch (const CheckpointError& error) {
    throw AgreedError(error.what());
  }
}

/// Settings that a checkpoint is bound to: another value would be another run.
bool matters(const FieldInfo& field) {
  static const std::map<std::string, std::vector<std::string>> kSome = {{"data", {"seq_len", "validation_fraction"}},
                                                                        {"train", {"seed", "batch_size"}}};
  if (field.section == "model" || field.section == "optim" || field.section == "precision") return true;
  const auto some = kSome.find(field.section);
  return some != kSome.end() && std::find(some->second.begin(), some->second.end(), field.key) != some->second.end();
}

std::string key_of(const FieldInfo& field) { return concat(field.section, '.', field.key); }

json settings_of(const Config& config) {
  json settings = json::object();
  for (const FieldInfo& field : describe(config)) {
    if (matters(field)) settings[key_of(field)] = {field.value, config.where(key_of(field))};
  }
  return settings;
}

json number(double value) { return std::isfinite(value) ? json(value) : json(nullptr); }
double real(const json& value) { return value.is_number() ? value.get<double>() : std::numeric_limits<double>::quiet_NaN(); }

/// ValueError that names each setting with both places.
void check_settings(const Config& config, const json& saved, const fs::path& path) {
  std::map<std::string, std::string> defaults;
  for (const FieldInfo& field : describe({})) defaults[key_of(field)] = field.value;
  std::string text;
  for (const FieldInfo& field : describe(config)) {
    const std::string key = key_of(field);
    if (!matters(field)) continue;
    const auto entry = saved.find(key);
    // A setting that the program did not have then.
    const std::string was = entry != saved.end() ? entry->at(0).get<std::string>() : defaults[key];
    if (was == field.value) continue;
    text +=
        concat(text.empty() ? "" : "; ", key, " = ", field.value, " (", config.where(key), "), want ", was,
               " as in the checkpoint (", entry != saved.end() ? entry->at(1).get<std::string>() : "default", " of that run)");
  }
  check_value(text.empty(), "resume", path.string(), ": ", text);
}

at::Generator generator() { return at::detail::getDefaultCPUGenerator(); }

/// The state of each rank's random numbers, one row for each.
DTensor random_states(const World& world) {
  at::Generator mine = generator();
  const std::lock_guard lock(mine.mutex());
  return DTensor::from_local(mine.get_state().unsqueeze(0), init_device_mesh("cpu", {world.size()}, {"rank"}), {Shard(0)},
                             {.shape = std::vector<std::int64_t>{world.size(), mine.get_state().numel()}});
}

}  // namespace

RunCheckpoints::RunCheckpoints(const Config& config, const World& world, const fs::path& run_dir)
    : config_(config),
      world_(world),
      folder_(config.checkpoint.dir.empty() ? run_dir / "checkpoints" : fs::path(config.checkpoint.dir)),
      checkpointer_(folder_, {.keep_last = static_cast<int>(config.checkpoint.keep_last), .comm = world.comm()}) {}

std::optional<std::int64_t> RunCheckpoints::latest() const {
  const auto mine = checkpointer_.latest();
  const std::string first = world_.comm().all_gather_string(mine ? std::to_string(*mine) : "", {.label = "hp-train"})[0];
  return first.empty() ? std::nullopt : std::optional<std::int64_t>(std::stoll(first));
}

ckpt::StateDict RunCheckpoints::state_to_save(const HSDPModule& root, const Updater& updater) const {
  ckpt::StateDict state;
  state.add_model(root);
  updater.add_to(state);
  state.add(kRandom, random_states(world_));
  return state;
}

Position RunCheckpoints::restore(std::int64_t step, const HSDPModule& root, Updater& updater, std::int64_t text_bytes) {
  const fs::path path = path_of(step);
  ckpt::CheckpointInfo info;
  json extra;
  agree_on(world_.comm(), [&] {
    info = ckpt::read_info(path);
    extra = json::parse(info.extra);
    check_value(extra.is_object() && extra.contains("hp_train"), "resume", path.string(), " was not saved by hp-train");
    check_settings(config_, extra.at("settings"), path);
    const auto bytes = extra.at("text_bytes").get<std::int64_t>();
    check_value(bytes == text_bytes, "resume", path.string(), ": the text has ", text_bytes,
                " bytes (data.path: ", config_.where("data.path"), "), want the ", bytes, " bytes of the run that was saved");
  });
  return alike([&] {
    ckpt::StateDict state;
    state.add_model(root);
    updater.add_to(state, info);
    std::vector<std::string> prefixes = {"model.", "optim.", "ema."};
    const bool same_world = info.world_size == world_.size();
    const DTensor random = random_states(world_);
    if (same_world) {
      state.add(kRandom, random);
      prefixes.emplace_back(kRandom);
    }
    (void)ckpt::load(path, state, {.prefixes = prefixes, .comm = world_.comm()});
    at::Generator mine = generator();
    const std::lock_guard lock(mine.mutex());
    if (same_world) {
      mine.set_state(random.to_local().squeeze(0).contiguous());
    } else {  // other ranks, other streams
      mine.set_current_seed(named_seed(step));
    }
    updater.set_counters({.updates = extra.at("updates").get<std::int64_t>(),
                          .scaler = {.scale = extra.at("loss_scale").get<double>(),
                                     .growth_tracker = extra.at("growth_tracker").get<std::int64_t>()}});
    restored_ = concat("step ", step, " of ", folder_.string(), ", saved by ", info.world_size, " rank(s)");
    return Position{.step = extra.at("step").get<std::int64_t>(),
                    .windows = extra.at("windows").get<std::int64_t>(),
                    .elapsed = extra.at("elapsed_s").get<double>(),
                    .warmup_seconds = extra.at("warmup_s").get<double>(),
                    .training_seconds = extra.at("training_s").get<double>(),
                    .val_loss_start = real(extra.at("val_loss_start"))};
  });
}

std::uint64_t RunCheckpoints::named_seed(std::int64_t step) const {
  const auto seed = static_cast<std::uint64_t>(config_.train.seed);
  at::Generator mixed = fsdp::named_generator(seed, concat("rank ", world_.rank(), " of ", world_.size(), " at step ", step));
  return mixed.current_seed();
}

bool RunCheckpoints::due(std::int64_t step, bool last) const {
  const std::int64_t every = config_.checkpoint.every;
  return every > 0 && (last || step % every == 0);
}

void RunCheckpoints::save(const Position& position, const HSDPModule& root, const Updater& updater, std::int64_t text_bytes,
                          bool at_once) {
  const Updater::Counters counters = updater.counters();
  const json extra = {{"hp_train", 1},
                      {"step", position.step},
                      {"windows", position.windows},
                      {"elapsed_s", position.elapsed},
                      {"warmup_s", position.warmup_seconds},
                      {"training_s", position.training_seconds},
                      {"val_loss_start", number(position.val_loss_start)},
                      {"updates", counters.updates},
                      {"loss_scale", counters.scaler.scale},
                      {"growth_tracker", counters.scaler.growth_tracker},
                      {"text_bytes", text_bytes},
                      {"settings", settings_of(config_)},
                      {"config", to_toml(config_)}};
  if (restored_.empty() && !began_) agree_on(world_.comm(), [&] { set_aside(); });
  began_ = true;
  alike([&] {
    const ckpt::StateDict state = state_to_save(root, updater);
    if (config_.checkpoint.async && !at_once) {
      checkpointer_.save_async(position.step, state, extra.dump());
    } else {
      checkpointer_.save(position.step, state, extra.dump());
    }
  });
}

void RunCheckpoints::set_aside() const {
  if (world_.rank() != 0 || checkpointer_.steps().empty()) return;
  const fs::path folder = checkpointer_.path_of(0).parent_path();
  fs::path aside;
  for (int number = 1; aside.empty() || fs::exists(aside); ++number) aside = concat(folder.string(), '.', number);
  std::error_code error;
  fs::rename(folder, aside, error);
  if (error) throw Error(concat("[checkpoint] cannot rename ", folder.string(), " to ", aside.string(), ": ", error.message()));
  log::info("checkpoints of an earlier run are in ", aside.string(), " now");
}

void RunCheckpoints::finish() {
  alike([&] { checkpointer_.wait(); });
}

std::string RunCheckpoints::describe(const HSDPModule& root, const Updater& updater) const {
  const CheckpointConfig& c = config_.checkpoint;
  if (c.every == 0) return {};
  const std::string kept = c.keep_last > 0 ? concat(", the last ", c.keep_last, c.keep_last == 1 ? " is kept" : " are kept") : "";
  // The optimizer has no state before its first step.
  ckpt::StateDict model;
  model.add_model(root);
  const std::int64_t staging = ckpt::bytes_to_write(model, world_.comm()) + updater.state_bytes() / config_.parallel.dp_replicate;
  const std::string buffer = c.async ? concat("; buffer of about ", format_bytes(staging), " a rank") : "";
  return concat("every ", c.every, " step(s) to ", folder_.string(), kept, buffer);
}

}  // namespace hyper_parallel::train
