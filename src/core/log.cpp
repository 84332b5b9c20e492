#include <hyper_parallel/core/log.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <string>

namespace hyper_parallel::log {
namespace {

thread_local int this_rank = -1;

constexpr std::array<std::string_view, 5> kNames{"debug", "info", "warn", "error", "off"};

Level level_from_environment() {
  const char* text = std::getenv("HP_LOG");
  if (text == nullptr || *text == '\0') return Level::kWarn;
  for (std::size_t i = 0; i < kNames.size(); ++i) {
    if (kNames[i] == text) return static_cast<Level>(i);
  }
  std::fprintf(stderr, "[log] HP_LOG=\"%s\", want debug, info, warn, error or off; using warn\n", text);
  return Level::kWarn;
}

std::atomic<Level>& current_level() {
  static std::atomic<Level> level{level_from_environment()};
  return level;
}

std::string time_of_day() {
  const auto now = std::chrono::system_clock::now();
  const auto seconds = std::chrono::system_clock::to_time_t(now);
  const auto millis = std::chrono::duration_cast<std::chrono::milliseconds>(now.time_since_epoch()).count() % 1000;
  std::tm parts{};
  localtime_r(&seconds, &parts);
  std::array<char, 32> text{};
  const auto n = std::strftime(text.data(), text.size(), "%H:%M:%S", &parts);
  std::snprintf(text.data() + n, text.size() - n, ".%03d", static_cast<int>(millis));
  return text.data();
}

}  // namespace

void set_level(Level level) { current_level().store(level, std::memory_order_relaxed); }

bool enabled(Level level) { return level != Level::kOff && level >= current_level().load(std::memory_order_relaxed); }

void set_rank(int rank) { this_rank = rank; }

void write(Level level, std::string_view message) {
  if (!enabled(level)) return;
  const auto name = kNames[static_cast<std::size_t>(level)];
  const auto who = this_rank < 0 ? std::string() : concat(" [rank ", this_rank, ']');
  const auto line = concat(time_of_day(), " hyper_parallel ", name, who, ' ', message, '\n');
  // One call, so that lines of several ranks do not mix.
  std::fwrite(line.data(), 1, line.size(), stderr);
}

}  // namespace hyper_parallel::log
