#include <hyper_parallel/train/progress.h>

#include <unistd.h>

#include <algorithm>
#include <cmath>

#include <fmt/format.h>

namespace hyper_parallel::train {

std::string format_bytes(std::int64_t bytes) {
  const char* const units[] = {"B", "kB", "MB", "GB", "TB"};
  auto value = static_cast<double>(bytes);
  std::size_t unit = 0;
  while (value >= 999.5 && unit + 1 < std::size(units)) {
    value /= 1000;
    ++unit;
  }
  return unit == 0 ? fmt::format("{} B", bytes) : fmt::format("{:.{}f} {}", value, value < 99.95 ? 1 : 0, units[unit]);
}

std::string format_seconds(double seconds) {
  const auto total = static_cast<std::int64_t>(std::llround(std::clamp(seconds, 0.0, 3.6e9)));
  if (total < 3600) return fmt::format("{}:{:02}", total / 60, total % 60);
  return fmt::format("{}:{:02}:{:02}", total / 3600, total / 60 % 60, total % 60);
}

std::string format_count(std::int64_t count) {
  std::string digits = fmt::format("{}", count);
  for (auto i = static_cast<std::ptrdiff_t>(digits.size()) - 3; i > (count < 0 ? 1 : 0); i -= 3)
    digits.insert(static_cast<std::size_t>(i), 1, ',');
  return digits;
}

std::string settings_table(const Config& config) {
  std::string text = "Settings\n";
  std::string section;
  for (const FieldInfo& info : describe(config)) {
    const std::string source = config.where(concat(info.section, '.', info.key));
    const std::string head = info.section == section ? "" : info.section;
    section = info.section;
    text += fmt::format("  {:<10} {:<21} {:<24}{}\n", head, info.key, info.value, source == "default" ? "" : "  " + source);
  }
  return text;
}

std::string memory_table(const Config& config, const BatchPlan& batches, const EngineBytes& engine) {
  const MemoryPlan plan = plan_memory(config, batches, engine);
  const std::int64_t count = parameter_count(config.model);
  std::string text = fmt::format("Model      {} parameters in {} units\n", format_count(count), llama_units(config.model).size());
  std::string axes = fmt::format("{} shards x {} replicas", batches.dp_shard * batches.cp, batches.dp_replicate);
  if (batches.cp > 1) axes += fmt::format(", cp {}", batches.cp);
  if (batches.tp > 1) axes += fmt::format(", tp {}", batches.tp);
  if (batches.ep > 1) axes += fmt::format(", ep {}", batches.ep);
  text += fmt::format("Memory plan of one of {} ranks ({})\n", batches.world(), axes);
  std::vector<std::pair<const char*, std::int64_t>> rows = {{"parameter shards", engine.shards},
                                                            {"gradient shards", engine.gradients},
                                                            {"optimizer state", engine.optimizer_state},
                                                            {"gather and reduce buffers", engine.pool},
                                                            {"activations (estimate)", plan.activations}};
  if (engine.staging > 0) rows.emplace_back("checkpoint buffer (about)", engine.staging);
  rows.emplace_back("total, without torch itself", plan.total());
  for (const auto& [name, bytes] : rows) text += fmt::format("  {:<28} {:>10}\n", name, format_bytes(bytes));
  const MemoryPlan uncut = plan_memory(config, {.micro_batch = batches.micro_batch}, {});
  const std::int64_t whole = 2 * 4 * count + optimizer_bytes(config) + uncut.activations;
  text += fmt::format("  {:<28} {:>10}\n", "the same without sharding", format_bytes(whole));
  return text;
}

std::string step_line(const StepMetrics& m, std::int64_t max_steps) {
  const std::string of = max_steps > 0 ? fmt::format("/{}", max_steps) : "";
  return fmt::format("step {:>6}{}  loss {:.4f}  grad_norm {:.3f}  lr {:.2e}  {:>7} tokens/s  {:>6.1f} ms  {}  ETA {}", m.step,
                     of, m.loss, m.grad_norm, m.lr, format_count(std::llround(m.tokens_per_s)), m.step_ms, format_bytes(m.memory),
                     format_seconds(m.eta_s));
}

Progress::Progress(bool enabled, std::int64_t every, std::int64_t max_steps, std::FILE* out)
    : enabled_(enabled), terminal_(enabled && ::isatty(::fileno(out)) == 1), every_(every), max_steps_(max_steps), out_(out) {}

Progress::~Progress() { close(); }

void Progress::erase_bar() {
  if (bar_shown_) std::fputs("\r\033[K", out_);
  bar_shown_ = false;
}

void Progress::print(const std::string& text) {
  if (!enabled_) return;
  erase_bar();
  fmt::print(out_, "{}{}", text, text.empty() || text.back() != '\n' ? "\n" : "");
  std::fflush(out_);
}

void Progress::step(const StepMetrics& metrics, double fraction, bool last) {
  if (!enabled_) return;
  const bool line = last || metrics.step == 1 || metrics.step % every_ == 0;
  if (line) print(step_line(metrics, max_steps_));
  if (!terminal_) return;
  constexpr int kWidth = 20;
  const int filled = static_cast<int>(std::clamp(fraction, 0.0, 1.0) * kWidth);
  erase_bar();
  fmt::print(out_, "[{:#<{}}{:.<{}}] {:>3.0f} %  step {}  loss {:.3f}  {} tokens/s  ETA {}", "", filled, "", kWidth - filled,
             100 * fraction, metrics.step, metrics.loss, format_count(std::llround(metrics.tokens_per_s)),
             format_seconds(metrics.eta_s));
  std::fflush(out_);
  bar_shown_ = true;
}

void Progress::close() {
  if (!enabled_) return;
  erase_bar();
  std::fflush(out_);
}

}  // namespace hyper_parallel::train
