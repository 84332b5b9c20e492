#include "train/resume.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <map>
#include <mutex>
#include <set>
#include <span>
#include <utility>
#include <vector>

#include <torch/torch.h>

#include <nlohmann/json.hpp>

#include <hyper_parallel/core/log.h>
#include <hyper_parallel/fsdp/init.h>
#include <hyper_parallel/mesh/device_mesh.h>
#include <hyper_parallel/train/agree.h>

#include "ckpt/commit.h"
#include "ckpt/crc32c.h"

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

std::string key_of(const FieldInfo& field) { return concat(field.section, '.', field.key); }

/// Settings that a checkpoint is bound to: with another value its weights would be another function, its optimizer state would
/// mean something else, or its position in the text another place.
bool binds(const FieldInfo& field) {
  static const std::set<std::string> kOthers = {"data.seq_len", "data.validation_fraction", "train.seed", "train.batch_size"};
  static const std::set<std::string> kFree = {"optim.lr",          "optim.schedule",     "optim.min_lr_ratio",
                                              "optim.decay_share", "optim.warmup_steps", "optim.weight_decay",
                                              "optim.clip_norm"};
  const bool whole = field.section == "model" || field.section == "optim" || field.section == "precision";
  return whole ? !kFree.contains(key_of(field)) : kOthers.contains(key_of(field));
}

json settings_of(const Config& config) {
  json settings = json::object();
  for (const FieldInfo& field : describe(config)) settings[key_of(field)] = {field.value, config.where(key_of(field))};
  return settings;
}

std::string hex(std::uint32_t value) {
  char text[9];
  std::snprintf(text, sizeof(text), "%08x", value);
  return text;
}

/// Gives what is at `from` another name. \return it
fs::path move_aside(const fs::path& from, const std::string& suffix) {
  fs::path aside;
  std::error_code error;
  for (int number = 1; aside.empty() || fs::exists(fs::symlink_status(aside, error)); ++number) {
    const std::string more = suffix.empty() || number > 1 ? concat('.', number) : "";
    aside = concat(from.string(), suffix, more);
  }
  fs::rename(from, aside, error);
  if (error) throw Error(concat("[checkpoint] cannot rename ", from.string(), " to ", aside.string(), ": ", error.message()));
  return aside;
}

void warn_and_rename(const fs::path& path, const std::string& why) {
  const fs::path aside = move_aside(path, ".aside");
  log::warn(path.string(), ' ', why, " and is ", aside.string(), " now");
}

json number(double value) { return std::isfinite(value) ? json(value) : json(nullptr); }
double real(const json& value) { return value.is_number() ? value.get<double>() : std::numeric_limits<double>::quiet_NaN(); }

at::Generator generator() { return at::detail::getDefaultCPUGenerator(); }

/// The state of each rank's random numbers, one row for each.
DTensor random_states(const World& world) {
  at::Generator mine = generator();
  const std::lock_guard lock(mine.mutex());
  return DTensor::from_local(mine.get_state().unsqueeze(0), init_device_mesh("cpu", {world.size()}, {"rank"}), {Shard(0)},
                             {.shape = std::vector<std::int64_t>{world.size(), mine.get_state().numel()}});
}

}  // namespace

TextMark identify(const Corpus& corpus, const Comm& comm) {
  const std::int64_t size = corpus.size(), part = (size + comm.size() - 1) / comm.size();
  const std::int64_t end = std::min(size, part * (comm.rank() + 1));
  ckpt::PartialCrc32c mine;
  for (std::int64_t at = part * comm.rank(); at < end;) {
    const std::span<const std::byte> rest = corpus.bytes_at(at);
    const auto bytes = rest.first(std::min(rest.size(), static_cast<std::size_t>(end - at)));
    mine.add(static_cast<std::uint64_t>(at), bytes);
    at += static_cast<std::int64_t>(bytes.size());
  }
  const auto bytes = static_cast<std::uint64_t>(size);
  std::uint32_t all = 0;
  for (const std::string& text : comm.all_gather_string(std::to_string(mine.contribution(bytes)), {.label = "hp-train"}))
    all ^= static_cast<std::uint32_t>(std::stoul(text));
  return {.bytes = size, .crc32c = ckpt::PartialCrc32c::finish(all, bytes)};
}

RunCheckpoints::RunCheckpoints(const Config& config, const World& world, const fs::path& run_dir, const TextMark& text)
    : config_(config),
      world_(world),
      run_dir_(run_dir),
      folder_(config.checkpoint.dir.empty() ? run_dir / "checkpoints" : fs::path(config.checkpoint.dir)),
      text_(text),
      checkpointer_(folder_, {.keep_last = static_cast<int>(config.checkpoint.keep_last), .comm = world.comm()}) {}

void RunCheckpoints::claim(std::chrono::milliseconds patience) {
  const auto timeout = static_cast<std::int64_t>(1000 * config_.parallel.timeout_seconds);  // of the ranks that wait
  patience_ = std::min(patience, std::chrono::milliseconds(timeout / 2));
  agree_on(world_.comm(), [&] {
    if (world_.rank() != 0) return;
    run_lock_ = FolderLock(run_dir_, concat("log.dir and log.name: ", config_.where("log.dir")), patience_);
    if (config_.checkpoint.every > 0) claim_saves();
  });
}

void RunCheckpoints::claim_saves() {
  std::error_code ignored;
  if (lock_.held() || fs::equivalent(folder_, run_dir_, ignored)) return;
  lock_ = FolderLock(folder_, concat("checkpoint.dir: ", config_.where("checkpoint.dir")), patience_);
}

std::optional<std::int64_t> RunCheckpoints::latest() {
  std::optional<std::int64_t> mine;
  std::error_code error, ignored;
  std::set<std::string> passed;
  if (world_.rank() == 0) {
    const std::vector<std::int64_t> steps = checkpointer_.steps();
    for (auto step = steps.rbegin(); step != steps.rend() && !mine; ++step) {
      const std::string other = other_step(*step);
      if (other.empty())
        mine = *step;
      else
        notes_.push_back(concat(path_of(*step).string(), " is passed over: it ", other));
    }
  }
  const std::string used = path_of(mine.value_or(0)).filename().string();
  for (auto entry = fs::directory_iterator(folder_, error); !error && entry != fs::directory_iterator(); entry.increment(error)) {
    const std::string name = entry->path().filename().string();
    const bool is_step =
        name.size() == used.size() && name.starts_with("step-") && name.find_first_not_of("0123456789", 5) == std::string::npos;
    if (is_step && (!mine || name > used) && !fs::exists(entry->path() / ckpt::checkpoint_folder().mark, ignored))
      passed.insert(name);
  }
  for (const std::string& name : passed)
    notes_.push_back(concat((folder_ / name).string(), " is passed over: it has no checkpoint.json"));
  const std::string first = world_.comm().all_gather_string(mine ? std::to_string(*mine) : "", {.label = "hp-train"})[0];
  return first.empty() ? std::nullopt : std::optional<std::int64_t>(std::stoll(first));
}

std::string RunCheckpoints::other_step(std::int64_t step) const {
  try {
    const json extra = json::parse(ckpt::read_info(path_of(step)).extra);
    if (!extra.is_object() || !extra.contains("hp_train")) return {};
    const auto recorded = extra.at("step").get<std::int64_t>();
    return recorded == step ? "" : concat("is the checkpoint of step ", recorded, ", want ", step, " as its name says");
  } catch (const std::exception&) {  // damaged
    return {};
  }
}

ckpt::StateDict RunCheckpoints::state_to_save(const HSDPModule& root, const Updater& updater) const {
  ckpt::StateDict state;
  state.add_model(root);
  updater.add_to(state);
  state.add(kRandom, random_states(world_));
  return state;
}

void RunCheckpoints::check_settings(const json& saved, const fs::path& path) {
  std::map<std::string, std::string> defaults;
  for (const FieldInfo& field : train::describe({})) defaults[key_of(field)] = field.value;
  std::string text;
  std::vector<std::string> changes;
  for (const FieldInfo& field : train::describe(config_)) {
    const std::string key = key_of(field);
    const auto entry = saved.find(key);
    const bool there = entry != saved.end();
    // A setting that the program did not have then, or did not note.
    if (!there && !binds(field)) continue;
    const std::string was = there ? entry->at(0).get<std::string>() : defaults[key];
    if (was == field.value) continue;
    if (!binds(field)) {
      changes.push_back(concat("changed: ", key, ' ', was, " -> ", field.value));
      continue;
    }
    text += concat(text.empty() ? "" : "; ", key, " = ", field.value, " (", config_.where(key), "), want ", was,
                   " as in the checkpoint (", there ? entry->at(1).get<std::string>() : "default", " of that run)");
  }
  check_value(text.empty(), "resume", path.string(), ": ", text);
  notes_.insert(notes_.end(), changes.begin(), changes.end());
}

void RunCheckpoints::check_text(const json& saved, const fs::path& path) const {
  const auto bytes = saved.at("text_bytes").get<std::int64_t>();
  check_value(bytes == text_.bytes, "resume", path.string(), ": the text has ", text_.bytes,
              " bytes (data.path: ", config_.where("data.path"), "), want the ", bytes, " bytes of the run that was saved");
  // Checkpoints of earlier releases say no more than the size.
  if (!saved.contains("text_crc32c")) return;
  const auto crc = saved.at("text_crc32c").get<std::string>();
  check_value(crc == hex(text_.crc32c), "resume", path.string(), ": the text has checksum ", hex(text_.crc32c),
              " (data.path: ", config_.where("data.path"), "), want ", crc,
              " as the text of the run that was saved, of as many bytes");
}

Position RunCheckpoints::restore(std::int64_t step, const HSDPModule& root, Updater& updater) {
  const fs::path path = path_of(step);
  ckpt::CheckpointInfo info;
  json extra;
  agree_on(world_.comm(), [&] {
    info = ckpt::read_info(path);
    extra = json::parse(info.extra);
    check_value(extra.is_object() && extra.contains("hp_train"), "resume", path.string(), " was not saved by hp-train");
    check_settings(extra.at("settings"), path);
    check_text(extra, path);
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

void RunCheckpoints::begin() const {
  at::Generator mine = generator();
  const std::lock_guard lock(mine.mutex());
  mine.set_current_seed(named_seed(0));
}

bool RunCheckpoints::due(std::int64_t step, bool last) const {
  const std::int64_t every = config_.checkpoint.every;
  return every > 0 && (last || step % every == 0);
}

void RunCheckpoints::save(const Position& position, const HSDPModule& root, const Updater& updater, bool at_once) {
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
                      {"text_bytes", text_.bytes},
                      {"text_crc32c", hex(text_.crc32c)},
                      {"settings", settings_of(config_)},
                      {"config", to_toml(config_)}};
  agree_on(world_.comm(), [&] {
    if (world_.rank() != 0) return;
    claim_saves();  // without checkpoint.every, only SIGTERM saves
    if (!began_) set_aside();
    make_way(position.step);
  });
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

void RunCheckpoints::set_aside() {
  const std::vector<std::int64_t> steps = checkpointer_.steps();
  if (!restored_.empty()) {
    for (const std::int64_t step : steps) {
      if (const std::string other = other_step(step); !other.empty()) warn_and_rename(path_of(step), other);
    }
    return;
  }
  if (steps.empty()) return;
  const fs::path aside = move_aside(path_of(0).parent_path(), "");
  log::info("checkpoints of an earlier run are in ", aside.string(), " now");
  std::error_code ignored;
  fs::remove(aside / FolderLock::kFile, ignored);
  lock_ = FolderLock();
  claim_saves();
}

void RunCheckpoints::make_way(std::int64_t step) const {
  const fs::path path = path_of(step);
  const std::string why = ckpt::in_the_way(path, ckpt::checkpoint_folder());
  if (!why.empty()) warn_and_rename(path, why);
}

void RunCheckpoints::finish() {
  alike([&] { checkpointer_.wait(); });
}

std::string RunCheckpoints::describe() const {
  const CheckpointConfig& c = config_.checkpoint;
  if (c.every == 0) return {};
  const std::string kept = c.keep_last > 0 ? concat(", the last ", c.keep_last, c.keep_last == 1 ? " is kept" : " are kept") : "";
  return concat("every ", c.every, " step(s) to ", folder_.string(), kept, c.async ? ", written in the background" : "");
}

}  // namespace hyper_parallel::train
